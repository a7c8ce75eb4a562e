"""The cluster as a plan uses it: its levels, the mesh axes that reach them, and the communication over them.

    level "cluster"   [ node ]---[ node ]        axis0 8 of stride 8     reaches this level
    level "node"      d0 .. d7                   axis1 8 of stride 1     stays below

A collective counts at the outermost level that its group reaches, where it is slowest; the inner levels of a
hierarchical collective are in its seconds and not counted again. Bytes are those of one device of one pipeline rank, as
`costmodels.collective_time` counts them for the kind. Seconds are on the wire, as if collectives ran alone and one by
one: overlapped or bucketed collectives take less of the step.

With several kinds of devices each group has its own levels and axes, and transfers between groups use the level between
them, which is the outermost.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from costmodels import collective_time
from hardware_profiles import (
    Bytes,
    BytesPerSecond,
    Cluster,
    Group,
    Level,
    Machine,
    MixedCluster,
    Seconds,
    clusters_of_ranks,
    links_of_all,
    links_of_ranks,
)
from planner.plan.binding.bind import BoundPlan
from planner.plan.compare.dissection import RankDissection
from planner.plan.prediction.charges import UNCHARGED, Charge

STAGES = "stages"
"""The axis name of transfers between pipeline ranks."""

BETWEEN = "between groups"
"""The level between groups of different devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Collectives of one kind along one axis in one part of the step: their number per step, and their total bytes and
    seconds. `level` is the outermost level that they reach."""

    level: str
    along: str
    kind: str
    part: str
    messages: int
    nbytes: Bytes
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSpan:
    """A mesh axis, or the pipeline: its size, the stride of its devices, and how many units it joins on each level."""

    name: str
    size: int
    stride: int
    levels: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLevel:
    """A network level, innermost first; `fan_out` is None if unbounded, `units` of the level below are in use, and the
    bandwidth is per device and direction while all devices of a group communicate."""

    name: str
    kind: str
    fan_out: int | None
    units: int
    bandwidth: BytesPerSecond
    oversubscription: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkGroup:
    """One of several groups of devices: its profile, its pipeline ranks (the first and their number), and its levels
    and axes."""

    profile: str
    devices: int
    first_rank: int
    ranks: int
    levels: tuple[NetworkLevel, ...]
    axes: tuple[AxisSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The cluster, the axes, and the communication of a device of pipeline rank `rank` in a step, longest first.

    With several kinds of devices `levels` and `axes` are those of this rank's group; `groups` has all groups in the
    order of the pipeline, and `between` is the level between them. Empty and None if all devices are alike.
    """

    rank: int
    levels: tuple[NetworkLevel, ...]
    axes: tuple[AxisSpan, ...]
    crossings: tuple[Crossing, ...]
    groups: tuple[NetworkGroup, ...] = ()
    between: NetworkLevel | None = None


def network_of(bound: BoundPlan, rank: RankDissection, number: int, machine: Machine) -> Network:
    """The communication of pipeline rank `number` over the levels of a machine."""
    ranks = bound.plan.pipeline
    own = clusters_of_ranks(machine, ranks)[number]
    crossings = _sums(bound, rank, number, machine)
    if isinstance(machine, Cluster):
        axes = (*_axes(bound, own), *_pipeline(bound, own, ranks))
        return Network(rank=number, levels=_levels(own), axes=axes, crossings=crossings)
    groups = tuple(_groups(bound, machine))
    home = groups[machine.group_of_rank(number, ranks)]
    return Network(
        rank=number,
        levels=home.levels,
        axes=home.axes,
        crossings=crossings,
        groups=groups,
        between=_between(machine),
    )


def _groups(bound: BoundPlan, machine: MixedCluster) -> Iterable[NetworkGroup]:
    first, size = 0, bound.plan.mesh.size
    for one in machine.groups:
        ranks = one.devices // size
        yield NetworkGroup(
            profile=one.name,
            devices=one.devices,
            first_rank=first,
            ranks=ranks,
            levels=_levels(one),
            axes=(*_axes(bound, one), *_pipeline(bound, one, ranks)),
        )
        first += ranks


