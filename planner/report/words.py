"""Operators and their strategies in words."""

from collections.abc import Sequence

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


def short_name(operator: Operator) -> str:
    """The last two names of the module's path (without numbers), or the operator's own name if it is in the model
    itself."""
    names = [part for part in operator.module.split(".") if not part.isdigit()]
    return ".".join(names[-2:]) or called(operator).split(".")[1]
