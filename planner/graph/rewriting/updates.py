"""Buffers that the forward pass changes (running statistics): their new contents as values of the graph.

    batch norm ─> result ─> ...
               ─> mean  ─┐
               ─> var   ─┴─> planner.update ─> mean, var: what the buffers hold after this micro-batch

The contents of all buffers of one module pass one operator, whose rule splits nothing. So they arrive whole on every
device, and their redistribution there is priced like any other.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.errors import ModelError
from planner.graph.operator_graph import Argument, Operator, OperatorGraph, ValueRef

UPDATE = "planner.update"


def with_updates(graph: OperatorGraph, contents: Mapping[str, Argument]) -> OperatorGraph:
    """`graph` with an update for the buffers, whose new contents are these values.

    Raises ModelError where a buffer gets a content of another type, or one that is no tensor.
    """
    modules: dict[str, list[str]] = {}
    for buffer in contents:
        modules.setdefault(buffer.rpartition(".")[0], []).append(buffer)
    types = dict(graph.types)
    updates: list[tuple[str, str]] = []
    following: dict[int, list[Operator]] = {}  # index of an operator, -1 for none: what comes right after it
    for module, buffers in modules.items():
        values = tuple(_content(graph, buffer, contents[buffer]) for buffer in buffers)
        results = tuple(f"update of {buffer}" for buffer in buffers)
        types.update(zip(results, (graph.types[buffer] for buffer in buffers), strict=True))
        updates += zip(buffers, results, strict=True)
        last = max(graph.producer.get(value.name, -1) for value in values)
        following.setdefault(last, []).append(
            Operator(name=f"update of {module}", op=UPDATE, arguments=(values,), results=results, module=module)
        )
    operators = [*following.get(-1, ())]
    for at, op in enumerate(graph.operators):
        operators += [op, *following.get(at, ())]
    return replace(graph, types=types, operators=tuple(operators), updates=tuple(sorted(updates)))


def _content(graph: OperatorGraph, buffer: str, value: Argument) -> ValueRef:
    if not isinstance(value, ValueRef):
        raise ModelError(f"buffer '{buffer}' gets the content {value!r}, which is no tensor")
    old, new = graph.types[buffer], graph.types[value.name]
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise ModelError(
            f"buffer '{buffer}' of shape {old.shape} and {old.dtype} gets a content of shape {new.shape} and"
            f" {new.dtype}; update it in place with one of its own type"
        )
    return value
