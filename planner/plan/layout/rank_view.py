"""One rank of a plan: its place, its peers, and its pieces of inputs and parameters.

    world rank = pipeline rank * devices of a stage + place inside the stage        place = coordinate on the axes
    pipeline rank p of P has the stages p, P + p, 2 P + p, ...

Nothing is executed: pieces follow from layouts, as the runtime cuts them. A dim of a piece consists of several runs
where an axis cuts sequences in zigzag order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import RequestError
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.parameter_owners import Owner, owners_of
from planner.plan.layout.roles import Roles
from planner.plan.layout.stage_cut import cut_stage
from planner.sharding.even_cut import even_piece
from planner.sharding.layout import Layout
from planner.sharding.mesh import Mesh
from planner.sharding.zigzag import zigzag_runs

Runs = tuple[tuple[int, int], ...]
"""(start, stop) of what is held along a dim, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldInput:
    """An input of the model with the samples of a micro-batch, and the piece of it along every dim."""

    name: str
    shape: tuple[int, ...]
    piece: tuple[Runs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A parameter and the pieces of its weight, of its accumulated gradient, and of the optimizer's state; a
    gradient may be a sum over this rank's samples only, on the axes `partial`. Nothing is held of the gradient and the
    state of a parameter that is not trained."""

    name: str
    shape: tuple[int, ...]
    weight: tuple[Runs, ...]
    gradient: tuple[Runs, ...]
    state: tuple[Runs, ...]
    partial: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Ranks that this one communicates with, itself among them: those of a mesh axis, or of the pipeline."""

    name: str
    role: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """See the module. `stages` are (number, first block, blocks); `peers` are those of the pipeline, where there is
    one, and those of every axis."""

    rank: int
    pipeline_rank: int
    coordinate: tuple[int, ...]
    stages: tuple[tuple[int, int, int], ...]
    peers: tuple[Peers, ...]
    inputs: tuple[HeldInput, ...]
    parameters: tuple[HeldParameter, ...]


def rank_view(bound: BoundPlan, found: Roles, rank: int) -> RankView:
    """What one rank has. Raises RequestError for a rank that does not exist."""
    plan, mesh = bound.plan, bound.plan.mesh
    if not 0 <= rank < plan.cluster.devices:
        raise RequestError(
            f"rank {rank}: the plan has {plan.cluster.devices} devices, ranks 0 to {plan.cluster.devices - 1}"
        )
    pipeline_rank, place = divmod(rank, mesh.size)
    coordinate = mesh.coordinate(place)
    own = plan.stages_of(pipeline_rank)
    firsts = [sum(stage.blocks for stage in plan.stages[:number]) for number in range(len(plan.stages))]
    cuts = [cut_stage(bound, number) for number in own]
    held = frozenset[str]().union(*(cut.parameters for cut in cuts))
    read = {name for cut in cuts for at in cut.operators for name in bound.graph.operators[at].operands}
    owners = owners_of(bound, held)
    return RankView(
        rank=rank,
        pipeline_rank=pipeline_rank,
        coordinate=coordinate,
        stages=tuple((number, firsts[number], plan.stages[number].blocks) for number in own),
        peers=_peers(bound, found, rank),
        inputs=tuple(_input(bound, name, layout, coordinate) for name, layout in bound.inputs.items() if name in read),
        parameters=tuple(
            _parameter(bound, one.name, coordinate, owners.get(one.name))
            for one in bound.graph.parameters
            if one.name in held
        ),
    )


def _peers(bound: BoundPlan, found: Roles, rank: int) -> tuple[Peers, ...]:
    plan, mesh = bound.plan, bound.plan.mesh
    peers = []
    if plan.pipeline > 1:
        ranks = tuple(stage * mesh.size + rank % mesh.size for stage in range(plan.pipeline))
        peers.append(Peers(name="pipeline", role="stages", ranks=ranks))
    for axis, role in zip(mesh.axes, found.axes, strict=True):
        peers.append(Peers(name=axis.name, role=role.role, ranks=axis.line(rank)))
    return tuple(peers)


def _input(bound: BoundPlan, name: str, layout: Layout, coordinate: Sequence[int]) -> HeldInput:
    shape, sequences = bound.graph.types[name].shape, bound.sequences.get(name, ())
    return HeldInput(name=name, shape=shape, piece=piece_of(shape, layout, bound.plan.mesh, coordinate, sequences))


def _parameter(bound: BoundPlan, name: str, coordinate: Sequence[int], owner: Owner | None) -> HeldParameter:
    shape, stored, mesh = bound.graph.types[name].shape, bound.parameters[name], bound.plan.mesh
    weight, gradient, state = (
        piece_of(shape, layout, mesh, coordinate) for layout in (stored.weight, stored.gradient, stored.state)
    )
    trained, nothing = name in bound.graph.differentiable, tuple(() for _ in shape)
    if not trained or (owner is not None and not owner.at(coordinate)):
        state = nothing
    partial = (axis.name for axis, one in zip(mesh.axes, stored.gradient, strict=True) if one.kind == "partial")
    return HeldParameter(
        name=name,
        shape=shape,
        weight=weight,
        gradient=gradient if trained else nothing,
        state=state,
        partial=tuple(partial) if trained else (),
    )


def piece_of(
    shape: Sequence[int],
    layout: Layout,
    mesh: Mesh,
    coordinate: Sequence[int],
    sequences: Sequence[int] | frozenset[int] = (),
) -> tuple[Runs, ...]:
    """What a device holds of a tensor along every dim. Where several axes cut a dim, the first one is the outer cut.
    Dims that are `sequences` are cut in the order of the axis."""
    found: list[Runs] = [((0, extent),) for extent in shape]
    for axis, placement, place in zip(mesh.axes, layout, coordinate, strict=True):
        if placement.is_shard and axis.size > 1:
            runs = found[placement.dim]
            extent = sum(stop - start for start, stop in runs)
            if axis.order == "zigzag" and placement.dim in sequences:
                wanted = [(start, start + length) for start, length in zigzag_runs(extent, axis.size, place)]
            else:
                wanted = [even_piece(extent, axis.size, place)]
            found[placement.dim] = tuple(run for piece in wanted for run in _within(runs, *piece))
    return tuple(_joined(runs) for runs in found)


def _within(runs: Runs, first: int, last: int) -> list[tuple[int, int]]:
    """The elements number `first` to `last` of the elements in some runs."""
    found, before = [], 0
    for start, stop in runs:
        low, high = max(first, before), min(last, before + stop - start)
        if low < high:
            found.append((start + low - before, start + high - before))
        before += stop - start
    return found


def _joined(runs: Runs) -> Runs:
    """Runs, with those that touch joined."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)
