"""The experts of a row's model, and the model of the zoo with the row's latent attention."""

import re
from dataclasses import replace
from typing import Any

from planner.models.deepseek_models import DEEPSEEK_MODELS
from planner.models.dimensions import Dimensions, ExpertDimensions
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.stack.experts import CAPACITY
from planner.validation.unsupported import UnsupportedError

_LAYERS = r"\[[\d\s,]*\](?:\s*\*\s*\d+)?"
_LAYERS_OF_EXPERTS = (
    rf"moe[-_]layer[-_]freq\s*[=: ]\s*(?:[\"']?(\(?\s*{_LAYERS}(?:\s*\+\s*{_LAYERS})*\s*\)?)|([^\s;,]+))"
    r"|first[-_]k[-_]dense[-_]replace\s*[=: ]\s*([^\s;,]+)"
)
"""Which layers have experts, in the words of Megatron-LM and of Hugging Face configurations."""


def experts_of(row: Row, notes: list[str]) -> ExpertDimensions | None:
    """The experts of a row; None if it is dense. Flags are those of Megatron."""
    if row.text("arch").lower() != "moe" and (row.integer("n_experts", least=0) or 0) <= 1:
        return None
    words = row.model_and_flags()
    width = row.integer("moe_ffn_hidden")
    if width is None:
        width = row.needed("ffn_hidden")
        notes.append("moe_ffn_hidden unknown: ffn_hidden")
    shared = re.search(r"moe[-_]shared[-_]expert[-_]intermediate[-_]size\s*[=: ]\s*(\d{1,9})", words)
    if shared is None and mentions(words, r"shared[-_ ]expert") and not row.latent:
        notes.append("an MLP for all tokens of unknown width: left out")
    dense = _first_dense(words, row.needed("n_layers"))
    if mentions(words, CAPACITY):
        notes.append("rows over the capacity of an expert are dropped: priced as if none were")
    count, chosen = row.needed("n_experts"), row.needed("topk")
    if chosen > count:
        raise UnsupportedError(f"topk={chosen}: a token cannot take more than the n_experts={count}")
    return ExpertDimensions(
        count=count,
        chosen=chosen,
        width=width,
        shared_width=int(shared[1]) if shared else 0,
        dense_layers=dense,
    )


def _first_dense(words: str, layers: int) -> int:
    """Number of first layers without experts. Raises UnsupportedError if other layers have none."""
    found = re.search(_LAYERS_OF_EXPERTS, words)
    if found is None:
        return 0
    if found[3]:
        if not re.fullmatch(r"\d{1,9}", found[3]):
            raise UnsupportedError(f"the first layers without experts are {found[3]}, which is no number of layers")
        return min(int(found[3]), layers)
    pattern = re.sub(r"\s", "", found[1] or found[2])
    first = re.fullmatch(r"\(?\[0\]\*(\d{1,9})\+\[1\]\*(\d{1,9})\)?", pattern)
    if pattern == "1":
        return 0
    if first is None or int(first[1]) + int(first[2]) != layers:
        raise UnsupportedError(f"layers with experts are {pattern}; only the first layers can be dense")
    return int(first[1])


def latent_like(row: Row, notes: list[str]) -> str:
    """The DeepSeek model of the zoo with the row's layers; no row states the sizes of latent vectors."""
    columns = {"hidden": "hidden_size", "n_heads": "num_heads", "n_experts": "num_experts", "topk": "experts_per_token"}
    said = {column: row.needed(column) for column in columns}
    for name, entry in DEEPSEEK_MODELS.items():
        sizes = dict(entry.dimensions)
        if all(sizes[columns[column]] == value for column, value in said.items()):
            notes.append(f"latent attention and routers as those of {name}, without what predicts further tokens")
            return name
    words = ", ".join(f"{column}={value}" for column, value in said.items())
    raise UnsupportedError(
        f"attention is multi-head latent attention, of a size that is not known: {words} is none of"
        f" {', '.join(DEEPSEEK_MODELS)}"
    )


def with_unsaid(experts: ExpertDimensions, row: Row, like: str) -> ExpertDimensions:
    """Experts with the shared experts and the dense layers of a model of the zoo, if the flags name none."""
    sizes: dict[str, Any] = dict(DEEPSEEK_MODELS[like].dimensions)
    if not re.search(_LAYERS_OF_EXPERTS, row.model_and_flags()):
        experts = replace(experts, dense_layers=min(sizes["dense_layers"], row.needed("n_layers")))
    return experts if experts.shared_width else replace(experts, shared_width=sizes["shared_size"])


def parameters_of_its_kind(model: Dimensions) -> float | None:
    """Parameters of a whole model of the zoo; None for a run of fewer layers, which have no published number."""
    if not model.like:
        return None
    whole: dict[str, Any] = dict(DEEPSEEK_MODELS[model.like].dimensions)
    if model.layers != whole["num_layers"]:
        return None
    experts = ExpertDimensions(
        count=whole["num_experts"],
        chosen=whole["experts_per_token"],
        width=whole["expert_size"],
        shared_width=whole["shared_size"],
        dense_layers=whole["dense_layers"],
    )
    return float(replace(model, ffn=whole["ffn_size"], vocabulary=whole["vocab_size"], experts=experts).parameters)
