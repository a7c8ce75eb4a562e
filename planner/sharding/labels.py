"""What the factors of operators stand for: batch, sequence, or just themselves.

The labels "batch" and "sequence" start at the first two dims of the inputs and follow the rules through the graph, like
the batch in `rescale`.
"""

from typing import cast

from planner.graph.operator_graph import Operator, OperatorGraph
from planner.sharding.rule import FactorKind, Rule
from planner.sharding.rules import rule_of


def factor_labels(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """For every operator a label for each of its factors: batch, sequence, or the name in the rule."""
    if ("labels",) not in graph.derived:
        graph.derived["labels",] = _factor_labels(graph)
    return cast("tuple[tuple[str, ...], ...]", graph.derived["labels",])


def _factor_labels(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    labels: dict[str, tuple[str | None, ...]] = {}
    for name in graph.inputs:
        shape = graph.types[name].shape
        known = ("batch", "sequence") if not graph.types[name].floating else ("batch",)
        labels[name] = tuple(known[dim] if dim < len(known) else None for dim in range(len(shape)))
    return tuple(_labelled(op, rule_of(graph, op), labels) for op in graph.operators)


def _labelled(op: Operator, rule: Rule, labels: dict[str, tuple[str | None, ...]]) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for name, dims in zip(op.operands, rule.operands, strict=True):
        for label, factors in zip(labels.get(name, (None,) * len(dims)), dims, strict=True):
            if label is not None and factors:
                found.setdefault(factors[0], label)
    for at, factor in enumerate(rule.factors):
        if factor.kind is FactorKind.HALO and factor.parts[0] in found:
            found[at] = found[factor.parts[1]] = found[factor.parts[0]]
    for name, dims in zip((r for r in op.results if r is not None), rule.results, strict=True):
        labels[name] = tuple(found.get(factors[0]) if factors else None for factors in dims)
    return tuple(found.get(i, factor.name) for i, factor in enumerate(rule.factors))
