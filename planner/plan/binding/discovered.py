"""What a plan owes to trial: the operators whose rules were found by running them, and what is assumed of them."""

from dataclasses import dataclass

from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan
from planner.sharding.rule import splittable
from planner.sharding.rules import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """Operators of one kind with one rule: the modules that call them, the rule, the factors that can be split,
    and, if none can, the reason. `split` says whether the plan splits any of them."""

    op: str
    modules: tuple[str, ...]
    rule: str
    factors: tuple[str, ...]
    split: bool
    reason: str


def discovered(bound: BoundPlan) -> tuple[Discovered, ...]:
    """The operators of a plan whose rules were found by trial. Their work is not known: they are priced as one pass
    over their tensors."""
    graph: OperatorGraph = bound.graph
    modules: dict[tuple[str, str, tuple[str, ...], str], list[str]] = {}
    split: set[tuple[str, str, tuple[str, ...], str]] = set()
    for each in bound.operators:
        op = each.operator
        if op.rule is not None:
            rule = rule_of(graph, op)
            key = (op.op, op.rule.text, splittable(rule), op.rule.reason)
            modules.setdefault(key, []).append(op.module or "(root)")
            if any(choice is not None for choice in each.strategy):
                split.add(key)
    return tuple(
        Discovered(
            op=key[0],
            modules=tuple(dict.fromkeys(found)),
            rule=key[1],
            factors=key[2],
            split=key in split,
            reason=key[3],
        )
        for key, found in modules.items()
    )
