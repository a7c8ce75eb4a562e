"""The default strategy of operators for which the user gives none.

    search          whatever makes the plan best
    data_parallel   every axis of the mesh splits the batch, as in MindSpore's semi_auto_parallel. Operators without a
                    batch do the same work on all devices, and weights that only they read are full copies

Views and identities compute nothing: they take whatever is cheapest between their neighbours, as a reshape does there.
Data parallelism needs a micro-batch whose samples divide over the whole mesh; other meshes and micro-batches are not
tried.
"""

import math
from collections.abc import Sequence

from planner.faults import Fault
from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import OperatorGraph
from planner.sharding.rule import Strategy
from planner.strategy_search.request.space import Pinned

DATA_PARALLEL = "data_parallel"
_FREE = "view"


def default_fault(default: str, shards: Sequence[object], pinned: Pinned) -> Fault | None:
    """Why operators cannot use the requested default: it completes given strategies, and does not go with degrees."""
    if default != DATA_PARALLEL:
        return None
    if not shards:
        return Fault(
            option="default",
            value=default,
            reason="is for operators beside those that are decided, and none is",
            hint="give strategies with --shard or --shard-from, or take --mode data_parallel",
        )
    if pinned.manual:
        return Fault(
            option="default",
            value=default,
            reason="splits the batch on every axis, and degrees say otherwise",
            hint="leave out the degrees, or decide the mesh as in --mesh 2x4",
        )
    return None


def follows(op: str, op_class: str) -> bool:
    """Whether an operator takes the strategy of its neighbours instead of a default."""
    return op == IDENTITY or op_class == _FREE


def splits_batch(graph: OperatorGraph, sizes: Sequence[int]) -> bool:
    """Whether the samples of the graph's inputs divide over all axes of a mesh."""
    samples = next((graph.types[name].shape[0] for name in graph.inputs if graph.types[name].shape), 1)
    return samples % math.prod(sizes) == 0


def of_batch_alone(labels: Sequence[str], legal: tuple[Strategy, ...], axes: int) -> tuple[Strategy, ...]:
    """The strategies that split the batch on every axis. An axis on which no strategy can split it is left unused."""
    for axis in range(axes):
        cut = tuple(one for one in legal if (choice := one[axis]) is not None and labels[choice] == "batch")
        legal = cut or tuple(one for one in legal if one[axis] is None)
    return legal
