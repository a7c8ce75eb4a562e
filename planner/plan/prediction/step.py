"""The step of a plan as its schedule runs it: how long passes take, what overlaps with them, and who waits for whom.

    rank 0   F0 F1 F2 .. B0 F3 B1 .. B2 B3 R U W      F, B  passes of a micro-batch through a chunk (a virtual stage)
    rank 1      F0 F1 B0 F2 B1 .. B2 . B3 R U W       R  gradient reduction behind the last pass, U  the optimizer,
                                                      W  gathering of new weights
    (in the order of any schedule; with deferred weight gradients, their matrix products, the regathering for them and
    their accumulation are separate passes)

A share h of communication is overlapped if the software does so (`Software.hidden`). The other share, 1-h, is exposed
and lengthens the pass. The overlapped share runs under the work of the pass, and delays later work only where it is
longer:

    pass        waits + max(work, hidden)                    waits: 1-h of gathers and inner collectives, and transfers
                                                             if receives are not posted ahead
    transfers   otherwise from the end of the pass that makes the values, one after the other on each rank
    reductions  hidden: in buckets of blocks, as the last backward pass of their chunk makes them, one after the other;
                the rest behind them and the last pass of the rank; buckets of our runtime likewise, each from when it
                is full (`planner.plan.prediction.walk.bucket_overlap`)
    weights     hidden: under the remaining forward work of one micro-batch, the first of the next step; the rest at the
                end

Operators that are shorter than their launch would each wait for the host. Here the host launches ahead within a block,
so that a block takes as long as its kernels and collectives, or as its launches. A collective is launched like a
kernel, and while it runs the host launches the next operators. Without a pipeline, where ranks wait for no transfers,
the host launches ahead through all micro-batches of a step. If it must know how many rows each expert gets
(`Software.counts_rows`), it waits for that in every block, and launches the exchange of experts only then.

Software without overlap waits for everything when it comes up, also for transfers between stages, unless it posts their
receives ahead (`receives_ahead`), as our executor does. If the passes of all ranks then have the same ratio, a step
takes at most the sum in which everything waits (`costmodels.step_time`). It is shorter by work of uneven stages, by
their work once a step, and by transfers that overlap with other stages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from costmodels import (
    SCHEDULES,
    ChunkSeconds,
    Part,
    PassSeconds,
    RankSeconds,
    Then,
    backward_slots_of,
    interleaved_time,
    paired_time,
    rank_ends,
    reductions_end,
    simulate,
    slots_of,
)
from planner.plan.schedule import orders

_EXACT = 1e-12
"""Differences below this share of a sum are rounding errors."""

PIPELINE_BUBBLE = "pipeline bubble"
UNCOVERED = "uncovered communication"
"""Communication that the software would overlap if there were enough work."""


COVERED = "covered by other micro-batches"
"""Communication of one micro-batch while another one computes; negative."""

BESIDE = "offload under computation"
"""Offloaded activations and weights that are transferred while other blocks compute; negative."""

GATHERED_AHEAD = "gathering under computation"
"""Weights that are gathered, and gradients that are reduced, while other blocks compute; negative."""

UNDER_PRODUCTS = "tensor parallelism under computation"
"""Tensor-parallel collectives in chunks while their products compute; negative, or positive if the chunks cost more
than they save."""

UNDER_EXCHANGE = "exchange of experts under computation"
"""Dispatch and combine of experts while other operators compute; negative."""

BETWEEN_STAGES = "stage transfers under computation"
"""Transfers from other stages while a rank computes, or waits for its turn; negative."""

REDUCED_AHEAD = "reduction under computation"
"""Buckets of gradients that are reduced during the last backward pass; negative. The excess over the pass is
uncovered."""

AHEAD = "launches ahead"
"""Time saved because the host launches the operators of a block while longer kernels before them still run;
negative."""


Launched: TypeAlias = tuple[float, float, float, float]
"""What an operator adds to launches: the fields of `Launches` in order."""

Passed: TypeAlias = tuple[float, float, float, float, float, float]
"""What is added to a pass: work, waits, hidden, sent, under products, and exchanged."""


@dataclass(slots=True)
class Launches:
    """The operators of one block in one pass: seconds if each waits for its own launch (`ran`), the part of these spent
    waiting (`late`), the host's seconds to launch them all (`host`), and their exposed communication (`sent`)."""

    ran: float = 0.0
    late: float = 0.0
    host: float = 0.0
    sent: float = 0.0

    def add(self, ran: float, late: float, host: float, sent: float = 0.0) -> None:
        self.ran += ran
        self.late += late
        self.host += host
        self.sent += sent

    def add_all(self, added: Iterable["Launched"]) -> None:
        """`add` for each, one after the other."""
        ran, late, host, sent = self.ran, self.late, self.host, self.sent
        for one_ran, one_late, one_host, one_sent in added:
            ran += one_ran
            late += one_late
            host += one_host
            sent += one_sent
        self.ran, self.late, self.host, self.sent = ran, late, host, sent

    @property
    def ahead(self) -> float:
        """Seconds saved if the host only has to launch everything while kernels and collectives run: max(kernels +
        sent, host)."""
        charged = self.ran + self.sent
        return max(0.0, charged - max(charged - self.late, self.host))


