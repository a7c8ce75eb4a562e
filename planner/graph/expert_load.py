"""How unevenly routers divide rows among devices, as a setting of the operators that a plan is made for.

    traced graph ─> experts(..., capacity) ─(with_imbalance)─> experts(..., capacity, 1.25)

Nobody knows before training where tokens will go. So the maximum expert load is assumed, stated in the plan, and used
in every prediction: where experts are divided among devices, the fullest device has `imbalance` times the average.
"""

import math
from dataclasses import replace

from planner.errors import RequestError
from planner.faults import Fault, refuse
from planner.graph.operator_graph import Operator, OperatorGraph

EXPERTS_OPERATOR = "planner.experts.default"
_TENSORS, _DROPS_NONE = 6, 0
_GATE = 3
"""Position of the gate among the arguments; there is nothing in it where experts have no gate."""
_BY_NAME = 13, ("gate_bias", "up_bias", "limit", "slope", "offset", "activation")
"""Number of arguments in the schema before the settings of experts that a graph gives by name, and these settings."""

_TOPK = "aten.topk.default"
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("linear", "matmul", "mm", "bmm", "addmm", "einsum"))

EVEN = 1.0
"""The assumption that all devices have equally many rows. Biases and losses of routers aim at it (Wang et al.
2024, arXiv 2408.15664, measure how far the fullest expert is from it), a device with several experts is nearer to it
than each of them, and benchmarks of speed often force routers to it. A router that was not trained is far from it."""


def matrices_of_experts(op: Operator) -> tuple[str, ...]:
    """The names of the matrices of an operator with experts: gate, up and down, or up and down."""
    return op.operands[_GATE : _GATE + (2 if op.arguments[_GATE] is None else 3)]


def imbalance_fault(imbalance: float) -> Fault | None:
    """Why an imbalance is impossible; None where it is possible."""
    if 1.0 <= imbalance < float("inf"):
        return None
    return Fault(
        option="imbalance",
        value=f"{imbalance:g}",
        reason="is no imbalance, which is the maximum load over the mean",
        hint="give 1 or more",
    )


def with_named_settings(graph: OperatorGraph) -> OperatorGraph:
    """`graph` whose experts have their biases, and the settings that bound them, by name, however the model passed
    them. So the settings that planning adds come right behind the matrices."""
    if not any(op.op == EXPERTS_OPERATOR and len(op.arguments) > _BY_NAME[0] for op in graph.operators):
        return graph
    return replace(graph, operators=tuple(_by_name(op) for op in graph.operators))


def _by_name(op: Operator) -> Operator:
    if op.op != EXPERTS_OPERATOR:
        return op
    first, names = _BY_NAME
    given = {**dict(zip(names, op.arguments[first:], strict=False)), **dict(op.keywords)}
    unset = op.arguments[_TENSORS:first] == (0, 1.0, False, 1, 1, "", False)
    return replace(op, arguments=op.arguments[: _TENSORS if unset else first], keywords=tuple(given.items()))


def with_imbalance(graph: OperatorGraph, imbalance: float, *, once: bool = False) -> OperatorGraph:
    """`graph` with this imbalance for all its experts, and whether tokens are sent `once` to each part of the outermost
    axis over which experts are exchanged. Raises RequestError for an imbalance less than 1, and for tokens that are
    sent once to experts with a capacity."""
    refuse(imbalance_fault(imbalance), RequestError)
    if imbalance == EVEN and not once:
        return graph
    return replace(graph, operators=tuple(_uneven(graph, op, imbalance, once) for op in graph.operators))


def _uneven(graph: OperatorGraph, op: Operator, imbalance: float, once: bool) -> Operator:
    if op.op != EXPERTS_OPERATOR:
        return op
    capacity = op.arguments[_TENSORS] if len(op.arguments) > _TENSORS else _DROPS_NONE
    if once and capacity:
        raise RequestError(
            f"tokens_once: '{op.name}' has experts with a capacity, {capacity} rows of a sample, whose places are sent"
            " whether a token takes them or not; leave it out"
        )
    if not once:
        return replace(op, arguments=(*op.arguments[:_TENSORS], capacity, imbalance))
    return replace(op, arguments=(*op.arguments[:_TENSORS], capacity, imbalance, True, *router_groups(graph, op)))


def router_groups(graph: OperatorGraph, op: Operator) -> tuple[int, int]:
    """The number of groups into which the router of an operator divides experts, and the number of groups that it
    chooses from; 1 and 1 where it has no groups. Groups show in the router's operators: its choices come from a choice
    of the best groups for each token."""
    chosen, experts = graph.types[op.operands[2]], graph.types[op.operands[3]].shape[0]
    waiting, seen = [op.operands[2]], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in graph.producer:
            continue
        seen.add(name)
        maker = graph.operators[graph.producer[name]]
        if maker.op == _TOPK:
            scores, count = graph.types[maker.operands[0]].shape, graph.types[name].shape[-1]
            tokens = math.prod(scores[:-1]) == math.prod(chosen.shape[:-1])
            if tokens and 1 < scores[-1] < experts and experts % scores[-1] == 0:
                return scores[-1], count
        if maker.op in _PRODUCTS:  # of the logits
            continue
        waiting += maker.operands
    return 1, 1
