"""What the loss does not train: weights that it does not depend on, and weights that no gradient of it reaches.

    x ─> linear(teacher) ─> detach ─> loss      x ─> detach ─> linear(teacher, frozen) ─> loss
    x ─> distances ─> argmin ─> lookup          x ─> detach ─> distances ─> argmin ─> lookup

PyTorch leaves weights that get no gradient as they are, without optimizer states or weight decay, and keeps
nothing for a backward pass in `torch.no_grad()`. So such weights are frozen in the graph. A detach stands at the first
values whose gradients are stopped later, or that end in indices, such as scores to choose experts by. After that a
gradient flows wherever it may flow.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from planner.graph.operator_graph import DETACH, STOPPING, Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.unread import rewired
from planner.graph.tracing.gradients_off import without_needless_detaches


def without_untrained(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with the weights frozen that the loss does not reach, and with detaches before what only they read."""
    reached = _reached(graph)
    parameters = tuple(replace(p, trainable=p.trainable and p.name in reached) for p in graph.parameters)
    if parameters != graph.parameters:
        graph = replace(graph, parameters=parameters)

    def ends(value: str, reader: Operator) -> bool:
        gradient = value in graph.differentiable and not graph.differentiable.isdisjoint(reader.results)
        return reader.op == DETACH or not gradient

    stopped = _ending(graph, ends)
    return without_needless_detaches(_detached_before(graph, stopped)) if stopped else graph


def _reached(graph: OperatorGraph) -> frozenset[str]:
    """Values that a gradient of the loss reaches, if it flows through all operators that have one."""
    found = {graph.loss}
    for op in reversed(graph.operators):
        if op.op not in STOPPING and any(name in found for name in op.results):
            found.update(name for name in op.operands if graph.types[name].has_gradient)
    return frozenset(found)


def _ending(graph: OperatorGraph, ends: Callable[[str, Operator], bool]) -> frozenset[int]:
    """Operators through which gradients might flow, and whose results are read only by other such operators, or by
    readers for which `ends` says that the value ends there."""
    found: set[int] = set()
    last = {graph.loss, *(content for _, content in graph.updates)}
    for at in range(len(graph.operators) - 1, -1, -1):
        made = [name for name in graph.operators[at].results if name is not None]
        if graph.operators[at].op in STOPPING or not any(name in graph.differentiable for name in made):
            continue
        reads = [(name, reader) for name in made for reader in graph.consumers.get(name, ())]
        all_end = all(reader in found or ends(name, graph.operators[reader]) for name, reader in reads)
        if all_end and last.isdisjoint(made):
            found.add(at)
    return frozenset(found)


def _detached_before(graph: OperatorGraph, stopped: Collection[int]) -> OperatorGraph:
    """`graph` with a detach of every value with a gradient that comes into these operators from others."""
    types, operators = dict(graph.types), list[Operator]()
    inside = {name for at in stopped for name in graph.operators[at].results}
    names: dict[str, str] = {}
    for at, op in enumerate(graph.operators):
        if at not in stopped:
            operators.append(op)
            continue
        for name in op.operands:
            if name in graph.differentiable and name not in inside and name not in names:
                names[name] = f"{name} without gradient"
                types[names[name]] = graph.types[name]
                operators.append(
                    replace(_DETACH, arguments=(ValueRef(name),), results=(names[name],), module=op.module)
                )
        operators.append(op.reading(names))
    return rewired(replace(graph, types=types), operators, {})


_DETACH = Operator(name="detach", op=DETACH, arguments=(), results=())
