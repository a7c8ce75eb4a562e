"""Operators and their strategies as people read them."""

from collections.abc import Sequence

from planner.graph.operator_graph import Operator
from planner.plan.binding.bind import BoundOperator

SHOWN = frozenset({"matmul", "attention", "experts", "normalisation", "embedding", "cross_entropy"})
"""Classes of the operators that do the work."""

_WORDS = {
    "o": "out",
    "i": "in",
    "g": "heads",
    "r": "query heads",
    "v": "vocabulary",
    "h": "hidden",
    "n": "tokens",
    "f": "width",
    "e@b": "experts",
    "e@s": "experts",
    "k@q": "ring",
}
"""Names of factors in rules, spelled out."""


def strategy_words(operator: BoundOperator, labels: Sequence[str]) -> tuple[str, ...]:
    """For each mesh axis what it splits, "-" for nothing. `labels` are those of the operator's factors
    (`planner.sharding.labels`)."""
    return tuple(_spelled(labels[c]) if c is not None else "-" for c in operator.strategy)


def _spelled(name: str) -> str:
    """The word for a factor; elementwise operators call theirs by the dims of their result, `d2`."""
    return f"dim {name[1:]}" if name[:1] == "d" and name[1:].isdigit() else _WORDS.get(name, name)


def short_name(operator: Operator) -> str:
    """The last two names of the module's path (not numbers), or the operator where it stands in the model itself."""
    names = [part for part in operator.module.split(".") if not part.isdigit()]
    return ".".join(names[-2:]) or operator.op.split(".")[1]
