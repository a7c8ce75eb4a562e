"""What the factors of operators stand for: batch, sequence, or just themselves.

The labels "batch" and "sequence" start at the first two dims of the inputs and follow the rules through the graph, like
the batch in `rescale`. A value that is made of no data, as a mask (`mask.expand(x.shape[0], ...)`,
`arange(x.shape[0])`), gets a batch dim where it meets a value that has one.
"""

from collections.abc import Mapping, Sequence
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
    known = _forward(graph, {})
    return _forward(graph, _met(graph, known))


def _forward(graph: OperatorGraph, met: Mapping[str, frozenset[int]]) -> tuple[tuple[str, ...], ...]:
    """Labels from the inputs on, and from dims that have a batch where they are read (`met`)."""
    labels: dict[str, tuple[str | None, ...]] = {}
    for name in graph.inputs:
        shape = graph.types[name].shape
        known = ("batch", "sequence") if not graph.types[name].floating else ("batch",)
        labels[name] = tuple(known[dim] if dim < len(known) else None for dim in range(len(shape)))
    return tuple(_labelled(op, rule_of(graph, op), labels, met) for op in graph.operators)


def _met(graph: OperatorGraph, labels: Sequence[Sequence[str]]) -> Mapping[str, frozenset[int]]:
    """Dims of results that some operator, directly or by way of others, reads as a batch: found against the flow."""
    met: dict[str, frozenset[int]] = {}
    for op, names in zip(reversed(graph.operators), reversed(labels), strict=True):
        rule = rule_of(graph, op)
        batch = {at for at, name in enumerate(names) if name == "batch"} | _demanded(op, rule, met)
        for name, dims in zip(op.operands, rule.operands, strict=True):
            found = frozenset(dim for dim, factors in enumerate(dims) if factors and factors[0] in batch)
            if found and name in graph.producer:
                met[name] = met.get(name, frozenset()) | found
    return met


def _demanded(op: Operator, rule: Rule, met: Mapping[str, frozenset[int]]) -> frozenset[int]:
    """Factors of an operator that index dims of its results which later operators read as a batch."""
    made = zip((r for r in op.results if r is not None), rule.results, strict=True)
    return frozenset(dims[dim][0] for name, dims in made for dim in met.get(name, ()) if dims[dim])


def _labelled(
    op: Operator, rule: Rule, labels: dict[str, tuple[str | None, ...]], met: Mapping[str, frozenset[int]]
) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for name, dims in zip(op.operands, rule.operands, strict=True):
        for label, factors in zip(labels.get(name, (None,) * len(dims)), dims, strict=True):
            if label is not None and factors:
                found.setdefault(factors[0], label)
    for split in _demanded(op, rule, met):
        found.setdefault(split, "batch")
    for at, factor in enumerate(rule.factors):
        if factor.kind is FactorKind.HALO and factor.parts[0] in found:
            found[at] = found[factor.parts[1]] = found[factor.parts[0]]
    for name, dims in zip((r for r in op.results if r is not None), rule.results, strict=True):
        labels[name] = tuple(found.get(factors[0]) if factors else None for factors in dims)
    return tuple(found.get(i, factor.name) for i, factor in enumerate(rule.factors))
