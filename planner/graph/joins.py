"""Joins without what adds nothing: `cat` of a tensor and one without elements, of any rank, or of shape (0,), which
PyTorch lets stand for one of any shape.

    tensor([]) ─> cat ─> attention          what a cache of keys and values begins with
    keys ───────┘
    keys ──────────────> attention          what it is while a model trains

A model of transformers that is called with `use_cache=True` is exported so; and one that rotates all of a head, by code
that leaves a part of it as it is.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.graph.operator_graph import Operator, OperatorGraph, ValueRef
from planner.graph.unread import rewired, without_unread, without_unread_constants

_CAT = "aten.cat.default"
_NOTHING = (0,)


def without_empty_joins(graph: OperatorGraph) -> OperatorGraph:
    """`graph` without tensors of no elements in joins, and without a join that has one tensor left; what only they read
    is gone. The dtype of a join is that of what stays, or the join is left as it is. Where a weight would be read no
    more, which has a gradient of zeros in PyTorch, only what has the shape (0,) goes."""
    left = _without(graph, lambda shape: 0 in shape)
    read = (parameter.name for parameter in graph.parameters if parameter.name in graph.consumers)
    return left if all(name in left.consumers for name in read) else _without(graph, _NOTHING.__eq__)


def _without(graph: OperatorGraph, empty: Callable[[tuple[int, ...]], bool]) -> OperatorGraph:
    names: dict[str, str] = {}
    operators: list[Operator] = []
    dropped: set[str] = set()
    for op in graph.operators:
        known = op.reading(names)
        kept = _kept(graph, known, empty)
        if kept is None:
            operators.append(known)
            continue
        dropped.update(name for name in known.operands if empty(graph.types[name].shape))
        if len(kept) > 1:
            operators.append(replace(known, arguments=(kept, *known.arguments[1:])))
        else:
            (result,) = known.results
            assert result is not None
            names[result] = kept[0].name
    if not dropped:
        return graph
    return without_unread_constants(without_unread(rewired(graph, operators, names), dropped), graph)


def _kept(graph: OperatorGraph, op: Operator, empty: Callable[[tuple[int, ...]], bool]) -> tuple[ValueRef, ...] | None:
    """What a join joins, without what is empty; None where nothing is, or the rest would have another dtype."""
    joined = op.arguments[0] if op.op == _CAT else None
    if not isinstance(joined, tuple):
        return None
    tensors = tuple(value for value in joined if isinstance(value, ValueRef))
    kept = tuple(value for value in tensors if not empty(graph.types[value.name].shape))
    dtype = graph.types[op.results[0] or ""].dtype
    same = all(graph.types[value.name].dtype == dtype for value in kept)
    return kept if kept and same and len(kept) < len(tensors) else None
