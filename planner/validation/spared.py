"""Memory savings of a run besides its degrees: recomputed blocks, and blocks whose activations are offloaded.

    stage     block 0 | block 1 | block 2 | block 3        the first `recomputed` are run again in their backward pass
              again     again     kept      kept           (Megatron: --recompute-method block --recompute-num-layers 2)
    rank      away      away      kept      kept           the first `offloaded` send what they save to the host
                                                           (Transformer Engine: cpu_offloading_num_layers 2)

A row or its recipe may state them. If a run was made, says nothing about recomputation, and does not fit without any,
it must have recomputed something. Then every pipeline rank recomputes the fewest blocks with which it fits. Bisection
finds their number, because memory falls with each. This follows from our memory model alone, and is noted.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from hardware_profiles import Cluster
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import bind
from planner.plan.plan import Plan, Prediction
from planner.plan.prediction.loosening import loosened
from planner.plan.prediction.predict import predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Spared:
    """What blocks do to save memory.

    Attributes:
        recomputed: blocks of every stage that are recomputed whole.
        offloaded: blocks of every pipeline rank that offload what they save.
        but: parts that every block recomputes (`planner.plan.layout.kept.Kept`).
        remade: what every block recomputes almost for free (`Software.remakes`).
    """

    recomputed: int = 0
    offloaded: int = 0
    but: tuple[str, ...] = ()
    remade: tuple[str, ...] = ()

    @property
    def by_block(self) -> bool:
        """Whether some blocks run differently from others."""
        return bool(self.recomputed or self.offloaded)


NOTHING_SPARED = Spared()


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
