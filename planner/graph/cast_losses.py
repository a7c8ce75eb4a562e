"""Losses of logits that are cast to fp32, and these casts.

    x ─ linear ─ to(fp32) ─ cross entropy        a compiler reads the 16 bits within the kernels of the loss

The cast is part of the loss if only the loss reads its result; views may stand between.
"""

from typing import cast

from planner.graph.gates import PASSED_ON
from planner.graph.operator_graph import CASTS, OperatorGraph

_LOSS = "aten.cross_entropy_loss.default"
_SHORT, _LONG = 2, 4  # bytes of an element


def cast_losses(graph: OperatorGraph) -> frozenset[str]:
    """Names of the losses of cast logits and of the casts, found once for each graph."""
    key = ("cast losses",)
    if key not in graph.derived:
        found = (_with_cast(graph, at) for at, op in enumerate(graph.operators) if op.op == _LOSS)
        graph.derived[key] = frozenset(name for names in found for name in names)
    return cast("frozenset[str]", graph.derived[key])


def _with_cast(graph: OperatorGraph, loss: int) -> tuple[str, ...]:
    """A loss and the cast of its logits; nothing if they are not cast for it alone."""
    at = loss
    while True:
        logits = graph.operators[at].operands[0]
        maker = graph.producer.get(logits)
        if maker is None or graph.consumers.get(logits, ()) != (at,):
            return ()
        op = graph.operators[maker]
        if op.op in CASTS:
            widths = graph.types[op.operands[0]].element_bytes, graph.types[logits].element_bytes
            return (graph.operators[loss].name, op.name) if widths == (_SHORT, _LONG) else ()
        if op.op not in PASSED_ON:
            return ()
        at = maker
