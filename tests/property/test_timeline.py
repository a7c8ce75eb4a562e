"""Laws of the simulated step, for any durations and every schedule."""

from dataclasses import fields, replace
from itertools import pairwise

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
from costmodels.orders import Orders

SECONDS = st.floats(0, 10, allow_subnormal=False) | st.sampled_from([0.0, 1.0])
PASSES = st.builds(PassSeconds, computation=SECONDS, blocking=SECONDS, overlapped=SECONDS)
OVERLAPS = st.builds(
    Overlap, inside=st.booleans(), gathers=st.booleans(), reductions=st.booleans(), transfers=st.booleans()
)
CLOSE = 1e-9


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
def steps(draw: st.DrawFn) -> tuple[list[RankSeconds], Orders]:
    schedule = draw(st.sampled_from(sorted(name for name, kind in SCHEDULES.items() if kind.trains)))
    stages, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    virtual = draw(st.integers(2, 3)) if schedule == "interleaved_1f1b" else 1
    slices = draw(st.integers(1, 3)) if schedule == "seqpipe" else 1
    virtual = draw(st.integers(1, 3)) if schedule == "seqpipe" else virtual
    if virtual > 1:
        micro_batches = stages * draw(st.integers(1, 2))
    split = schedule == "zb_h1" or draw(st.booleans())
    one = st.builds(
        RankSeconds,
        chunks=st.tuples(*[chunks(slices, split=split)] * virtual),
        optimizer=SECONDS,
        weight_gather=SECONDS,
    )
    ranks = [draw(one) for _ in range(stages)]
    return ranks, schedule_orders(schedule, stages, micro_batches, virtual=virtual, slices=slices)


def parts_of(chunk: ChunkSeconds, kind: str, piece: int) -> list[PassSeconds]:
    if kind == "forward":
        return [chunk.forward[piece]]
    if kind == "weight_gradient":
        return [chunk.weight_gradient[piece]]
    weight = chunk.weight_gradient[piece : piece + 1] if kind == "backward" else ()
    return [chunk.backward[piece], *weight]


@given(steps(), OVERLAPS)
def test_time_is_spent_once_and_every_turn_is_taken_once(
    step: tuple[list[RankSeconds], Orders], overlap: Overlap
) -> None:
    ranks, orders = step
    found = simulate(ranks, orders, overlap=overlap)
    assert found == simulate(ranks, orders, overlap=overlap)
    assert replace(found, events=()) == simulate(ranks, orders, overlap=overlap, record=False)
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
def test_a_stream_does_one_thing_at_a_time_and_data_is_made_before_it_is_used(
    step: tuple[list[RankSeconds], Orders], overlap: Overlap
) -> None:
    ranks, orders = step
    found = simulate(ranks, orders, overlap=overlap)
    for number in range(len(ranks)):
        for stream in ("computation", "parameters", "transfers"):
            events = [event for event in found.events if (event.rank, event.stream) == (number, stream)]
            for before, after in pairwise(events):
                assert before.end <= after.start + CLOSE
    check_needs(ranks, found)


def check_needs(ranks: list[RankSeconds], found: Timeline) -> None:
    count, last = len(ranks), len(ranks) * len(ranks[0].chunks) - 1
    at = {
        (event.kind, event.chunk * count + event.rank, event.micro_batch, event.slice): event
        for event in found.events
        if event.stream == "computation" and event.kind != "optimizer"
    }
    for (kind, chunk, batch, piece), event in at.items():
        backward = "input_gradient" if kind == "weight_gradient" else kind
        needs = []
        if kind == "forward" and chunk:
            needs.append(("forward", chunk - 1, batch, piece, ranks[(chunk - 1) % count]))
        if kind == "weight_gradient":
            needs.append((backward, chunk, batch, piece, None))
        elif kind != "forward":
            needs.append(("forward", chunk, batch, piece, None))
            if chunk < last:
                needs.append((kind, chunk + 1, batch, piece, ranks[(chunk + 1) % count]))
        for name, where, part, slice_, sender in needs:
            made = at[name, where, part, slice_]
            sent = 0.0
            if sender is not None:
                times = sender.chunks[where // count]
                sent = times.send_forward if name == "forward" else times.send_backward
            assert made.end + sent <= event.start + CLOSE


@given(steps(), OVERLAPS)
def test_never_below_the_work_of_a_rank_or_the_way_of_a_micro_batch(
    step: tuple[list[RankSeconds], Orders], overlap: Overlap
) -> None:
    ranks, orders = step
    seconds = simulate(ranks, orders, overlap=overlap).seconds
    way = 0.0
    for rank in ranks:
        way += sum(
            part.blocking + max(part.computation, part.overlapped)
            for chunk in rank.chunks
            for part in (chunk.forward[0], chunk.backward[0])
        )
        way += sum(chunk.send_forward + chunk.send_backward for chunk in rank.chunks)
    way -= ranks[-1].chunks[-1].send_forward + ranks[0].chunks[0].send_backward
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
def test_overlap_is_never_slower(step: tuple[list[RankSeconds], Orders], overlap: Overlap) -> None:
    ranks, orders = step
    seconds = simulate(ranks, orders, overlap=overlap, record=False).seconds
    for item in fields(Overlap):
        more = replace(overlap, **{item.name: True})
        assert simulate(ranks, orders, overlap=more, record=False).seconds <= seconds + CLOSE


@given(steps(), OVERLAPS, st.data())
def test_monotone_in_every_duration(
    step: tuple[list[RankSeconds], Orders], overlap: Overlap, data: st.DataObject
) -> None:
    ranks, orders = step
    seconds = simulate(ranks, orders, overlap=overlap, record=False).seconds
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
        assert simulate(others, orders, overlap=overlap, record=False).seconds >= seconds - CLOSE