def further_ahead(blocks: Iterable[Launches], micro_batches: int) -> float:
    """The share in [0, 1] of the remaining waits for the host, after `Launches.ahead`, that is saved if nothing makes
    the host wait before the end of the step.

    During long backward kernels the host launches the next operators, also those of the next micro-batch, so that
    everything together takes max(kernels + sent, host). The first of the `micro_batches` has none before it. (Stages of
    a pipeline wait for each other at every transfer.)"""
    total, saved = Launches(), 0.0
    for one in blocks:
        total.add(one.ran, one.late, one.host, one.sent)
        saved += one.ahead
    left = total.late - saved
    if left <= 0 or micro_batches < 2:
        return 0.0
    return (1 - 1 / micro_batches) * max(0.0, total.ahead - saved) / left


@dataclass(slots=True, kw_only=True)
class PassCost:
    """Sums over one pass of a micro-batch, or of the middle one of its slices, through a chunk, in seconds.

    Attributes:
        work: computation.
        waits: exposed communication.
        hidden: communication that overlaps with the work.
        sent: the part of `waits` during which other micro-batches may compute.
        grows: how much longer a slice takes than the previous one.
        transfers: the part of `waits` for transfers from the previous stage, or back from the next one.
        beside: the part of `hidden` for offloaded activations and weights; it is still charged.
        gathered: the part of `hidden` for weights and gradients of a block; it is still charged.
        under_products: charged tensor-parallel communication that is not in `waits`, as it overlaps with products.
        exchanged: the same for the exchange of experts, which overlaps with other work.
        uncovered: the part of `gathered` that is exposed in one pass of a step: weights at the beginning of the first
            pass, or gradients at the end of the last one.
        operators: if the plan interleaves micro-batches, what each operator sends, and its other seconds.
        borders: operators at which interleaved forward passes wait for each other."""

    work: float = 0.0
    waits: float = 0.0
    hidden: float = 0.0
    sent: float = 0.0
    grows: float = 0.0
    transfers: float = 0.0
    beside: float = 0.0
    gathered: float = 0.0
    under_products: float = 0.0
    exchanged: float = 0.0
    uncovered: float = 0.0
    operators: list[Part] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)

    def add(
        self,
        *,
        work: float = 0.0,
        waits: float = 0.0,
        hidden: float = 0.0,
        sent: float = 0.0,
        under_products: float = 0.0,
        exchanged: float = 0.0,
    ) -> None:
        self.work += work
        self.waits += waits
        self.hidden += hidden
        self.sent += sent
        self.under_products += under_products
        self.exchanged += exchanged

    def add_all(self, added: Iterable[Passed]) -> None:
        """`add` for each, one after the other."""
        work, waits, hidden, sent = self.work, self.waits, self.hidden, self.sent
        under_products, exchanged = self.under_products, self.exchanged
        for one_work, one_waits, one_hidden, one_sent, one_under, one_exchanged in added:
            work += one_work
            waits += one_waits
            hidden += one_hidden
            sent += one_sent
            under_products += one_under
            exchanged += one_exchanged
        self.work, self.waits, self.hidden, self.sent = work, waits, hidden, sent
        self.under_products, self.exchanged = under_products, exchanged

    def bring(self, seconds: float, *, waits: bool) -> None:
        """Adds a transfer of an offloaded tensor: exposed if the pass `waits` for it, else overlapped."""
        self.add(waits=seconds if waits else 0.0, hidden=0.0 if waits else seconds)
        self.beside += 0.0 if waits else seconds

    def hide(self, seconds: float) -> None:
        """Moves this many seconds of weights and gradients of a block from `waits` to `hidden`."""
        self.add(waits=-seconds, hidden=seconds)
        self.gathered += seconds

    @property
    def longer(self) -> float:
        """How much longer the one pass of a step takes in which nothing overlaps with `uncovered`."""
        return max(self.work + self.uncovered, self.hidden) - max(self.work, self.hidden)

    def waits_of(self, *, ahead: bool) -> float:
        """The exposed communication of the pass; without transfers if they arrive `ahead`."""
        return max(0.0, self.waits - self.transfers) if ahead else self.waits

    def close(self, before: tuple[float, float], back: float = 0.0, *, turns: bool, then: Then) -> None:
        """Ends one operator: everything added since `before`, the value of `taken` at its start. It communicates before
        it computes, and at its end for `back` more seconds; in the backward pass at its beginning. Other micro-batches
        run where it communicates, and where it `turns` to them anyway; `then` says how it continues in the forward
        pass."""
        sent = self.sent - before[0] - back
        self.operators.append(Part(sent if turns or sent > 0 else None, self.taken[1] - before[1], then))
        if back:
            self.operators.append(Part(back, 0.0))

    @property
    def taken(self) -> tuple[float, float]:
        """The seconds sent so far, and all other seconds."""
        return self.sent, self.work + self.waits - self.sent

    def turns(
        self, interleave: int, slices: int, *, backward: bool = False, ahead: bool = False
    ) -> tuple[PassSeconds, ...]:
        """The passes for `interleave` micro-batches at a time, slice by slice; transfers are not exposed if they arrive
        `ahead`."""
        waits = self.waits_of(ahead=ahead) * interleave
        if interleave > 1:
            slots = backward_slots_of if backward else slots_of
            ends = pairwise((0, *self.borders, len(self.operators)))
            runs = [slots(self.operators[first:end]) for first, end in ends]
            alone = interleave * sum(interleaved_time(run, 1) for run in runs)
            covered = alone - sum(interleaved_time(run, interleave, backward=backward) for run in runs)
            waits -= min(covered, self.sent * interleave)
        works = [self.work + (number - (slices - 1) / 2) * self.grows for number in range(slices)]
        hidden = self.hidden * interleave
        return tuple(PassSeconds(computation=work * interleave, blocking=waits, overlapped=hidden) for work in works)


