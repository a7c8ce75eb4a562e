"""A training step of a pipeline, turn by turn: which rank does what when, and what it waits for.

    rank 0  computation   F0 F1 F2 .  .  B0 F3 B1 ...           passes in the order of the schedule
            inside           ==                                 communication of a pass that may run under its work
            parameters    gather ......... reduce reduce        weights before a pass, gradients after it, in order
            transfers       0>1 0>1                             results to the rank that waits for them, in order
    rank 1  computation         F0 F1 B0 ...

Every rank takes its turns in a fixed order, and each of its queues serves in the order in which the turns fill it. So
the step is a graph of events without choices, and the end of an event is

    end(e) = max over what it waits for of end + seconds(e)

a longest path. A search may rely on two consequences. A longer duration never makes the step shorter (a list scheduler
that picks any ready work can do that: Graham's anomalies). And waiting for a communication is never faster than
overlapping it, because it only adds edges. One pass over the turns: a rank goes on until it waits for another, which
wakes it. O(turns), a few microseconds each.

    pass        computation + blocking + the part of `overlapped` that is longer than the computation
    gather      before each pass that reads the weights; prefetched: while the pass before runs (two sets of weights)
    reduction   of each bucket, as soon as its share of the last backward pass is done
    transfer    to the next or the previous chunk; the sender goes on
    pair        a forward and a backward turn that run together: they start when the inputs of both are there, and take
                as long as both less what they save; their outputs leave when both are done
    at the end  optimizer once all reductions of the rank are done, then the gathering of new weights

Not good for: contention. The four queues of a rank do not slow each other down, though they may share links, and
communication takes nothing from computation (in reality it takes some percent of a device's cores). There is no global
barrier before the optimizer (the norm of all gradients). It would cost nothing on ranks that finish early: the step
ends with the last rank.

Sources: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), 1969; Baccelli et al.,
"Synchronization and linearity", 1992 (max-plus systems are monotone); for the schedules see
`costmodels.pipelines.orders`.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from costmodels.errors import CostModelError
from costmodels.pipelines.order_checks import Shape, check_order, words
from costmodels.pipelines.orders import Orders, paired_turns
from costmodels.pipelines.pipeline_times import RankSeconds, check_times
from costmodels.pipelines.schedules import Turn, TurnKind
from costmodels.units import Bytes, Seconds

Stream: TypeAlias = Literal["computation", "inside", "parameters", "transfers"]
EventKind: TypeAlias = Literal[
    "forward",
    "backward",
    "input_gradient",
    "weight_gradient",
    "communication",
    "gather",
    "reduction",
    "send_forward",
    "send_backward",
    "optimizer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Which communication runs beside computation; for the rest, computation waits when it comes up."""

    inside: bool = True
    gathers: bool = True
    reductions: bool = True
    transfers: bool = True


