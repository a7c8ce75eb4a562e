"""What operators do whose strategy nobody has decided.

search          whatever makes the plan best
data_parallel   every axis of the mesh splits the batch, as MindSpore's semi_auto_parallel does it; what has no batch
                is the same on all devices, and weights that only such operators read are whole on each

Views and identities compute nothing: they take what is cheapest between their neighbours, as a reshape does there.
Where the samples of a micro-batch do not divide over the whole mesh there is no data parallelism to fall back to, so
that neither such a mesh nor such a micro-batch is looked at.
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
    """Why operators cannot do by default what they are asked to: it completes strategies, and knows no degrees."""
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
    """Whether an operator has no strategy of its own to fall back to, but takes that of its neighbours."""
    return op == IDENTITY or op_class == _FREE


def splits_batch(graph: OperatorGraph, sizes: Sequence[int]) -> bool:
    """Whether the samples of the graph's inputs divide over all axes of a mesh."""
    samples = next((graph.types[name].shape[0] for name in graph.inputs if graph.types[name].shape), 1)
    return samples % math.prod(sizes) == 0


def of_batch_alone(labels: Sequence[str], legal: tuple[Strategy, ...], axes: int) -> tuple[Strategy, ...]:
    """The strategies that split the batch on every axis, or nothing on an axis where there is no batch to split."""
    for axis in range(axes):
        cut = tuple(one for one in legal if (choice := one[axis]) is not None and labels[choice] == "batch")
        legal = cut or tuple(one for one in legal if one[axis] is None)
    return legal
