"""Linear layers that frameworks compute as part of another one.

    x ─┬─ q_proj    one product makes queries, keys and       x ─┬─ gate_proj    and one the gate and what
       ├─ k_proj    values, as Megatron-LM's `linear_qkv`        └─ up_proj      it multiplies (`linear_fc1`)
       └─ v_proj

The first linear layer of an input stands for the others.
"""

from typing import cast

from planner.graph.operator_graph import OperatorGraph

_LINEAR = "aten.linear.default"


def joined_projections(graph: OperatorGraph) -> frozenset[str]:
    """Names of the linear layers whose input an earlier linear layer reads, found once for each graph."""
    key = ("joined projections",)
    if key not in graph.derived:
        inputs: set[str | None] = set()
        found = set[str]()
        for op in graph.operators:
            if op.op != _LINEAR:
                continue
            if op.operands[0] in inputs:
                found.add(op.name)
            inputs.add(op.operands[0])
        graph.derived[key] = frozenset(found)
    return cast("frozenset[str]", graph.derived[key])