class Event(NamedTuple):
    """Something that a stream of a rank does, in seconds from the start of the step.

    `micro_batch` and `chunk` are -1 where there is none.
    """

    start: Seconds
    end: Seconds
    rank: int
    stream: Stream
    kind: EventKind
    micro_batch: int
    chunk: int
    slice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """How a rank spends the step, and the most that it holds; busy + exposed + idle = seconds of the step.

    Attributes:
        busy: computation.
        exposed: waits for its own communication: inside passes, gathers, reductions, and sends that do not overlap.
        idle: waits for other ranks, their transfers included.
        live: the most slices of micro-batches at once.
        live_bytes: the most bytes that they hold at once.
    """

    busy: Seconds
    exposed: Seconds
    idle: Seconds
    live: int
    live_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step. Events are listed rank by rank, in the order of the turns that cause them."""

    seconds: Seconds
    ranks: tuple[RankUse, ...]
    events: tuple[Event, ...]


ALL_OVERLAP = Overlap()


def simulate(
    ranks: Sequence[RankSeconds],
    orders: Orders,
    *,
    overlap: Overlap = ALL_OVERLAP,
    record: bool = True,
    v_shaped: bool = False,
) -> Timeline:
    """One step of a pipeline of `ranks`, each taking its turns in its order (`costmodels.schedule_orders`).

    Args:
        ranks: the times of each rank, all with the same number of chunks and slices.
        orders: the turns of each rank.
        overlap: which communication is overlapped.
        record: whether events are listed; without them the simulation takes about half the time.
        v_shaped: whether the two chunks of a rank lie in a V (`costmodels.Schedule`). Between the two chunks of the
            last rank there is no transfer.

    Raises:
        CostModelError: durations that are negative or not finite, ranks that do not match the orders, an order that
            leaves out or repeats a turn or takes a backward pass before its forward, or orders that wait for each other
            forever. The message names rank, turn and what it waits for.
    """
    check_times(ranks, orders)
    count = len(ranks)
    slices = len(ranks[0].chunks[0].forward)
    micro_batches = 1 + max((turn.micro_batch for turn in orders[0]), default=0)
    shape = Shape(count, len(ranks[0].chunks), micro_batches, slices, v_shaped)
    back = (part for rank in ranks for chunk in rank.chunks for part in (*chunk.backward, *chunk.weight_gradient))
    trains = any(part.computation or part.blocking or part.overlapped for part in back)
    for number, order in enumerate(orders):
        check_order(number, order, shape, trains=trains)
    arrived = _Arrivals(shape)
    runs = [_Run(number, ranks[number], orders[number], arrived, overlap, record) for number in range(count)]
    awake = deque(range(count))
    while awake:
        for other in runs[awake.popleft()].advance():
            awake.append(other)
    if any(run.turn < len(run.order) for run in runs):
        raise CostModelError(_deadlock(runs, shape))
    ends = [run.finish() for run in runs]
    seconds = max(ends)
    return Timeline(
        seconds=seconds,
        ranks=tuple(run.use(seconds) for run in runs),
        events=tuple(event for run in runs for event in run.events),
    )


class _Arrivals:
    """When the input of each forward and backward pass is there; None until it is known."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        size = shape.ranks * shape.virtual * shape.micro_batches * shape.slices
        units = shape.micro_batches * shape.slices
        self.forward: list[Seconds | None] = [None] * size
        self.backward: list[Seconds | None] = [None] * size
        self.forward[:units] = [0.0] * units  # the first chunk reads its data without waiting
        self.backward[size - units :] = [0.0] * units  # the loss is part of the last chunk
        self.units = units


