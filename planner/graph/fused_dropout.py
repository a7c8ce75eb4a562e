"""Attention that drops probabilities, as the software computes it that a plan is for.

    this runtime        scores in memory: which elements are dropped must not depend on the plan
    other software      one kernel that draws numbers as it goes (FlashAttention, cuDNN, npu_fusion_attention), unless
                        its attention is unfused at all

So the rule of such an operator, what it keeps and what it takes, depend on the software. The operators stay the same.
"""

from dataclasses import replace
from typing import cast

from planner.graph.operator_graph import OperatorGraph
from planner.graph.random_ops import drops_probabilities

_KEY = ("fused dropout",)


def with_fused_dropout(graph: OperatorGraph, *, fused: bool) -> OperatorGraph:
    """The graph for software that drops probabilities in a fused kernel, or does not. The same graph where no attention
    drops any."""
    if fused == graph.drops_fused or not drops_probabilities(graph):
        return graph
    if _KEY not in graph.derived:
        other = replace(graph, drops_fused=fused)
        other.derived[_KEY] = graph
        graph.derived[_KEY] = other
    return cast("OperatorGraph", graph.derived[_KEY])
