"""Low-rank adapters (LoRA) of a run: which layers have them, and their rank, from the row's words or its recipe.

NVIDIA              rank 16 beside the products of queries, keys and values: recipes for benchmarks set
                    `target_modules` to `linear_qkv` (NeMo, collections/llm/recipes/llama3_70b.py; Megatron Bridge,
                    scripts/performance, llama3_70b_lora_config)
others              rank 16 beside every linear layer of the blocks, which is noted
"""

import re

from planner.models.adapters import Adapters
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.stack.states import FLAGS
from planner.validation.unsupported import UnsupportedError

_IN_FLAGS, _IN_NOTES = r"lora", r"(?<![/\w])q?lora\b"
_QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
_RANK = 16
_SAID = re.compile(r"\blora[-_ ]?(?:r|rank|dim)\s*[=: ]\s*(\d{1,4})\b")
_NVIDIA = r"nemo|megatron[-_ ]bridge|dgxc|\bnvidia\b"


def adapters_of_row(row: Row, notes: list[str]) -> Adapters | None:
    """The adapters of a row; None if all weights are trained.

    Raises UnsupportedError for adapters beside weights of fewer bits (QLoRA), and for DoRA.
    """
    flags = row.words(*FLAGS)
    words = f"{flags}; {row.text('notes').lower()}"
    if not (mentions(flags, _IN_FLAGS) or mentions(words, _IN_NOTES)):
        return None
    if mentions(words, r"qlora|(?<![a-z])dora\b"):
        raise UnsupportedError("adapters stand beside weights in four bits (QLoRA), or scale them (DoRA): not priced")
    said = _SAID.search(words)
    rank = int(said[1]) if said else _RANK
    if re.search(_NVIDIA, row.text("source").lower()):
        notes.append(f"adapters (LoRA) of rank {rank} beside queries, keys and values, as NVIDIA's recipes have them")
        return Adapters(rank=rank, alpha=2.0 * rank, layers=_QUERIES_KEYS_VALUES)
    notes.append(f"adapters (LoRA) of rank {rank} beside every linear layer of the blocks: which is not said")
    return Adapters(rank=rank, alpha=2.0 * rank)