class _Run:
    """The state of a rank while it goes through its turns."""

    def __init__(
        self, number: int, times: RankSeconds, order: Sequence[Turn], arrived: _Arrivals, overlap: Overlap, record: bool
    ) -> None:
        self.number, self.times, self.order, self.arrived, self.overlap = number, times, order, arrived, overlap
        self.record = record
        self.events: list[Event] = []
        self.turn = 0
        self.free = 0.0  # computation
        self.parameters = 0.0  # when the queue of gathers and reductions is empty
        self.transfers = 0.0
        self.gathered = 0.0  # when the gather for the next turn ends
        self.busy, self.exposed = 0.0, 0.0
        self.passes = _passes(times, order, overlap)
        self.reducing = _reducing(times, order)
        self.paired = _paired(times, order, self.passes) if times.paired else {}
        self.live, self.live_bytes = _held(times, order)
        self._gather(0, 0.0)

    def advance(self) -> list[int]:
        """Take turns until one lacks its input; returns the ranks that may go on because of it."""
        shape, arrived, order = self.arrived.shape, self.arrived, self.order
        forward, backward, units, slices = arrived.forward, arrived.backward, arrived.units, shape.slices
        count, last = shape.ranks, shape.ranks * shape.virtual - 1
        wake_next = wake_previous = False
        overlap = self.overlap
        while self.turn < len(order):
            turn = order[self.turn]
            kind = turn.kind
            down = not shape.v_shaped or not turn.chunk % 2  # from rank to rank
            chunk = turn.chunk * count + (self.number if down else count - 1 - self.number)
            place = chunk * units + turn.micro_batch * slices + turn.slice
            came: Seconds | None
            if kind == "forward":
                came = forward[place]
            elif kind == "weight_gradient":
                came = 0.0
            else:
                came = backward[place]
            seconds, computation, inner = self.passes[kind, turn.chunk, turn.slice]
            rest = 0.0
            if self.turn in self.paired:
                saved, rest, first = self.paired[self.turn]
                seconds -= saved
                if first and came is not None:  # both begin when both inputs are there
                    came = self._later(came, order[self.turn + 1])
            if came is None:
                break
            free = self.free
            ready = came if came > free else free
            start = self.gathered if self.gathered > ready else ready
            end = start + seconds
            self.busy += computation
            self.exposed += (start - ready) + (seconds - computation)
            if self.record:
                self._record_pass(turn, start, computation, seconds, inner)
            times = self.times.chunks[turn.chunk]
            done = end
            if kind == "forward":
                if chunk < last:
                    stays = shape.v_shaped and chunk == count - 1
                    sent = end + rest
                    sent = sent if stays else self._send(turn, sent, times.send_forward, "send_forward")
                    forward[place + units] = sent
                    wake_next, wake_previous = wake_next or down, wake_previous or not down
                    if not overlap.transfers:
                        done = sent - rest
            elif kind != "weight_gradient" and chunk:
                stays = shape.v_shaped and chunk == count
                sent = end if stays else self._send(turn, end, times.send_backward, "send_backward")
                backward[place - units] = sent
                wake_next, wake_previous = wake_next or not down, wake_previous or down
                if not overlap.transfers:
                    done = sent
            self.turn += 1
            self._gather(self.turn, free if overlap.gathers else end)
            if self.turn - 1 in self.reducing:
                reduced = self._reduce(turn, start, end, times.reductions)
                if not overlap.reductions and reduced > done:
                    done = reduced
            self.exposed += done - end
            self.free = done
        return [(self.number + step) % count for step, wake in ((1, wake_next), (-1, wake_previous)) if wake]

    def _later(self, came: Seconds, turn: Turn) -> Seconds | None:
        """When the inputs of both turns of a pair are there; None if that of the backward `turn` is not known yet."""
        shape = self.arrived.shape
        down = not shape.v_shaped or not turn.chunk % 2
        chunk = turn.chunk * shape.ranks + (self.number if down else shape.ranks - 1 - self.number)
        other = self.arrived.backward[chunk * self.arrived.units + turn.micro_batch * shape.slices + turn.slice]
        return None if other is None else max(came, other)

    def finish(self) -> Seconds:
        """Run the optimizer and gather the new weights; returns the end of the rank's step."""
        start = max(self.free, self.parameters)
        end = start + self.times.optimizer
        self.busy += self.times.optimizer
        gathered = end + self.times.weight_gather
        self.exposed += (start - self.free) + (gathered - end)
        if self.record and self.times.optimizer:
            self.events.append(Event(start, end, self.number, "computation", "optimizer", -1, -1, 0))
        if self.record and self.times.weight_gather:
            self.events.append(Event(end, gathered, self.number, "parameters", "gather", -1, -1, 0))
        return gathered

    def use(self, seconds: Seconds) -> RankUse:
        idle = max(0.0, seconds - math.fsum((self.busy, self.exposed)))
        return RankUse(busy=self.busy, exposed=self.exposed, idle=idle, live=self.live, live_bytes=self.live_bytes)

    def _gather(self, index: int, ready: Seconds) -> None:
        """Queue the gather of the weights of a turn."""
        if index >= len(self.order):
            return
        turn = self.order[index]
        seconds = self.times.chunks[turn.chunk].gather
        if not seconds or turn.kind == "weight_gradient":
            self.gathered = 0.0
            return
        start = max(ready, self.parameters)
        self.gathered = self.parameters = start + seconds
        if self.record:
            self.events.append(
                Event(
                    start,
                    start + seconds,
                    self.number,
                    "parameters",
                    "gather",
                    turn.micro_batch,
                    turn.chunk,
                    turn.slice,
                )
            )

    def _reduce(self, turn: Turn, start: Seconds, end: Seconds, buckets: tuple[Seconds, ...]) -> Seconds:
        """Queue the reductions of a turn; returns the end of the last one."""
        for index, seconds in enumerate(buckets):
            ready = start + (end - start) * ((index + 1) / len(buckets)) if self.overlap.reductions else end
            begin = max(ready, self.parameters)
            self.parameters = begin + seconds
            if self.record:
                self.events.append(
                    Event(
                        begin,
                        begin + seconds,
                        self.number,
                        "parameters",
                        "reduction",
                        turn.micro_batch,
                        turn.chunk,
                        turn.slice,
                    )
                )
        return self.parameters

    def _send(
        self, turn: Turn, ready: Seconds, seconds: Seconds, kind: Literal["send_forward", "send_backward"]
    ) -> Seconds:
        start = self.transfers if self.transfers > ready else ready
        self.transfers = start + seconds
        if self.record and seconds:
            self.events.append(
                Event(start, start + seconds, self.number, "transfers", kind, turn.micro_batch, turn.chunk, turn.slice)
            )
        return self.transfers

    def _record_pass(
        self, turn: Turn, start: Seconds, computation: Seconds, seconds: Seconds, inner: tuple[Seconds, Seconds]
    ) -> None:
        """Record the pass and the communication inside it: the overlapped part from its start, the blocking part at its
        end."""
        rest = self.number, turn.micro_batch, turn.chunk, turn.slice
        overlapped, blocking = inner
        self.events.append(
            Event(start, start + computation, rest[0], "computation", turn.kind, rest[1], rest[2], rest[3])
        )
        begin = start if self.overlap.inside else start + computation
        if overlapped:
            self.events.append(
                Event(begin, begin + overlapped, rest[0], "inside", "communication", rest[1], rest[2], rest[3])
            )
        if blocking:
            end = start + seconds
            self.events.append(
                Event(end - blocking, end, rest[0], "inside", "communication", rest[1], rest[2], rest[3])
            )


