"""Removes tensors without elements from `cat`. They may be of any rank, or of shape (0,), which PyTorch accepts in
place of any shape.

    tensor([]) ─> cat ─> attention          the start of a cache of keys and values
    keys ───────┘
    keys ──────────────> attention          the same in training

A model of transformers that is called with `use_cache=True` is exported with such joins. So is a model that rotates all
of a head by code for a partial rotation.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.graph.operator_graph import Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.unread import rewired, without_unread, without_unread_constants

_CAT = "aten.cat.default"
_NOTHING = (0,)


def without_empty_joins(graph: OperatorGraph) -> OperatorGraph:
    """`graph` without tensors of no elements in joins, and without joins that have one tensor left; values that only
    they read are gone. A join whose dtype would change stays as it is. If a weight would no longer be read, though
    PyTorch gives it a gradient of zeros, only tensors of shape (0,) are removed."""
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
    """The tensors of a join without the empty ones; None where none is empty, or the others have another dtype."""
    joined = op.arguments[0] if op.op == _CAT else None
    if not isinstance(joined, tuple):
        return None
    tensors = tuple(value for value in joined if isinstance(value, ValueRef))
    kept = tuple(value for value in tensors if not empty(graph.types[value.name].shape))
    dtype = graph.types[op.results[0] or ""].dtype
    same = all(graph.types[value.name].dtype == dtype for value in kept)
    return kept if kept and same and len(kept) < len(tensors) else None
