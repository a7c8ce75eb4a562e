"""The training stack of a run, as far as its row says.

    what the row says                                            stack
    a name in its column `stack`                                 that one; of Megatron-LM that of its date; modules of
                                                                 Hugging Face under DeepSpeed that of DeepSpeed
    a device of Ascend                                           mindformers by its name, else mindspeed
    PaddlePaddle                                                 paddle
    Megatron FSDP                                                megatron, whatever the ZeRO stage
    DeepSpeed, ZeRO 3 or less                                    deepspeed-zero3, deepspeed
    MosaicML                                                     llm-foundry
    NeMo, Megatron Bridge                                        nemo; nemo-2606 with experts in fp8, from container
                                                                 26.06 on
    InternEvo                                                    internevo
    Transformer Engine                                           megatron
    ZeRO 3, or modules of Hugging Face                           fsdp, fsdp-compiled where it is compiled
    a loop of PyTorch's own, compiled                            fsdp-compiled
    JAX (MaxText, Pax, Levanter, AXLearn)                        fsdp-compiled: XLA makes one kernel of a chain, too
    anything else                                                megatron-2021 before 2023 without fused attention,
                                                                 else megatron

Words are searched in flags and source first, and in notes if those name none; a denied word ("not NeMo") does not
count.
"""

import re
from dataclasses import dataclass

from planner.validation.frameworks.recipes import BRIDGE
from planner.validation.frameworks.traits import HUGGING_FACE, MEGATRON_WORDS, OWN_VOCABULARY, runs_on_jax
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.stack.experts import fuses_experts

_NEMO = rf"nemo|{BRIDGE}"

_LOOP = (
    r"\b(?:py)?torch\b(?!\.compile)[^;,]*\b(?:ddp|data[- ]parallel)|\bddp\b|distributeddataparallel|\bplain pytorch\b"
    r"|(?:^|[;,])\s*pytorch(?:\s+v?\d[\w.+]*)?\s*(?=[;,]|$)"
)
"""Words for a training loop in plain PyTorch, with "PyTorch 2.8" as a flag of its own among them. If it is compiled,
its chains are kernels of inductor, as under compiled FSDP, and not of Megatron."""

_NVIDIA_KERNELS = "2024"
"""Date before which NeMo used the Megatron-LM kernels of its time, and overlapped no communication unless told to."""

_PADS_SHAPES = "2024"
"""Date from which compilers pad the rows of products to multiples of 16 bytes (shape_padding of
torch/_inductor/config.py is on since PyTorch 2.2, and was off in 2.0)."""

_MEGATRON_OF_ITS_DATE = "megatron-lm"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Framework:
    """Words for a framework, words that exclude it, its stack, and the ZeRO stages for which it counts."""

    words: str
    stack: str
    unless: str = ""
    zero: tuple[int, ...] = (0, 1, 2, 3)


_FRAMEWORKS = (
    _Framework(words=r"paddle", stack="paddle"),
    # Megatron's own FSDP, whose layers are Megatron's (megatron/core/distributed/fsdp)
    _Framework(words=r"megatron[-_ ]fsdp", unless=_NEMO, stack=_MEGATRON_OF_ITS_DATE),
    _Framework(words=r"deepspeed", stack="deepspeed"),
    _Framework(words=r"llm-foundry|mosaicml", stack="llm-foundry", zero=(3,)),
    _Framework(words=_NEMO, stack="nemo"),
    _Framework(words=r"internevo|internlm", stack="internevo", zero=(0, 1, 2)),
    _Framework(words=r"transformer engine|\bte\b", stack="megatron", zero=(0, 1, 2)),
)
"""The first one that is mentioned counts."""


