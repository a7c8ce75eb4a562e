"""What saves memory beside the degrees of a run: blocks that are computed again, or whose activations wait on the host.

    stage     block 0 | block 1 | block 2 | block 3        the first `recomputed` are run again in their backward pass
              again     again     kept      kept           (Megatron: --recompute-method block --recompute-num-layers 2)
    rank      away      away      kept      kept           the first `offloaded` send what they save to the host
                                                           (Transformer Engine: cpu_offloading_num_layers 2)

A row may say so, or the recipe that it names. A run that says nothing of recomputation, was made, and does not fit with
nothing computed again must have computed something again: then the fewest blocks of every pipeline rank are taken with
which it fits, by bisection, as memory falls with each. That follows from our model of memory alone, and is noted.
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
    """Blocks of every stage that are recomputed whole, and of every pipeline rank that offload what they save; parts
    that every block recomputes (`planner.plan.layout.kept.Kept`), and what it makes again (`Software.remakes`)."""

    recomputed: int = 0
    offloaded: int = 0
    but: tuple[str, ...] = ()
    remade: tuple[str, ...] = ()

    @property
    def by_block(self) -> bool:
        """Whether some blocks run otherwise than others."""
        return bool(self.recomputed or self.offloaded)


NOTHING_SPARED = Spared()


def spared_plan(plan: Plan, spared: Spared, graph: OperatorGraph, batch: int) -> Plan:
    """A plan that recomputes no block, with these blocks recomputed and offloaded. `batch` is that of the graph."""
    again = {stage.first_block + at for stage in plan.stages for at in range(min(spared.recomputed, stage.blocks))}
    away = {block for rank in range(plan.pipeline) for block in _held(plan, rank)[: spared.offloaded]}
    return _run_otherwise(plan, again, away, graph, batch)


def fewest_recomputed(
    plan: Plan, graph: OperatorGraph, batch: int, cluster: Cluster, fits: Callable[[Prediction], bool]
) -> tuple[int, Plan, Prediction] | None:
    """The fewest blocks of every rank to recompute for a plan that recomputes none to fit, that plan, and what it takes
    then; None where it does not fit with all of them recomputed. Prices about log2 of the blocks of a rank plans."""

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
