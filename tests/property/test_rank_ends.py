"""The ends of ranks without events equal the simulation with them, and stay below the sum that the search minimises."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import (
    ChunkSeconds,
    CostModelError,
    PassSeconds,
    RankSeconds,
    least_step_time,
    order_interleaved_1f1b,
    rank_ends,
    schedule_orders,
    simulate,
    step_time,
)
from tests.refusals import refused

SECONDS = st.floats(0, 10, allow_subnormal=False) | st.sampled_from([0.0, 1.0])
PASSES = st.builds(PassSeconds, computation=SECONDS, blocking=SECONDS, overlapped=SECONDS)
CHUNKS = st.builds(
    ChunkSeconds,
    forward=st.tuples(PASSES),
    backward=st.tuples(PASSES),
    reductions=st.lists(SECONDS, max_size=3).map(tuple),
    send_forward=st.just(0.0) | SECONDS,
    send_backward=st.just(0.0) | SECONDS,
)
NOTHING = PassSeconds(computation=0.0)


def whole(rank: RankSeconds) -> float:
    """A micro-batch through all chunks of a rank."""
    passes = [one for chunk in rank.chunks for one in (*chunk.forward, *chunk.backward)]
    return sum(one.blocking + max(one.computation, one.overlapped) for one in passes)


def once(rank: RankSeconds) -> float:
    return sum(sum(chunk.reductions) for chunk in rank.chunks) + rank.optimizer + rank.weight_gather


def waited_for(rank: RankSeconds) -> RankSeconds:
    """With all reductions behind the last pass of the rank, as where nothing is overlapped."""
    reduced = sum(sum(chunk.reductions) for chunk in rank.chunks)
    chunks = [replace(chunk, reductions=(), send_forward=0.0, send_backward=0.0) for chunk in rank.chunks]
    return replace(rank, chunks=(replace(chunks[0], reductions=(reduced,)), *chunks[1:]))


@st.composite
def pipelines(draw: st.DrawFn, virtual: int | None = None) -> tuple[list[RankSeconds], int]:
    chunks = draw(st.integers(1, 3)) if virtual is None else virtual
    one = st.builds(RankSeconds, chunks=st.tuples(*[CHUNKS] * chunks), optimizer=SECONDS, weight_gather=SECONDS)
    ranks = [draw(one) for _ in range(draw(st.integers(1, 6)))]
    return ranks, len(ranks) * draw(st.integers(1, 4)) if chunks > 1 else draw(st.integers(1, 20))


@given(pipelines())
def test_the_simulation_says_the_same(pipeline: tuple[list[RankSeconds], int]) -> None:
    ranks, micro_batches = pipeline
    virtual = len(ranks[0].chunks)
    schedule = "1f1b" if virtual == 1 else "interleaved_1f1b"
    found = simulate(ranks, schedule_orders(schedule, len(ranks), micro_batches, virtual=virtual))
    ends = rank_ends(ranks, micro_batches)
    assert max(end.step for end in ends) == pytest.approx(found.seconds, rel=1e-12, abs=1e-12)
    for number, (rank, end) in enumerate(zip(ranks, ends, strict=True)):
        (last,) = rank.chunks[0].backward
        starts = [e.start for e in found.events if (e.rank, e.kind, e.chunk) == (number, "backward", 0)]
        taken = last.blocking + max(last.computation, last.overlapped)
        assert end.passes == pytest.approx(max(starts) + taken, rel=1e-12, abs=1e-12)


def in_ratio(rank: RankSeconds, forward: float) -> RankSeconds:
    """With this share of its work in the forward pass."""
    passes = whole(rank)
    first, second = PassSeconds(computation=forward * passes), PassSeconds(computation=(1 - forward) * passes)
    return replace(rank, chunks=(replace(rank.chunks[0], forward=(first,), backward=(second,)),))


@given(pipelines(virtual=1), st.floats(0.1, 0.9))
def test_what_is_waited_for_never_takes_longer_than_its_sum(
    pipeline: tuple[list[RankSeconds], int], forward: float
) -> None:
    """Of ranks whose passes have one ratio; where one has all forward and another all backward work, it can."""
    ranks, micro_batches = [in_ratio(waited_for(rank), forward) for rank in pipeline[0]], pipeline[1]
    seconds = max(end.step for end in rank_ends(ranks, micro_batches))
    added = float(step_time([whole(rank) for rank in ranks], [once(rank) for rank in ranks], micro_batches))
    assert seconds <= added * (1 + 1e-12)
    least = least_step_time([whole(rank) for rank in ranks], [once(rank) for rank in ranks], micro_batches)
    assert seconds >= least * (1 - 1e-12)
    assert least >= max(micro_batches * whole(rank) + once(rank) for rank in ranks)


@given(pipelines())
def test_overlap_never_beats_the_work(pipeline: tuple[list[RankSeconds], int]) -> None:
    """With what is reduced under passes, and with several chunks."""
    ranks, micro_batches = pipeline
    spent = [whole(rank) for rank in ranks], [rank.optimizer + rank.weight_gather for rank in ranks]
    least = least_step_time(*spent, micro_batches, len(ranks[0].chunks))
    assert max(end.step for end in rank_ends(ranks, micro_batches)) >= least * (1 - 1e-12)


@given(CHUNKS, SECONDS, st.integers(1, 6), st.integers(1, 3), st.integers(1, 5))
def test_equal_ranks_take_their_sum(chunk: ChunkSeconds, update: float, count: int, virtual: int, rounds: int) -> None:
    rank = waited_for(RankSeconds(chunks=(chunk,) * virtual, optimizer=update))
    micro_batches = rounds * count if virtual > 1 else rounds
    seconds = max(end.step for end in rank_ends([rank] * count, micro_batches))
    added = float(step_time([whole(rank)] * count, [once(rank)] * count, micro_batches, virtual))
    assert seconds == pytest.approx(added, rel=1e-12, abs=1e-12)


@given(pipelines(), st.data())
def test_monotone_in_every_duration(pipeline: tuple[list[RankSeconds], int], data: st.DataObject) -> None:
    ranks, micro_batches = pipeline
    number = data.draw(st.integers(0, len(ranks) - 1))
    chunks = list(ranks[number].chunks)
    where, extra = data.draw(st.integers(0, len(chunks) - 1)), data.draw(SECONDS)
    name = data.draw(st.sampled_from(["forward", "backward"]))
    (one,) = getattr(chunks[where], name)
    longer = {name: (replace(one, computation=one.computation + extra),)}
    chunks[where] = replace(chunks[where], **longer)  # type: ignore[arg-type]
    others = [replace(r, chunks=tuple(chunks)) if r is ranks[number] else r for r in ranks]
    before, after = (max(end.step for end in rank_ends(r, micro_batches)) for r in (ranks, others))
    assert after >= before * (1 - 1e-12)


def test_many_ranks_and_micro_batches_are_gone_through_quickly() -> None:
    """64 ranks and 512 micro-batches take 2 ms of a processor."""
    chunks = [ChunkSeconds(forward=(PassSeconds(computation=1.0 + r / 64),), backward=(NOTHING,)) for r in range(64)]
    ranks = [RankSeconds(chunks=(chunk,)) for chunk in chunks]
    times = []
    for _ in range(5):
        started = time.process_time()
        rank_ends(ranks, 512)
        times.append(time.process_time() - started)
    assert min(times) < 0.05


def test_a_pass_is_as_long_as_the_longer_of_its_work_and_what_runs_under_it() -> None:
    one = PassSeconds(computation=2.0, overlapped=3.0, blocking=0.5)
    rank = RankSeconds(chunks=(ChunkSeconds(forward=(one,), backward=(NOTHING,)),))
    assert [end.step for end in rank_ends([rank], 4)] == [14.0]


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({"gather": 1.0}, ("rank 1", "gathers")),
        ({"reduce_each": True}, ("rank 1", "gathers")),
        ({"forward": (NOTHING,) * 2, "backward": (NOTHING,) * 2}, ("rank 1", "2 slices")),
    ],
)
def test_what_only_the_simulation_knows_is_refused(values: dict[str, object], facts: tuple[object, ...]) -> None:
    plain = ChunkSeconds(forward=(NOTHING,), backward=(NOTHING,))
    other = replace(plain, **values)  # type: ignore[arg-type]
    with refused(CostModelError, *facts):
        rank_ends([RankSeconds(chunks=(plain,)), RankSeconds(chunks=(other,))], 4)


def test_numbers_that_the_schedule_cannot_take_are_refused() -> None:
    rank = RankSeconds(chunks=(ChunkSeconds(forward=(NOTHING,), backward=(NOTHING,)),) * 2)
    with refused(CostModelError, 2, 2, 3):
        rank_ends([rank] * 2, 3)
    with refused(CostModelError, "micro_batches", "1 and 0"):
        rank_ends([rank], 0)
    with refused(CostModelError, "[1, 2]"):
        rank_ends([rank, replace(rank, chunks=rank.chunks[:1])], 2)


def test_orders_have_the_rows_that_are_gone_through() -> None:
    """The warm-up that the rows rest on."""
    for stage in range(4):
        kinds = [turn.kind for turn in order_interleaved_1f1b(stage, 4, 2, 16)]
        assert kinds.index("backward") == 2 * (4 - stage - 1) + 4 + 1