@dataclass(slots=True, kw_only=True)
class ChunkCost:
    """Sums of one chunk of a rank.

    Attributes:
        blocks: the number of blocks of the chunk.
        forward, backward: its passes.
        later: the deferred part of the backward pass, if the schedule splits it.
        interleave: micro-batches in one pass.
        slices: parts of the sequence in which a micro-batch is processed.
        paired: whether forward passes may be paired with backward passes of the other chunk.
        receives_ahead: whether transfers from other stages arrive while the rank computes.
        buckets: seconds of the buckets of gradients that start behind each of equal parts of the last backward pass.
        reductions, weights: overlapped seconds once a step."""

    blocks: int
    forward: PassCost = field(default_factory=PassCost)
    backward: PassCost = field(default_factory=PassCost)
    later: PassCost | None = None
    interleave: int = 1
    slices: int = 1
    paired: bool = False
    receives_ahead: bool = False
    buckets: tuple[float, ...] = ()
    reductions: float = 0.0
    weights: float = 0.0

    @property
    def passes(self) -> tuple[PassCost, ...]:
        """All passes of a micro-batch."""
        return self.forward, self.backward, *(() if self.later is None else (self.later,))

    def pass_of(self, *, later: bool) -> PassCost:
        """The backward pass, or its deferred part."""
        return self.later if later and self.later is not None else self.backward

    def save(self, name: str, seconds: float) -> None:
        """Subtract from a pass the seconds that a host saves by launching ahead. If the backward pass is split, both
        parts get a share in proportion to their work."""
        if name == "forward":
            self.forward.add(work=-seconds)
            return
        later = 0.0 if self.later is None else self.later.work
        share = later / (self.backward.work + later) if later else 0.0
        self.backward.add(work=-seconds * (1 - share))
        if self.later is not None:
            self.later.add(work=-seconds * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, and the busiest rank. For that rank: communication that the software would overlap but that
    nothing covers, charged communication that other micro-batches cover, and the time in which it waits for other
    ranks, and for their transfers if receives are posted ahead."""

    seconds: float
    busiest: int
    uncovered: float
    covered: float
    bubble: float


def step_of(
    chunks: Sequence[Sequence[ChunkCost]],
    once: Sequence[Mapping[str, float]],
    micro_batches: int,
    schedule: str = "1f1b",
) -> StepTime:
    """The step of pipeline ranks with these chunks under a schedule; `once` are the exposed seconds per step."""
    turns = micro_batches // chunks[0][0].interleave
    step, own = _times(ranks_seconds(chunks, once, schedule), turns, schedule)
    charged = []
    for rank in range(len(own)):
        ahead = chunks[rank][0].receives_ahead
        passes = [one for chunk in chunks[rank] for one in chunk.passes]
        charged.append(
            micro_batches * chunks[rank][0].slices * sum(one.work + one.waits_of(ahead=ahead) for one in passes)
            + sum(once[rank].values())
            - bucketed(chunks[rank])
        )
    busiest = own.index(max(own))
    more = own[busiest] - charged[busiest]
    more = more if abs(more) > _EXACT * own[busiest] else 0.0
    return StepTime(
        seconds=step,
        busiest=busiest,
        uncovered=max(0.0, more),
        covered=max(0.0, -more),
        bubble=max(0.0, step - own[busiest]) if len(own) > 1 else 0.0,
    )


def _times(ranks: Sequence[RankSeconds], micro_batches: int, schedule: str) -> tuple[float, list[float]]:
    """Seconds of the step, and of every rank without the time in which it waits for others."""
    if not SCHEDULES[schedule].trains:  # one micro-batch after the other, all of equal length
        each = [_seconds(rank) for rank in ranks]
        last = max(_once(rank) for rank in ranks)
        sends = [_sending(rank) for rank in ranks]
        return sum(each) + sum(sends) + (micro_batches - 1) * max(*each, *sends) + last, [
            micro_batches * seconds + _once(rank) for seconds, rank in zip(each, ranks, strict=True)
        ]
    if SCHEDULES[schedule].in_rows:  # equals the simulation and is faster
        ends = rank_ends(ranks, micro_batches)
        own = [micro_batches * _seconds(rank) + end.step - end.passes for rank, end in zip(ranks, ends, strict=True)]
        return max(end.step for end in ends), own
    if not SCHEDULES[schedule].flushes:  # without a flush, the slowest rank sets the pace in the long run
        own = [micro_batches * _seconds(rank) + _once(rank) for rank in ranks]
        return max(*own, *(micro_batches * _sending(rank) for rank in ranks)), own
    chunks = ranks[0].chunks
    order = orders(schedule, len(ranks), micro_batches, len(chunks), len(chunks[0].forward))
    found = simulate(ranks, order, record=False, v_shaped=SCHEDULES[schedule].v_shaped)
    return found.seconds, [use.busy + use.exposed for use in found.ranks]


def _seconds(rank: RankSeconds) -> float:
    """Seconds of one micro-batch through all chunks of a rank."""
    passes = [one for chunk in rank.chunks for one in (*chunk.forward, *chunk.backward)]
    return sum(one.blocking + max(one.computation, one.overlapped) for one in passes)


def _sending(rank: RankSeconds) -> float:
    """Seconds in which a rank sends a micro-batch's values if they are not part of a pass."""
    return sum(chunk.send_forward + chunk.send_backward for chunk in rank.chunks)


def _once(rank: RankSeconds) -> float:
    """Seconds of the updates of a rank in a step."""
    reductions = sum(seconds for chunk in rank.chunks for seconds in chunk.reductions)
    return reductions + rank.optimizer + rank.weight_gather


def ranks_seconds(
    chunks: Sequence[Sequence[ChunkCost]], once: Sequence[Mapping[str, float]], schedule: str
) -> list[RankSeconds]:
    """Pipeline ranks with these chunks, and their exposed seconds `once` a step, in the form for `costmodels.simulate`.
    If receives are posted ahead, a transfer follows the pass that makes the values."""
    ranks, kind = [rank_seconds(*rank) for rank in zip(chunks, once, strict=True)], SCHEDULES[schedule]
    if not chunks[0][0].receives_ahead:
        return ranks
    count, virtual = len(chunks), len(chunks[0])
    places = {kind.stage_of(rank, chunk, count): (rank, chunk) for rank in range(count) for chunk in range(virtual)}

    def sent(stage: int, name: Literal["forward", "backward"]) -> float:
        """Seconds of the transfers that a stage receives in one pass."""
        if stage not in places:
            return 0.0
        rank, at = places[stage]
        cost = chunks[rank][at]
        return cost.interleave * (cost.forward if name == "forward" else cost.backward).transfers

    def sending(rank: int, at: int, chunk: ChunkSeconds) -> ChunkSeconds:
        stage = kind.stage_of(rank, at, count)
        return replace(chunk, send_forward=sent(stage + 1, "forward"), send_backward=sent(stage - 1, "backward"))

    return [
        replace(one, chunks=tuple(sending(rank, at, chunk) for at, chunk in enumerate(one.chunks)))
        for rank, one in enumerate(ranks)
    ]


def rank_seconds(chunks: Sequence[ChunkCost], once: Mapping[str, float]) -> RankSeconds:
    """A rank with these chunks, and its exposed seconds `once` a step; without its transfers to other ranks."""
    room = sum(max(0.0, chunk.forward.work - chunk.forward.hidden) for chunk in chunks)
    excess = max(0.0, sum(chunk.weights for chunk in chunks) - room)
    timed = []
    for number, chunk in enumerate(chunks):  # backward passes end with the first chunk
        rest = max(0.0, once["gradient reduction"] - bucketed(chunks)) if number == 0 else 0.0
        rest += chunk.backward.longer
        count, ahead = max(1, chunk.blocks) if chunk.reductions else 0, chunk.receives_ahead
        timed.append(
            ChunkSeconds(
                forward=chunk.forward.turns(chunk.interleave, chunk.slices, ahead=ahead),
                backward=chunk.backward.turns(chunk.interleave, chunk.slices, backward=True, ahead=ahead),
                weight_gradient=() if chunk.later is None else chunk.later.turns(1, 1),
                reductions=_reductions(chunk, count, rest),
            )
        )
    return RankSeconds(
        chunks=tuple(timed),
        paired=tuple(_saved_in_pairs(chunks, number) for number in range(len(chunks))) if chunks[0].paired else (),
        optimizer=once["optimizer"] + once.get("offload", 0.0) + once.get("weights going back", 0.0),
        weight_gather=once["weight gathering"] + excess + sum(chunk.forward.longer for chunk in chunks),
    )


def _reductions(chunk: ChunkCost, count: int, rest: float) -> tuple[float, ...]:
    """Seconds of reductions behind equal parts of the last backward pass of a chunk, and behind the pass. If the
    software overlaps a share of all gradients, there are `count` parts."""
    if chunk.buckets:
        return (*chunk.buckets[:-1], chunk.buckets[-1] + rest)
    return (*[chunk.reductions / max(1, count)] * count, rest)


def bucketed(chunks: Sequence[ChunkCost]) -> float:
    """Seconds of the buckets of a rank that start during its backward passes."""
    return sum(sum(chunk.buckets) for chunk in chunks)


def covered_reductions(chunks: Sequence[ChunkCost]) -> float:
    """Seconds of the buckets of a rank that its last backward passes cover; each pass covers the buckets of its own
    chunk."""
    found = 0.0
    for chunk in [chunk for chunk in chunks if chunk.buckets]:
        (turn, *_) = chunk.backward.turns(1, 1, backward=True, ahead=chunk.receives_ahead)
        seconds = turn.blocking + max(turn.computation, turn.overlapped)
        found += sum(chunk.buckets) - max(0.0, reductions_end(chunk.buckets, seconds, seconds) - seconds)
    return found


def _saved_in_pairs(chunks: Sequence[ChunkCost], number: int) -> float:
    """Seconds that the forward pass of a chunk and the backward pass of the other save together: at most the work that
    overlaps with no other communication."""
    passes = chunks[number].forward, chunks[1 - number].backward
    forward, backward = slots_of(passes[0].operators), backward_slots_of(passes[1].operators)
    saved = sum(one.computed + one.sent for one in (*forward, *backward)) - paired_time(backward, forward)
    return max(0.0, min(saved, sum(one.work - one.hidden for one in passes)))