def _between(machine: MixedCluster) -> NetworkLevel:
    """The slowest link between neighbouring groups."""
    links = links_of_all(machine, len(machine.groups), machine.devices // len(machine.groups))
    slowest = min((group.spans[-1].level for group in links), key=_passed)
    return replace(_level(slowest, len(machine.groups)), name=BETWEEN)


def _passed(level: Level) -> BytesPerSecond:
    return level.bandwidth / level.oversubscription


def _levels(cluster: Cluster) -> tuple[NetworkLevel, ...]:
    found, units = [], cluster.devices
    for level in cluster.levels:
        joined = units if level.fan_out is None else min(units, level.fan_out)
        found.append(_level(level, joined))
        units = math.ceil(units / joined)
    return tuple(found)


def _level(level: Level, units: int) -> NetworkLevel:
    return NetworkLevel(
        name=level.name,
        kind=level.network,
        fan_out=level.fan_out,
        units=units,
        bandwidth=level.bandwidth,
        oversubscription=level.oversubscription,
    )


def _axes(bound: BoundPlan, cluster: Cluster) -> tuple[AxisSpan, ...]:
    return tuple(_span(axis.name, axis.size, axis.stride, cluster) for axis in bound.plan.mesh.axes)


def _pipeline(bound: BoundPlan, cluster: Cluster, ranks: int) -> tuple[AxisSpan, ...]:
    """The pipeline as an axis; none for a single rank."""
    return (_span(STAGES, ranks, bound.plan.mesh.size, cluster),) if ranks > 1 else ()


def _span(name: str, size: int, stride: int, cluster: Cluster) -> AxisSpan:
    spans = tuple((span.level.name, span.count) for span in cluster.group(size, stride).spans)
    return AxisSpan(name=name, size=size, stride=stride, levels=spans)


def _sums(bound: BoundPlan, rank: RankDissection, number: int, machine: Machine) -> tuple[Crossing, ...]:
    turns = bound.plan.stage_passes
    counts: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    nbytes: defaultdict[tuple[str, str, str, str], Bytes] = defaultdict(float)
    seconds: defaultdict[tuple[str, str, str, str], Seconds] = defaultdict(float)
    for sent, count in rank.cost.messages.items():
        links = tuple(group for group in links_of(bound, sent, number, machine) if group.spans)
        if sent.part == UNCHARGED or not links:
            continue
        times = count * (1 if sent.phase == "update" else turns)
        axis = sent.message.axis
        along = STAGES if axis is None else bound.plan.mesh.axes[axis].name
        key = (BETWEEN if len(links) > 1 else links[0].spans[-1].level.name, along, sent.message.kind, sent.part)
        counts[key] += times
        nbytes[key] += times * sent.message.nbytes
        seconds[key] += times * max(
            float(collective_time(sent.message.kind, sent.message.nbytes, group)) for group in links
        )
    return _sorted(
        Crossing(level=k[0], along=k[1], kind=k[2], part=k[3], messages=counts[k], nbytes=nbytes[k], seconds=seconds[k])
        for k in counts
    )


def _sorted(found: Iterable[Crossing]) -> tuple[Crossing, ...]:
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.level, one.along, one.kind, one.part)))


def links_of(bound: BoundPlan, sent: Charge, number: int, machine: Machine) -> tuple[Group, ...]:
    """The links that a transfer of pipeline rank `number` may use; the slowest counts. Transfers come from the ranks of
    the previous stages (forward) or of the next ones (backward), except gradient sums of a tied parameter (first and
    last rank) and norms (all ranks)."""
    mesh, ranks = bound.plan.mesh, bound.plan.pipeline
    if sent.message.axis is not None:
        line = mesh.axes[sent.message.axis]
        return (clusters_of_ranks(machine, ranks)[number].group(line.size, line.stride),)
    if sent.message.kind == "send_recv":
        plan, step = bound.plan, -1 if sent.phase == "forward" else 1
        stages = (stage + step for stage in plan.stages_of(number))
        others = {plan.rank_of(stage) for stage in stages if 0 <= stage < len(plan.stages)} - {number}
        found = (links_of_ranks(machine, number, other, ranks, mesh.size) for other in sorted(others))
        return tuple(dict.fromkeys(link for links in found for link in links))
    if sent.part == "gradient reduction":
        return links_of_ranks(machine, 0, ranks - 1, ranks, mesh.size)
    return links_of_all(machine, ranks, mesh.size)
