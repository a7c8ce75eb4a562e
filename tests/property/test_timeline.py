"""Laws of the simulated step, for any durations and every schedule."""

from dataclasses import fields, replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import (
    SCHEDULES,
    ChunkSeconds,
    Overlap,
    PassSeconds,
    RankSeconds,
    Timeline,
    schedule_orders,
    simulate,
)
from costmodels.pipelines.orders import Orders

SECONDS = st.floats(0, 10, allow_subnormal=False) | st.sampled_from([0.0, 1.0])
PASSES = st.builds(PassSeconds, computation=SECONDS, blocking=SECONDS, overlapped=SECONDS)
OVERLAPS = st.builds(
    Overlap, inside=st.booleans(), gathers=st.booleans(), reductions=st.booleans(), transfers=st.booleans()
)
CLOSE = 1e-9


class Step(NamedTuple):
    """What ranks take, their turns, and whether their two chunks lie in a V."""

    ranks: list[RankSeconds]
    orders: Orders
    in_v: bool

    def simulated(self, overlap: Overlap, *, record: bool = True) -> Timeline:
        return simulate(self.ranks, self.orders, overlap=overlap, record=record, v_shaped=self.in_v)

    def place(self, stage: int) -> tuple[int, int]:
        """The rank and the chunk of a stage."""
        count = len(self.ranks)
        chunk, rank = divmod(stage, count)
        return (count - 1 - rank if self.in_v and chunk else rank), chunk

    def stage(self, rank: int, chunk: int) -> int:
        count = len(self.ranks)
        return chunk * count + (count - 1 - rank if self.in_v and chunk else rank)

    def stays(self, stage: int) -> bool:
        """Whether what a stage hands on stays on its rank."""
        return self.in_v and stage == len(self.ranks) - 1


