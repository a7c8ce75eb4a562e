"""The step of a plan as a timeline: what every pipeline rank computes and communicates, and when.

    rank 1   computation     F0    F1    B0  F2 ...  U          passes as `costmodels.simulate` runs them
             communication >F0> ==    >          = R  W         > transfer from another stage, = inside a pass,
                                                                R gradients, W new weights

The simulation gives the begin and end of passes. Inside of a pass the prediction knows sums, not an order. Transfers
from other stages are drawn first, as the software receives before it computes, then the work, then exposed
communication. If receives are posted ahead, a transfer is drawn on the rank that sends, when it is sent. Overlapped
communication is drawn next to the work, from its beginning.

Under a schedule without a flush a step has no end of its own. The drawing then shows the first step, which fills the
pipeline and is longer than the predicted step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from costmodels import Event, RankSeconds, RankUse, Schedule, simulate
from hardware_profiles import Seconds
from planner.plan.plan import Plan
from planner.plan.prediction.step import ChunkCost, ranks_seconds
from planner.plan.prediction.walk.stage_cost import StageCost
from planner.plan.schedule import orders_of

Stream: TypeAlias = Literal["computation", "communication"]
_PASSES = ("forward", "backward", "input_gradient", "weight_gradient")
INSIDE, HIDDEN, RECEIVE = "communication", "hidden communication", "stage transfer"
REDUCTION, GATHERING = "gradient reduction", "weight gathering"
_WORDS = {
    "reduction": REDUCTION,
    "gather": GATHERING,
    "optimizer": "optimizer",
    "send_forward": RECEIVE,
    "send_backward": RECEIVE,
}
_SENDS = ("send_forward", "send_backward")


class Span(NamedTuple):
    """An activity of a pipeline rank; `micro_batch` is -1 if there is none. A transfer brings a value from rank
    `source`, whose work on it had ended at `sent`; -1 and 0 for other spans."""

    start: Seconds
    end: Seconds
    rank: int
    stream: Stream
    kind: str
    micro_batch: int
    chunk: int
    slice: int
    source: int = -1
    sent: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """A simulated step: spans rank by rank in the order of the schedule, and how each rank spends the step."""

    seconds: Seconds
    spans: tuple[Span, ...]
    ranks: tuple[RankUse, ...]


def timeline_of(plan: Plan, costs: Sequence[StageCost]) -> StepTimeline:
    """The step of a plan whose pipeline ranks have these costs."""
    ranks = ranks_seconds([cost.chunks for cost in costs], [cost.all_once for cost in costs], plan.schedule)
    found = simulate(ranks, orders_of(plan), v_shaped=plan.schedule_kind.v_shaped)
    passes = _Passes([cost.chunks for cost in costs], ranks, plan.schedule_kind)
    done: dict[tuple[bool, int, int, int], Seconds] = {}  # end of work, by direction, stage, micro-batch, slice
    for event in found.events:
        if event.kind in _PASSES:
            one = passes.of(event)
            done[passes.key(event)] = event.start + one.received + one.work
    spans = [span for event in found.events for span in _spans(event, passes, done)]
    return StepTimeline(seconds=found.seconds, spans=tuple(spans), ranks=found.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Seconds of a pass: receiving, work, communication that overlaps with it, and exposed communication behind it."""

    received: Seconds
    work: Seconds
    hidden: Seconds
    waits: Seconds


class _Passes:
    """The parts of the passes of all ranks."""

    def __init__(self, chunks: Sequence[Sequence[ChunkCost]], ranks: Sequence[RankSeconds], schedule: Schedule) -> None:
        self.chunks, self.ranks, self.count, self.schedule = chunks, ranks, len(ranks), schedule

    def key(self, event: Event) -> tuple[bool, int, int, int]:
        """The pass and its stage; the deferred part of a backward pass has a key of its own."""
        stage = self.schedule.stage_of(event.rank, event.chunk, self.count)
        if event.kind == "weight_gradient":
            return (False, -2 - stage, event.micro_batch, event.slice)
        return (event.kind == "forward", stage, event.micro_batch, event.slice)

    def of(self, event: Event) -> _Pass:
        seconds, cost = self.ranks[event.rank].chunks[event.chunk], self.chunks[event.rank][event.chunk]
        if event.kind == "forward":
            one, sent = seconds.forward[event.slice], cost.forward.transfers
        elif event.kind == "weight_gradient":
            one, sent = seconds.weight_gradient[event.slice], 0.0
        else:
            one, sent = seconds.backward[event.slice], cost.backward.transfers
        received = 0.0 if cost.receives_ahead else min(one.blocking, sent * cost.interleave)
        return _Pass(
            received=received, work=one.computation, hidden=one.overlapped, waits=max(0.0, one.blocking - received)
        )


def _spans(event: Event, passes: _Passes, done: dict[tuple[bool, int, int, int], Seconds]) -> Iterator[Span]:
    """The spans of one event of the simulation, with the communication inside of passes."""
    rest = event.micro_batch, event.chunk, event.slice
    if event.kind in _WORDS and event.end > event.start:
        stream: Stream = "computation" if event.kind == "optimizer" else "communication"
        source, sent = (event.rank, event.start) if event.kind in _SENDS else (-1, 0.0)
        yield Span(event.start, event.end, event.rank, stream, _WORDS[event.kind], *rest, source=source, sent=sent)
    if event.kind not in _PASSES:
        return
    one, begin = passes.of(event), event.start
    if one.received:
        forward, stage, micro_batch, piece = passes.key(event)
        before = stage - 1 if forward else stage + 1
        sent, source = done[forward, before, micro_batch, piece], passes.schedule.rank_of(before, passes.count)
        begin += one.received
        yield Span(event.start, begin, event.rank, "communication", RECEIVE, *rest, source=source, sent=sent)
    yield Span(begin, begin + one.work, event.rank, "computation", event.kind, *rest)
    if one.hidden:
        yield Span(begin, begin + one.hidden, event.rank, "communication", HIDDEN, *rest)
    if one.waits:
        after = begin + max(one.work, one.hidden)
        yield Span(after, after + one.waits, event.rank, "communication", INSIDE, *rest)
