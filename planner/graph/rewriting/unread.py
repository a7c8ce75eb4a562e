"""Removes values and operators that a rewritten graph no longer reads."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from planner.graph.operator_graph import Operator, OperatorGraph


def rewired(graph: OperatorGraph, operators: Iterable[Operator], names: Mapping[str, str]) -> OperatorGraph:
    """`graph` with these operators in place of its own. In updates and the loss, values that are gone are renamed by
    `names`."""
    updates = tuple((buffer, names.get(value, value)) for buffer, value in graph.updates)
    return replace(graph, operators=tuple(operators), updates=updates, loss=names.get(graph.loss, graph.loss))


def without_unread(
    graph: OperatorGraph, names: Iterable[str], stays: Callable[[Operator], bool] = lambda op: False
) -> OperatorGraph:
    """`graph` without the operators that made only these unread values, and without operators whose
    results only such operators read; operators that `stay` are kept."""
    suspect, kept = set(names), list[Operator]()
    read = {graph.loss, *(content for _, content in graph.updates)}
    for op in reversed(graph.operators):
        made = {name for name in op.results if name is not None}
        if made <= suspect and made.isdisjoint(read) and not stays(op):
            suspect.update(op.operands)
        else:
            kept.append(op)
            read.update(op.operands)
    operators = tuple(reversed(kept))
    changed = replace(graph, operators=operators)
    made = {*graph.inputs, *graph.parameter_names, *graph.buffers, *changed.producer}
    return replace(changed, types={name: tensor for name, tensor in graph.types.items() if name in made})


def replaced(graph: OperatorGraph, found: Mapping[str, Operator]) -> OperatorGraph:
    """`graph` with the operators that are `found` in place of those of their names; values that only the old operators
    read are gone."""
    if not found:
        return graph
    old = {name for op in graph.operators if op.name in found for name in op.operands}
    return without_unread(replace(graph, operators=tuple(found.get(op.name, op) for op in graph.operators)), old)


def without_unread_constants(graph: OperatorGraph, before: OperatorGraph | None = None) -> OperatorGraph:
    """`graph` without the constants of the model's code that nothing reads; with `before`, only without those that were
    read in it."""
    unread = frozenset(
        name for name in graph.constants if name not in graph.consumers and (before is None or name in before.consumers)
    )
    if not unread:
        return graph
    return replace(
        graph,
        buffers=tuple(name for name in graph.buffers if name not in unread),
        constants={name: value for name, value in graph.constants.items() if name not in unread},
        types={name: tensor for name, tensor in graph.types.items() if name not in unread},
    )
