"""The content of a pipeline rank's passes: its operators in order, and its collectives by kind and axis.

    pass       ──────────────────────────         operators one after the other, forward in the order of the graph,
    operators  q k v attention o norm up ..       backward the other way round
    waits      ======                             all_gather axis0 (8 devices) x 4, reduce_scatter axis0 x 4

The prediction knows the time of an operator alone and sums of communication, but not when they run within a pass. So
times are shares of the pass in the timeline.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels import collective_time
from hardware_profiles import Bytes, Machine, Seconds
from planner.graph.per_replica import called
from planner.plan.binding.bind import BoundPlan, stage_of_operators
from planner.plan.compare.dissection import RankDissection
from planner.plan.prediction.charges import UNCHARGED, Phase
from planner.report.data.network import STAGES, links_of

REDUCED, GATHERED, RECEIVED = "gradient reduction", "weight gathering", "stage transfer"
_ONCE = (REDUCED, GATHERED, RECEIVED)
"""Parts with their own spans in a timeline; all others are inside of passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """An operator of a stage: its seconds alone, in the forward pass, and in the backward pass including
    recomputation."""

    name: str
    op: str
    forward: Seconds
    backward: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Equal collectives along one axis, in groups of that many devices: their number, their total bytes as
    `costmodels.collective_time` counts them for the kind, and seconds on the wire. `part` is "" inside of a pass, else
    the kind of their own span; `backward` says in which pass."""

    kind: str
    along: str
    devices: int
    part: str
    backward: bool
    messages: int
    nbytes: Bytes
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """A pipeline rank: the operators of each chunk, and the collectives of one micro-batch or of the end of a step."""

    chunks: tuple[tuple[OperatorTime, ...], ...]
    collectives: tuple[Collective, ...]


def inside_of(bound: BoundPlan, ranks: Sequence[RankDissection], machine: Machine) -> tuple[Inside, ...]:
    """The content of the passes of every pipeline rank."""
    return tuple(
        Inside(chunks=_operators(bound, one, number), collectives=_collectives(bound, one, number, machine))
        for number, one in enumerate(ranks)
    )


def _operators(bound: BoundPlan, rank: RankDissection, number: int) -> tuple[tuple[OperatorTime, ...], ...]:
    stages, ranks = stage_of_operators(bound), bound.plan.pipeline
    found: list[list[OperatorTime]] = [[] for _ in range(bound.plan.virtual_stages)]
    for one in rank.operators:
        told, operator = dict(one.seconds), bound.operators[one.at].operator
        found[stages[one.at] // ranks].append(
            OperatorTime(
                name=operator.name,
                op=called(operator),
                forward=told.get("forward", 0.0),
                backward=told.get("backward", 0.0) + told.get("recomputation", 0.0),
            )
        )
    return tuple(map(tuple, found))


def _collectives(bound: BoundPlan, rank: RankDissection, number: int, machine: Machine) -> tuple[Collective, ...]:
    counts: defaultdict[tuple[str, str, int, str, bool], int] = defaultdict(int)
    nbytes: defaultdict[tuple[str, str, int, str, bool], Bytes] = defaultdict(float)
    seconds: defaultdict[tuple[str, str, int, str, bool], Seconds] = defaultdict(float)
    for sent, count in rank.cost.messages.items():
        links = tuple(group for group in links_of(bound, sent, number, machine) if group.spans)
        if sent.part == UNCHARGED or not links:
            continue
        axis = None if sent.message.axis is None else bound.plan.mesh.axes[sent.message.axis]
        along, devices = (STAGES, 2) if axis is None else (axis.name, axis.size)
        part = sent.part if sent.part in _ONCE else ""
        key = (sent.message.kind, along, devices, part, _is_backward(sent.phase))
        counts[key] += count
        nbytes[key] += count * sent.message.nbytes
        seconds[key] += count * max(float(collective_time(key[0], sent.message.nbytes, group)) for group in links)
    found = (
        Collective(
            kind=k[0], along=k[1], devices=k[2], part=k[3], backward=k[4],
            messages=counts[k], nbytes=nbytes[k], seconds=seconds[k],
        )
        for k in counts
    )  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.kind, one.along, one.part, one.backward)))


def _is_backward(phase: Phase) -> bool:
    return phase != "forward"
