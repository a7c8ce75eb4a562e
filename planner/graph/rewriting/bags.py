"""Bags of embeddings as one operator with one result: `planner.embedding_bag`.

When exported, the operator has four results, three of which are notes for its own backward pass. Bags that are the rows
of a matrix arrive flattened, with the places at which they begin:

    numbers B K ─> view B K ──────────────┐
                   arange(0, B K, K) B ───┴─> embedding_bag ─> B H, notes        what was exported
    numbers B K ────────────────────────────> planner.embedding_bag ─> B H       what it is

The second form can be cut by bags and rescaled. Bags of different lengths keep their flat numbers and their beginnings.
"""

from dataclasses import replace

from planner.graph.operator_graph import Argument, Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.unread import without_unread

BAG = "planner.embedding_bag"

_EXPORTED = "aten.embedding_bag.padding_idx"
_FLATTENED = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_DEFAULTS: tuple[Argument, ...] = (None, None, None, False, 0, False, None, False, None)  # of the exported arguments


def with_bags(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with one operator for each bag whose notes are not read; values that only the old operators read are
    gone."""
    if not any(op.op == _EXPORTED for op in graph.operators):
        return graph
    operators = tuple(_bag(graph, op) if op.op == _EXPORTED else op for op in graph.operators)
    changed = replace(graph, operators=operators)
    old = {name for op in graph.operators if op.op == _EXPORTED for name in op.operands}
    return without_unread(changed, old)


def _bag(graph: OperatorGraph, op: Operator) -> Operator:
    given = (*op.arguments, *_DEFAULTS[len(op.arguments) :])
    weight, numbers, offsets, by_frequency, mode, _, weights, last_offset, padding = given
    if by_frequency or any(name in graph.consumers for name in op.results[1:] if name is not None):
        return op
    rows = _rows(graph, numbers, offsets)
    weighted = _rows(graph, weights, offsets)
    keywords: list[tuple[str, Argument]] = [("mode", mode), ("padding_idx", padding)]
    arguments: tuple[Argument, ...] = (weight, numbers, offsets)
    if rows is not None and not last_offset and (weights is None or weighted is not None):
        arguments, weights = (weight, rows), weighted
    else:
        keywords.append(("include_last_offset", last_offset))
    if weights is not None:
        keywords.append(("per_sample_weights", weights))
    return replace(op, op=BAG, arguments=arguments, keywords=tuple(keywords), results=op.results[:1])


def _rows(graph: OperatorGraph, flat: Argument, offsets: Argument) -> ValueRef | None:
    """The matrix, one row for each bag, that was flattened; None where there is none."""
    if not isinstance(flat, ValueRef) or not isinstance(offsets, ValueRef):
        return None
    view, begins = (graph.producer.get(reference.name) for reference in (flat, offsets))
    if view is None or begins is None or graph.operators[view].op not in _FLATTENED:
        return None
    (matrix,) = graph.operators[view].operands
    shape, beginning = graph.types[matrix].shape, graph.operators[begins]
    equal = len(shape) == 2 and beginning.op == "aten.arange.start_step"
    return ValueRef(matrix) if equal and beginning.arguments == (0, shape[0] * shape[1], shape[1]) else None
