"""Plans whose blocks are recomputed or offloaded as a run did (`planner.validation.spared`).

If a run was made, says nothing about recomputation, and does not fit without any, it must have recomputed something.
Then every pipeline rank recomputes the fewest blocks with which it fits. Bisection finds their number, because memory
falls with each. This follows from our memory model alone, and is noted.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from hardware_profiles import Cluster
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import bind
from planner.plan.plan import Plan, Prediction
from planner.plan.prediction.loosening import loosened
from planner.plan.prediction.predict import predict
from planner.validation.spared import Spared


def spared_plan(plan: Plan, spared: Spared, graph: OperatorGraph, batch: int) -> Plan:
    """A plan that recomputes no block, changed to recompute and offload these blocks. `batch` is that of the graph."""
    again = {stage.first_block + at for stage in plan.stages for at in range(min(spared.recomputed, stage.blocks))}
    away = {block for rank in range(plan.pipeline) for block in _held(plan, rank)[: spared.offloaded]}
    return _run_otherwise(plan, again, away, graph, batch)


def fewest_recomputed(
    plan: Plan, graph: OperatorGraph, batch: int, cluster: Cluster, fits: Callable[[Prediction], bool]
) -> tuple[int, Plan, Prediction] | None:
    """The fewest blocks of every rank that must be recomputed to fit, with that plan and its prediction.

    `plan` recomputes no block. None if it does not fit with all blocks recomputed. Prices about log2(blocks of a rank)
    plans.
    """

    def with_blocks(count: int) -> tuple[Plan, Prediction]:
        again = {block for rank in range(plan.pipeline) for block in _held(plan, rank)[:count]}
        otherwise = _run_otherwise(plan, again, (), graph, batch)
        return otherwise, predict(bind(otherwise, graph, batch), cluster)

    few, many = 0, max(len(_held(plan, rank)) for rank in range(plan.pipeline))
    best = with_blocks(many)
    if not fits(best[1]):
        return None
    while many - few > 1:
        middle = (few + many) // 2
        found = with_blocks(middle)
        if fits(found[1]):
            many, best = middle, found
        else:
            few = middle
    return many, *best


def _run_otherwise(plan: Plan, again: Collection[int], away: Collection[int], graph: OperatorGraph, batch: int) -> Plan:
    loose = loosened(bind(plan, graph, batch))
    groups = []
    for group in loose.groups:
        if group.blocks and group.first_block in away:
            group = replace(group, activations_home="host")
        elif group.blocks and group.first_block in again:
            group = replace(group, recomputation="full", kept=())
        groups.append(group)
    return replace(loose, groups=tuple(groups))


def _held(plan: Plan, rank: int) -> list[int]:
    """The blocks of a pipeline rank, those of its first stage first."""
    stages = [plan.stages[number] for number in plan.stages_of(rank)]
    return [stage.first_block + at for stage in stages for at in range(stage.blocks)]
