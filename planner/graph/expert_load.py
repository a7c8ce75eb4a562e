"""How unevenly routers divide rows among devices, as a setting of the operators that a plan is made for.

    traced graph ─> experts(..., capacity) ─(with_imbalance)─> experts(..., capacity, 1.25)

Nobody knows before training where tokens will go. So it is assumed, stated in the plan, and takes part in everything
that is predicted: where experts are divided among devices, the one with the most rows has so many times the average.
"""

from dataclasses import replace

from planner.errors import RequestError
from planner.faults import Fault, refuse
from planner.graph.operator_graph import Operator, OperatorGraph

EXPERTS_OPERATOR = "planner.experts.default"
_TENSORS, _DROPS_NONE = 6, 0

EVEN = 1.0
"""Every device has as many rows as any other: assumed. It is what biases and losses of routers aim at (Wang et al.
2024, arXiv 2408.15664, measure how far the fullest expert is from it), a device with several experts is nearer to it
than each of them, and benchmarks of speed often force routers to it. A router that was not trained is far from it."""


def imbalance_fault(imbalance: float) -> Fault | None:
    """Why an imbalance cannot be, None where it can."""
    if 1.0 <= imbalance < float("inf"):
        return None
    return Fault(
        option="imbalance",
        value=f"{imbalance:g}",
        reason="is no imbalance: the fullest device has the average or more, so it is 1 or more",
    )


def with_imbalance(graph: OperatorGraph, imbalance: float, *, once: bool = False) -> OperatorGraph:
    """`graph` with this imbalance for all its experts, and whether tokens are sent `once` to each part of the outermost
    axis over which these are exchanged. Raises RequestError for an imbalance less than 1, and for tokens that are sent
    once to experts with a capacity."""
    refuse(imbalance_fault(imbalance), RequestError)
    if imbalance == EVEN and not once:
        return graph
    return replace(graph, operators=tuple(_uneven(op, imbalance, once) for op in graph.operators))


def _uneven(op: Operator, imbalance: float, once: bool) -> Operator:
    if op.op != EXPERTS_OPERATOR:
        return op
    capacity = op.arguments[_TENSORS] if len(op.arguments) > _TENSORS else _DROPS_NONE
    if once and capacity:
        raise RequestError(
            f"tokens_once: '{op.name}' has experts with a capacity, {capacity} rows of a sample, whose places are sent"
            " whether a token takes them or not; leave it out"
        )
    return replace(op, arguments=(*op.arguments[:_TENSORS], capacity, imbalance, *([True] if once else [])))