def _passes(
    times: RankSeconds, order: Sequence[Turn], overlap: Overlap
) -> dict[tuple[TurnKind, int, int], tuple[Seconds, Seconds, tuple[Seconds, Seconds]]]:
    """For each kind, chunk and slice: seconds of the turn, of its computation, and of its inner communication."""
    found = {}
    for kind, chunk, piece in {(turn.kind, turn.chunk, turn.slice) for turn in order}:
        entry = times.chunks[chunk]
        if kind == "forward":
            parts = [entry.forward[piece]]
        elif kind == "weight_gradient":
            parts = [entry.weight_gradient[piece]]
        else:
            parts = [entry.backward[piece]]
            if kind == "backward" and entry.weight_gradient:
                parts.append(entry.weight_gradient[piece])
        computation = sum(part.computation for part in parts)
        overlapped, blocking = sum(part.overlapped for part in parts), sum(part.blocking for part in parts)
        running = max(computation, overlapped) if overlap.inside else computation + overlapped
        found[kind, chunk, piece] = (running + blocking, computation, (overlapped, blocking))
    return found


def _paired(
    times: RankSeconds,
    order: Sequence[Turn],
    passes: Mapping[tuple[TurnKind, int, int], tuple[Seconds, Seconds, tuple[Seconds, Seconds]]],
) -> dict[int, tuple[Seconds, Seconds, bool]]:
    """For each turn of a pair: the seconds that it saves, how long the other turn goes on after it, and whether it is
    the first.

    The output of a first turn leaves at the end of the second one.
    """
    found = {}
    for at in paired_turns(tuple(order)):
        one, other = (passes[turn.kind, turn.chunk, turn.slice][0] for turn in order[at : at + 2])
        saved = times.paired[order[at].chunk]
        share = one / (one + other) if one + other else 0.0
        found[at] = saved * share, other - saved * (1 - share), True
        found[at + 1] = saved * (1 - share), 0.0, False
    return found


def _reducing(times: RankSeconds, order: Sequence[Turn]) -> frozenset[int]:
    """Indexes of the turns after which gradients are reduced: the last backward of each chunk, or each one
    (`reduce_each`)."""
    last: dict[int, int] = {}
    each = []
    for index, turn in enumerate(order):
        if turn.kind in ("backward", "weight_gradient"):
            last[turn.chunk] = index
            if times.chunks[turn.chunk].reduce_each:
                each.append(index)
    return frozenset(each) | frozenset(index for chunk, index in last.items() if not times.chunks[chunk].reduce_each)


def _held(times: RankSeconds, order: Sequence[Turn]) -> tuple[int, Bytes]:
    """The most slices of micro-batches, and bytes, at once between forward turns and the last of their backward turns.

    Without backward turns, nothing is held from one turn to the next.
    """
    if all(turn.kind == "forward" for turn in order):
        return min(1, len(order)), max((times.chunks[turn.chunk].held for turn in order), default=0.0)
    live = most = 0
    held = largest = 0.0
    for turn in order:
        if turn.kind == "forward":
            live += 1
            held += times.chunks[turn.chunk].held
            most, largest = max(most, live), max(largest, held)
        elif turn.kind != "input_gradient":
            live -= 1
            held -= times.chunks[turn.chunk].held
    return most, largest


def _deadlock(runs: Sequence[_Run], shape: Shape) -> str:
    waits = []
    for run in runs:
        if run.turn < len(run.order):
            turn = run.order[run.turn]
            down = (turn.kind == "forward") == (not shape.v_shaped or not turn.chunk % 2)
            other = (run.number + (-1 if down else 1)) % shape.ranks
            waits.append(f"rank {run.number} waits with {words(turn)} for rank {other}")
    return f"the orders wait for each other: {'; '.join(waits[:4])}{' ...' if len(waits) > 4 else ''}"
