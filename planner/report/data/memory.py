"""Memory of the devices of every pipeline rank: by class, and over the step.

    bytes  |        ______                      what is stored all the time (weights, gradients, optimizer states, what
           |   ____|      |____                 passes need while they run), and on top of it what every micro-batch
           |__|                |__  time        holds from the start of its forward to the end of its backward pass
                                                (of one that is taken apart, of its first turn)

The line is an upper bound: at each moment passes are counted with their maximum need. Its highest point is the
predicted peak of the rank without allocator slack; it is lower if a rank has several stages, which do not peak at the
same moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels import peak_memory
from hardware_profiles import Bytes, Cluster, Machine, MixedCluster, Seconds, clusters_of_ranks
from planner.plan.compare.dissection import RankDissection
from planner.plan.plan import SLACK, Plan
from planner.plan.prediction.timeline import StepTimeline

CURVES = 8
"""Maximum number of ranks whose memory is drawn over the step."""
POINTS = 1200
"""Maximum number of points of a curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of a device of one pipeline rank by class, at its peak; the micro-batches (or slices) in flight then, and
    the bytes of one. `group` is the profile of its devices if there are several kinds, else ""."""

    rank: int
    group: str
    capacity_bytes: Bytes
    classes: tuple[tuple[str, Bytes], ...]
    peak_bytes: Bytes
    live: int
    held_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Bytes of a rank over the step: from each time on, until the next."""

    rank: int
    group: str
    times: tuple[Seconds, ...]
    nbytes: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """All ranks against the capacity of a device (of the largest, if there are several kinds); curves of the first
    ranks, the last and the fullest."""

    capacity_bytes: Bytes
    ranks: tuple[RankMemory, ...]
    curves: tuple[Curve, ...]


def memory_of(plan: Plan, ranks: Sequence[RankDissection], timeline: StepTimeline, machine: Machine) -> Memory:
    """Memory of every pipeline rank of a plan."""
    clusters = clusters_of_ranks(machine, len(ranks))
    names = [own.name if isinstance(machine, MixedCluster) else "" for own in clusters]
    found = tuple(_rank(rank, one, clusters[rank], names[rank]) for rank, one in enumerate(ranks))
    fullest = max(found, key=lambda one: (one.peak_bytes / one.capacity_bytes, one.peak_bytes)).rank
    shown = sorted({*range(min(len(ranks), CURVES - 2)), len(ranks) - 1, fullest})
    return Memory(
        capacity_bytes=max(one.capacity_bytes for one in found),
        ranks=found,
        curves=tuple(_curve(plan, rank, names[rank], ranks[rank], timeline) for rank in shown),
    )


def _rank(rank: int, one: RankDissection, cluster: Cluster, group: str) -> RankMemory:
    classes = one.cost.memory
    wanted = sum(classes.values())
    peak = float(peak_memory(wanted, 0.0, 0.0, cluster.device, cluster.software))
    return RankMemory(
        rank=rank,
        group=group,
        capacity_bytes=cluster.device.memory,
        classes=(*classes.items(), (SLACK, peak - wanted)),
        peak_bytes=peak,
        live=sum(one.live),
        held_bytes=max(one.held),
    )


def _curve(plan: Plan, rank: int, group: str, one: RankDissection, timeline: StepTimeline) -> Curve:
    """The stored bytes, and steps up and down with the micro-batches in flight."""
    held = [nbytes * plan.training.interleave for nbytes in one.held]
    changes = []
    for span in timeline.spans:
        if span.rank == rank and span.stream == "computation":
            if span.kind == "forward":
                changes.append((span.start, held[span.chunk]))
            elif span.kind in ("backward", "input_gradient"):
                changes.append((span.end, -held[span.chunk]))
    stored = sum(one.cost.memory.values()) - sum(n * nbytes for n, nbytes in zip(one.live, one.held, strict=True))
    times, levels = [0.0], [stored]
    moment = timeline.seconds * 1e-9  # what ends when something else begins is freed by then, whatever rounding says
    for time, change in sorted(changes, key=lambda one: (round(one[0] / moment), one[1])):
        times.append(time)
        levels.append(levels[-1] + change)
    times, levels = _thinned(times, levels)
    return Curve(rank=rank, group=group, times=(*times, timeline.seconds), nbytes=(*levels, levels[-1]))


def _thinned(times: list[Seconds], levels: list[Bytes]) -> tuple[list[Seconds], list[Bytes]]:
    """At most `POINTS` points: of neighbouring points the highest is kept."""
    every = -(-len(times) // POINTS)
    starts = range(0, len(times), every)
    return [times[at] for at in starts], [max(levels[at : at + every]) for at in starts]
