"""Operators and their strategies in words."""

from collections.abc import Collection, Sequence

from planner.graph.operator_graph import Operator
from planner.graph.per_replica import called
from planner.plan.binding.bind import BoundOperator
from planner.plan.layout.decisions import COUNTED
from planner.plan.layout.patterns import factor_word

SHOWN = COUNTED
"""The operator classes that are shown: those that do the work."""


def strategy_words(operator: BoundOperator, labels: Sequence[str]) -> tuple[str, ...]:
    """For each mesh axis the factor it splits, "-" for none. `labels` are those of the operator's factors
    (`planner.sharding.labels`)."""
    return tuple(factor_word(labels[c]) if c is not None else "-" for c in operator.strategy)


def short_name(operator: Operator, parts: int = 2) -> str:
    """The last two names of the module's path (without numbers), or the operator's own name if it is in the model
    itself. `parts`: as many names instead."""
    return ".".join(_path(operator)[-parts:]) or called(operator).split(".")[1]


def short_names(operators: Sequence[Operator]) -> tuple[str, ...]:
    """Short names, with as many names of the path as tell modules apart: `query.enc.norm`, `doc.enc.norm`."""
    alike: dict[str, set[tuple[str, ...]]] = {}
    for one in operators:
        alike.setdefault(short_name(one), set()).add(_path(one))
    return tuple(short_name(one, _telling(alike[short_name(one)])) for one in operators)


def _path(operator: Operator) -> tuple[str, ...]:
    return tuple(part for part in operator.module.split(".") if not part.isdigit())


def _telling(paths: Collection[tuple[str, ...]]) -> int:
    """The fewest last names, at least two, that differ between all paths."""
    counts = range(2, max(2, *map(len, paths)) + 1)
    return next(count for count in counts if len({path[-count:] for path in paths}) == len(paths))
