"""The peers of a rank in a pipeline: the values that cross the ends of its stages, their ranks, and their groups.

    line     ranks that send to each other                groups of a plan with v chunks on each of p ranks
    inside   0 -> 1 -> .. -> p-1, chunk c                 v for values, v for gradients
    over     p-1 of chunk c -> 0 of chunk c+1             v-1 for values, v-1 for gradients
    in a V   0 -> .. -> p-1, and p-1 -> .. -> 0           2 for values, 2 for gradients; between them nothing is sent

On one group messages from one rank to another keep their order, and an accelerator's library may make a message wait
for all that were queued before it on the same group, in either direction. So each line has separate groups: on each of
them messages go in one direction, along an open chain, and in the order of the micro-batches.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.stage_cut import StageCut
from planner.sharding.layout import local_shape
from runtime.comm.device_mesh import RankMesh, stage_line
from runtime.parameters.shards import LocalParameter

Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
"""For values and for gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that leaves a stage: local shape, dtype, and whether its gradient comes back."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The rank at the same place of the stage before or after, and the groups for values to it and gradients back; no
    groups where it is the same rank."""

    rank: int
    values: dist.ProcessGroup | None
    gradients: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One of the stages of a rank, and the values that cross its ends."""

    cut: StageCut
    before: Link | None
    after: Link | None
    arrivals: tuple[Crossing, ...]
    departures: tuple[Crossing, ...]


def everyone(place: RankMesh) -> dist.ProcessGroup | None:
    """The processes at the same place of all pipeline ranks; None where there is one rank only. Collective."""
    return None if place.stages == 1 else stage_line(place, tuple(range(place.stages)), "forward")


def build_chunks(bound: BoundPlan, place: RankMesh, cuts: Sequence[StageCut]) -> tuple[Chunk, ...]:
    """The stages of this rank, of all `cuts` of the plan. Collective: every rank calls it."""
    ranks, plan = place.stages, bound.plan
    line, turns_back = tuple(range(ranks)), plan.schedule_kind.v_shaped
    inside = [_groups(place, line, chunk, "") for chunk in range(len(cuts) // ranks)] if ranks > 1 else []
    over: list[Groups] = [
        (None, None) if turns_back else _groups(place, (ranks - 1, 0), chunk, " over")
        for chunk in range(len(cuts) // ranks - 1)
    ]

    def link(first: int, other: int) -> Link | None:
        """The link between stage `first` and the next one, to the rank of stage `other` of the two."""
        if not 0 <= first < len(cuts) - 1:
            return None
        chunk, along = divmod(first, ranks)
        values, gradients = over[chunk] if along == ranks - 1 else inside[chunk]
        return Link(rank=plan.rank_of(other) * place.mesh.size + place.rank, values=values, gradients=gradients)

    return tuple(
        Chunk(
            cut=cut,
            before=link(cut.stage - 1, cut.stage - 1),
            after=link(cut.stage, cut.stage + 1),
            arrivals=tuple(crossing_value(bound, name) for name in cut.receives),
            departures=tuple(crossing_value(bound, name) for name in cut.sends),
        )
        for cut in (cuts[stage] for stage in plan.stages_of(place.stage))
    )


def _groups(place: RankMesh, line: tuple[int, ...], chunk: int, word: str) -> Groups:
    number = f" {chunk}" if chunk else ""
    return stage_line(place, line, f"forward{word}{number}"), stage_line(place, line, f"backward{word}{number}")


def crossing_value(bound: BoundPlan, name: str) -> Crossing:
    """The piece of a value that is sent: as its producer made it."""
    graph = bound.graph
    maker = bound.operators[graph.producer[name]]
    results = [result for result in maker.operator.results if result is not None]
    layout = maker.layouts.results[results.index(name)].forward
    return Crossing(
        name=name,
        shape=local_shape(graph.types[name].shape, layout, bound.plan.mesh.sizes),
        dtype=getattr(torch, graph.types[name].dtype),
        differentiable=name in graph.differentiable,
    )


def whole_value(bound: BoundPlan, name: str) -> Crossing:
    """A value that every rank of its stage has whole: the loss."""
    tensor = bound.graph.types[name]
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return Crossing(name=name, shape=tensor.shape, dtype=dtype, differentiable=name in bound.graph.differentiable)


def share_parameters(
    parameters: Mapping[str, LocalParameter], bound: BoundPlan, place: RankMesh, cuts: Iterable[StageCut]
) -> None:
    """Tell parameters that several stages use (tied embeddings) which other ranks hold them. Collective."""
    holders: dict[str, set[int]] = {}
    for cut in cuts:
        for name in cut.parameters:
            holders.setdefault(name, set()).add(bound.plan.rank_of(cut.stage))
    for name in sorted(holders):
        ranks = tuple(sorted(holders[name]))
        if len(ranks) > 1:
            group = stage_line(place, ranks, "shared parameters")
            if place.stage in ranks:
                parameters[name].twins = group