def stack_of(row: Row, zero: int) -> str:
    """The stack that a row names, else that of words in its flags and source, else of words in its notes.

    Raises RequestError for an unknown stack.
    """
    if (named := row.stack()) is not None:
        return _named(row, named, zero)
    if runs_on_jax(row):
        return "fsdp-compiled"
    if row.text("profile").startswith("ascend"):
        return "mindformers" if mentions(row.text("source").lower(), r"mindformers") else "mindspeed"
    for columns in (("source", "other_flags", "distributed_optimizer"), ("notes",)):
        if (found := _mentioned(row, row.words(*columns), zero)) is not None:
            return found
    flags = row.text("other_flags").lower()
    loop = row.truth("compile") and mentions(flags, _LOOP) and not mentions(flags, MEGATRON_WORDS)
    plain = (mentions(flags, HUGGING_FACE) or loop) and not _names_megatron(row)
    if zero == 3 or plain or re.search(r"fsdp|hsdp|shard", row.text("zero_stage").lower()) or row.zero_stage() == 3:
        return "fsdp-compiled" if row.compiled() else "fsdp"
    return _megatron(row)


def _named(row: Row, named: str, zero: int) -> str:
    """The stack of a row that names one, by its version."""
    if named in ("fsdp", "pytorch") and row.compiled():  # our runtime of that name compiles nothing
        return "fsdp-compiled"
    if mentions(row.text("stack").lower(), HUGGING_FACE) and mentions(row.text("other_flags").lower(), "deepspeed"):
        return _version(row, "deepspeed", zero)
    if row.text("stack").lower().startswith("megatron-lm"):  # the framework's kernels go by the date
        return _megatron(row)
    if re.match(BRIDGE, row.text("stack").lower()) and fuses_experts(row):
        return "nemo-2606"
    if named == "nemo":
        return _nemo(row)
    return "deepspeed-zero3" if (named, zero) == ("deepspeed", 3) else named


def _mentioned(row: Row, words: str, zero: int) -> str | None:
    """The stack of the first framework that words mention, by its version; None where they mention none."""
    for one in _FRAMEWORKS:
        if zero not in one.zero or not mentions(words, one.words) or (one.unless and mentions(words, one.unless)):
            continue
        if one.stack == "deepspeed" and _parallel_by_torch(row):
            continue
        return _version(row, one.stack, zero)
    return None


def _version(row: Row, framework: str, zero: int) -> str:
    """The stack of a framework, by its use and date."""
    if framework == "deepspeed":
        return "deepspeed-zero3" if zero == 3 else "deepspeed"
    if framework == "nemo":
        return "nemo-2606" if fuses_experts(row) else _nemo(row)
    return _megatron(row) if framework == _MEGATRON_OF_ITS_DATE else framework


def _names_megatron(row: Row) -> bool:
    """Whether a row names Megatron, whose modules are its own, whatever launches them."""
    return mentions(row.words("source", "other_flags"), r"megatron")


def _megatron(row: Row) -> str:
    """Megatron-LM of the time of the row; a row without a date is taken to be later than FlashAttention."""
    fused, date = row.attention(), row.date()
    before = fused in (None, "unfused") and bool(date) and date < "2023"
    return "megatron-2021" if before else "megatron"


def _nemo(row: Row) -> str:
    """NeMo, on Transformer Engine since 2024. Before, without fused attention, it had Megatron-LM's kernels of 2022
    with their dropout of attention (conf/training/gpt3 of NeMo-Framework-Launcher 23.03: transformer_engine False)."""
    early = bool(row.date()) and row.date() < _NVIDIA_KERNELS
    return "megatron-2021" if early and row.attention() == "unfused" else "nemo"


def _parallel_by_torch(row: Row) -> bool:
    """Whether flags name FSDP or DistributedDataParallel and not DeepSpeed; then a title with both decides nothing."""
    flags = row.text("other_flags").lower()
    torch = mentions(flags, r"\bfsdp2?\b|fully[- ]sharded|\bddp\b|distributed[- ]?data[- ]?parallel")
    return torch and not mentions(flags, r"deepspeed")


def pads_vocabulary(row: Row) -> bool:
    """Whether the vocabulary of a row was padded, or a compiler pads the rows of its products.

    Models of PyTorch and Hugging Face that are not compiled do neither. Raises RequestError for an unknown stack.
    """
    stack = stack_of(row, row.zero_stage() or 0)
    if stack == "deepspeed" and mentions(row.text("other_flags").lower(), HUGGING_FACE) and not _names_megatron(row):
        return False
    return stack not in OWN_VOCABULARY or bool(row.truth("compile") and row.date() >= _PADS_SHAPES)