def chunks(slices: int, *, split: bool) -> st.SearchStrategy[ChunkSeconds]:
    passes = st.tuples(*[PASSES] * slices)
    return st.builds(
        ChunkSeconds,
        forward=passes,
        backward=passes,
        weight_gradient=passes if split else st.just(()),
        gather=SECONDS,
        reductions=st.lists(SECONDS, max_size=3).map(tuple),
        reduce_each=st.booleans(),
        send_forward=SECONDS,
        send_backward=SECONDS,
        held=SECONDS,
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    schedule = draw(st.sampled_from(sorted(name for name, kind in SCHEDULES.items() if kind.trains)))
    stages, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    virtual = draw(st.integers(2, 3)) if schedule == "interleaved_1f1b" else 1
    slices = draw(st.integers(1, 3)) if schedule == "seqpipe" else 1
    virtual = draw(st.integers(1, 3)) if schedule == "seqpipe" else virtual
    in_v = SCHEDULES[schedule].v_shaped
    virtual = 2 if in_v else virtual
    if virtual > 1 and not in_v:
        micro_batches = stages * draw(st.integers(1, 2))
    split = SCHEDULES[schedule].splits_backward or draw(st.booleans())
    one = st.builds(
        RankSeconds,
        chunks=st.tuples(*[chunks(slices, split=split)] * virtual),
        optimizer=SECONDS,
        weight_gather=SECONDS,
    )
    ranks = [draw(one) for _ in range(stages)]
    return Step(ranks, schedule_orders(schedule, stages, micro_batches, virtual=virtual, slices=slices), in_v)


def parts_of(chunk: ChunkSeconds, kind: str, piece: int) -> list[PassSeconds]:
    if kind == "forward":
        return [chunk.forward[piece]]
    if kind == "weight_gradient":
        return [chunk.weight_gradient[piece]]
    weight = chunk.weight_gradient[piece : piece + 1] if kind == "backward" else ()
    return [chunk.backward[piece], *weight]


@given(steps(), OVERLAPS)
def test_time_is_spent_once_and_every_turn_is_taken_once(step: Step, overlap: Overlap) -> None:
    ranks, orders, _ = step
    found = step.simulated(overlap)
    assert found == step.simulated(overlap)
    assert replace(found, events=()) == step.simulated(overlap, record=False)
    for number, use in enumerate(found.ranks):
        assert use.busy + use.exposed + use.idle == pytest.approx(found.seconds)
        work = sum(
            part.computation
            for turn in orders[number]
            for part in parts_of(ranks[number].chunks[turn.chunk], turn.kind, turn.slice)
        )
        assert use.busy == pytest.approx(work + ranks[number].optimizer)
        taken = [
            (event.kind, event.micro_batch, event.chunk, event.slice)
            for event in found.events
            if event.rank == number and event.stream == "computation" and event.kind != "optimizer"
        ]
        assert taken == [(turn.kind, turn.micro_batch, turn.chunk, turn.slice) for turn in orders[number]]


@given(steps(), OVERLAPS)
def test_a_stream_does_one_thing_at_a_time_and_data_is_made_before_it_is_used(step: Step, overlap: Overlap) -> None:
    found = step.simulated(overlap)
    for number in range(len(step.ranks)):
        for stream in ("computation", "parameters", "transfers"):
            events = [event for event in found.events if (event.rank, event.stream) == (number, stream)]
            for before, after in pairwise(events):
                assert before.end <= after.start + CLOSE
    check_needs(step, found)


def check_needs(step: Step, found: Timeline) -> None:
    last = len(step.ranks) * len(step.ranks[0].chunks) - 1
    at = {
        (event.kind, step.stage(event.rank, event.chunk), event.micro_batch, event.slice): event
        for event in found.events
        if event.stream == "computation" and event.kind != "optimizer"
    }
    for (kind, stage, batch, piece), event in at.items():
        backward = "input_gradient" if kind == "weight_gradient" else kind
        needs = list[tuple[str, int, bool]]()  # passes of stages, and whether what they make is sent
        if kind == "forward" and stage:
            needs.append(("forward", stage - 1, not step.stays(stage - 1)))
        if kind == "weight_gradient":
            needs.append((backward, stage, False))
        elif kind != "forward":
            needs.append(("forward", stage, False))
            if stage < last:
                needs.append((kind, stage + 1, not step.stays(stage)))
        for name, other, sent in needs:
            rank, chunk = step.place(other)
            times = step.ranks[rank].chunks[chunk]
            seconds = times.send_forward if name == "forward" else times.send_backward
            assert at[name, other, batch, piece].end + (seconds if sent else 0.0) <= event.start + CLOSE


@given(steps(), OVERLAPS)
def test_never_below_the_work_of_a_rank_or_the_way_of_a_micro_batch(step: Step, overlap: Overlap) -> None:
    ranks, orders, _ = step
    seconds = step.simulated(overlap).seconds
    way = 0.0
    for rank in ranks:
        way += sum(
            part.blocking + max(part.computation, part.overlapped)
            for chunk in rank.chunks
            for part in (chunk.forward[0], chunk.backward[0])
        )
        way += sum(chunk.send_forward + chunk.send_backward for chunk in rank.chunks)
    rank, chunk = step.place(len(ranks) * len(ranks[0].chunks) - 1)
    way -= ranks[rank].chunks[chunk].send_forward + ranks[0].chunks[0].send_backward
    way -= sum((ranks[-1].chunks[0].send_forward, ranks[-1].chunks[1].send_backward)) if step.in_v else 0.0
    assert seconds >= way - CLOSE
    for rank, order in zip(ranks, orders, strict=True):
        work = sum(
            sum(part.blocking for part in parts)
            + max(sum(p.computation for p in parts), sum(p.overlapped for p in parts))
            for turn in order
            if (parts := parts_of(rank.chunks[turn.chunk], turn.kind, turn.slice))
        )
        assert seconds >= work + rank.optimizer + rank.weight_gather - CLOSE


@given(steps(), OVERLAPS)
def test_overlap_is_never_slower(step: Step, overlap: Overlap) -> None:
    ranks, orders, _ = step
    seconds = step.simulated(overlap, record=False).seconds
    for item in fields(Overlap):
        more = replace(overlap, **{item.name: True})
        assert simulate(ranks, orders, overlap=more, record=False, v_shaped=step.in_v).seconds <= seconds + CLOSE


@given(steps(), OVERLAPS, st.data())
def test_monotone_in_every_duration(step: Step, overlap: Overlap, data: st.DataObject) -> None:
    ranks, orders, _ = step
    seconds = step.simulated(overlap, record=False).seconds
    number = data.draw(st.integers(0, len(ranks) - 1))
    where = data.draw(st.integers(0, len(ranks[number].chunks) - 1))
    extra = data.draw(SECONDS)
    chunk = ranks[number].chunks[where]
    longer: list[RankSeconds] = [
        replace(ranks[number], optimizer=ranks[number].optimizer + extra),
        replace(ranks[number], weight_gather=ranks[number].weight_gather + extra),
    ]
    changes: list[dict[str, object]] = [
        {"gather": chunk.gather + extra},
        {"send_forward": chunk.send_forward + extra},
        {"send_backward": chunk.send_backward + extra},
        {"reductions": tuple(bucket + extra for bucket in chunk.reductions)},
    ]
    for name in ("forward", "backward", "weight_gradient"):
        for part in ("computation", "blocking", "overlapped"):
            passes = [replace(one, **{part: getattr(one, part) + extra}) for one in getattr(chunk, name)]
            changes.append({name: tuple(passes)})
    for change in changes:
        parts = list(ranks[number].chunks)
        parts[where] = replace(chunk, **change)  # type: ignore[arg-type]
        longer.append(replace(ranks[number], chunks=tuple(parts)))
    for rank in longer:
        others = [rank if index == number else one for index, one in enumerate(ranks)]
        assert simulate(others, orders, overlap=overlap, record=False, v_shaped=step.in_v).seconds >= seconds - CLOSE
