"""Activations of gates, which a compiler computes within the product behind them.

    x ─ linear ─ silu ─┐
    x ─ linear ────────┴ mul ─ linear        silu is folded: mul reads what silu reads, and writes no more
    x ─ conv ─── silu ─── scan               is a kernel of its own: nothing is multiplied

(`SwiGLU`: Shazeer 2020, arXiv 2002.05202.) An activation is folded if only an elementwise product reads its result,
with another tensor of the same shape; casts and views may stand between.
"""

from typing import cast

from planner.graph.operator_graph import Operator, OperatorGraph

_ACTIVATION, _PRODUCT = "aten.silu.default", "aten.mul.Tensor"
PASSED_ON = frozenset({
    "aten.to.dtype", "aten._to_copy.default", "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default",
    "aten.flatten.using_ints", "aten.unflatten.int", "aten.transpose.int", "aten.permute.default",
})  # fmt: skip
"""Operators that may stand between."""


def folded_activations(graph: OperatorGraph) -> frozenset[str]:
    """Names of the activations that the product behind them computes, found once for each graph."""
    key = ("folded activations",)
    if key not in graph.derived:
        found = (op.name for op in graph.operators if op.op == _ACTIVATION and _multiplied(graph, op))
        graph.derived[key] = frozenset(found)
    return cast("frozenset[str]", graph.derived[key])


def _multiplied(graph: OperatorGraph, op: Operator) -> bool:
    """Whether only products with another tensor of its shape read the result."""
    while True:
        name = op.results[0]
        readers = graph.consumers.get(name or "", ())
        if name is None or len(readers) != 1 or name == graph.loss:
            return False
        op = graph.operators[readers[0]]
        if op.op == _PRODUCT:
            return len(op.operands) == 2 and len({graph.types[each].shape for each in op.operands}) == 1
        if op.op not in PASSED_ON:
            return False
