"""The cluster as a plan uses it: its levels, the axes of the mesh that reach them, and what crosses.

    level "cluster"   [ node ]---[ node ]        axis0 8 of stride 8     reaches this level
    level "node"      d0 .. d7                   axis1 8 of stride 1     stays below

A message counts at the outermost level that its group reaches, where it is slowest; what a hierarchical collective
moves on levels inside is in its seconds, not counted again. Bytes are those of one device of one pipeline rank, as
`costmodels.collective_time` counts them for the kind. Seconds are on the wire, as if nothing ran beside and messages
went one by one: what software hides or sends in buckets is less in the step.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from costmodels import collective_time
from hardware_profiles import Bytes, BytesPerSecond, Cluster, Group, Seconds
from planner.plan.bind import BoundPlan
from planner.plan.charges import UNCHARGED, Charge
from planner.plan.dissection import RankDissection

STAGES = "stages"
"""What goes from one pipeline rank to another, where axes have their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Messages of one kind along one axis in one part of the step: how many a step, bytes and seconds of all of them.
    `level` is the outermost one that they reach."""

    level: str
    along: str
    kind: str
    part: str
    messages: int
    nbytes: Bytes
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSpan:
    """A mesh axis, or the pipeline: its size, the distance of its devices, how many units it joins on each level."""

    name: str
    size: int
    stride: int
    levels: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLevel:
    """A level of the network, innermost first; `fan_out` None where it is unbounded, `units` of the level below that
    are in use, bandwidth per device and direction as a group of devices has it while all talk."""

    name: str
    kind: str
    fan_out: int | None
    units: int
    bandwidth: BytesPerSecond
    oversubscription: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The cluster, the axes, and what a device of pipeline rank `rank` sends in a step, the longest first."""

    rank: int
    levels: tuple[NetworkLevel, ...]
    axes: tuple[AxisSpan, ...]
    crossings: tuple[Crossing, ...]


def network_of(bound: BoundPlan, rank: RankDissection, number: int, cluster: Cluster) -> Network:
    """What crosses the levels of a cluster under a plan, by pipeline rank `number`."""
    return Network(
        rank=number, levels=_levels(cluster), axes=_axes(bound, cluster), crossings=_sums(bound, rank, cluster)
    )


def _levels(cluster: Cluster) -> tuple[NetworkLevel, ...]:
    found, units = [], cluster.devices
    for level in cluster.levels:
        joined = units if level.fan_out is None else min(units, level.fan_out)
        found.append(
            NetworkLevel(
                name=level.name,
                kind=level.network,
                fan_out=level.fan_out,
                units=joined,
                bandwidth=level.bandwidth,
                oversubscription=level.oversubscription,
            )
        )
        units = math.ceil(units / joined)
    return tuple(found)


def _axes(bound: BoundPlan, cluster: Cluster) -> tuple[AxisSpan, ...]:
    mesh = bound.plan.mesh
    lines = [(axis.name, axis.size, axis.stride) for axis in mesh.axes]
    if bound.plan.pipeline > 1:
        lines.append((STAGES, bound.plan.pipeline, mesh.size))
    found = []
    for name, size, stride in lines:
        spans = tuple((span.level.name, span.count) for span in cluster.group(size, stride).spans)
        found.append(AxisSpan(name=name, size=size, stride=stride, levels=spans))
    return tuple(found)


def _sums(bound: BoundPlan, rank: RankDissection, cluster: Cluster) -> tuple[Crossing, ...]:
    turns = bound.plan.training.micro_batches * bound.plan.slices
    counts: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    nbytes: defaultdict[tuple[str, str, str, str], Bytes] = defaultdict(float)
    seconds: defaultdict[tuple[str, str, str, str], Seconds] = defaultdict(float)
    for sent, number in rank.cost.messages.items():
        group = _group(bound, sent, cluster)
        if sent.part == UNCHARGED or not group.spans:
            continue
        times = number * (1 if sent.phase == "update" else turns)
        axis = sent.message.axis
        along = STAGES if axis is None else bound.plan.mesh.axes[axis].name
        key = (group.spans[-1].level.name, along, sent.message.kind, sent.part)
        counts[key] += times
        nbytes[key] += times * sent.message.nbytes
        seconds[key] += times * float(collective_time(sent.message.kind, sent.message.nbytes, group))
    return _sorted(
        Crossing(level=k[0], along=k[1], kind=k[2], part=k[3], messages=counts[k], nbytes=nbytes[k], seconds=seconds[k])
        for k in counts
    )


def _sorted(found: Iterable[Crossing]) -> tuple[Crossing, ...]:
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.level, one.along, one.kind, one.part)))


def _group(bound: BoundPlan, sent: Charge, cluster: Cluster) -> Group:
    """The devices of a message. What goes between pipeline ranks goes to the next one, but sums of a tied parameter
    (the first and the last rank) and norms (all of them)."""
    mesh, ranks = bound.plan.mesh, bound.plan.pipeline
    if sent.message.axis is not None:
        line = mesh.axes[sent.message.axis]
        return cluster.group(line.size, line.stride)
    if sent.message.kind == "send_recv":
        return cluster.group(2, mesh.size)
    if sent.part == "gradient reduction":
        return cluster.group(2, (ranks - 1) * mesh.size)
    return cluster.group(ranks, mesh.size)
