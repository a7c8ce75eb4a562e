"""The simulated step: closed forms, small cases by hand, refusals."""

import random
from dataclasses import replace
from itertools import product

import pytest

from costmodels import (
    SCHEDULES,
    ChunkSeconds,
    CostModelError,
    Overlap,
    PassSeconds,
    RankSeconds,
    Turn,
    paired_turns,
    schedule_orders,
    simulate,
    step_of_passes,
    step_time,
)
from tests.refusals import refused

STAGES, PARTS = (1, 2, 4, 8), (1, 2, 3, 4, 8, 16)


def passes(seconds: float, slices: int = 1) -> tuple[PassSeconds, ...]:
    return (PassSeconds(computation=seconds),) * slices


def equal(
    stages: int, forward: float, backward: float, weight: float | None = None, *, virtual: int = 1, slices: int = 1
) -> list[RankSeconds]:
    chunk = ChunkSeconds(
        forward=passes(forward, slices),
        backward=passes(backward, slices),
        weight_gradient=() if weight is None else passes(weight, slices),
        held=10.0,
    )
    return [RankSeconds(chunks=(chunk,) * virtual)] * stages


def with_chunk(ranks: list[RankSeconds], **values: object) -> list[RankSeconds]:
    return [replace(rank, chunks=tuple(replace(chunk, **values) for chunk in rank.chunks)) for rank in ranks]


@pytest.mark.parametrize("micro_batches", PARTS)
@pytest.mark.parametrize("stages", STAGES)
def test_closed_forms_of_equal_stages(stages: int, micro_batches: int) -> None:
    ranks = equal(stages, 1.0, 2.0)
    for schedule in ("gpipe", "1f1b"):
        step = simulate(ranks, schedule_orders(schedule, stages, micro_batches))
        assert step.seconds == pytest.approx((micro_batches + stages - 1) * 3)
        most = [micro_batches if schedule == "gpipe" else min(micro_batches, stages - s) for s in range(stages)]
        assert [use.live for use in step.ranks] == most
        assert [use.live_bytes for use in step.ranks] == [10.0 * live for live in most]
    if micro_batches % stages == 0:
        for virtual in (2, 3):
            chunks = equal(stages, 1.0, 2.0, virtual=virtual)
            step = simulate(chunks, schedule_orders("interleaved_1f1b", stages, micro_batches, virtual=virtual))
            whole = [3.0 * virtual] * stages
            assert step.seconds == pytest.approx(step_time(whole, [0.0] * stages, micro_batches, virtual))
            assert step.seconds == pytest.approx((micro_batches * virtual + stages - 1) * 3)


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", PARTS)
@pytest.mark.parametrize("stages", STAGES)
def test_slices_fill_the_pipeline_faster(stages: int, micro_batches: int, slices: int) -> None:
    """q slices of a q-th: a bubble of (p-1)(F+B)/q, and p-s+q-1 slices held."""
    step = simulate(
        equal(stages, 1.0, 2.0, slices=slices), schedule_orders("seqpipe", stages, micro_batches, slices=slices)
    )
    assert step.seconds == pytest.approx((micro_batches * slices + stages - 1) * 3)
    most = [min(micro_batches * slices, stages - stage + slices - 1) for stage in range(stages)]
    assert [use.live for use in step.ranks] == most


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize(("stages", "micro_batches", "slices"), [(2, 2, 2), (2, 1, 4), (3, 2, 3), (3, 3, 5), (4, 6, 2)])
def test_slices_take_rounds_of_virtual_stages(stages: int, micro_batches: int, slices: int, virtual: int) -> None:
    """A bubble of (p-1)(F+B) of a chunk, where nobody waits for a backward pass of the last slice: q divides p."""
    orders = schedule_orders("seqpipe", stages, micro_batches, virtual=virtual, slices=slices)
    step = simulate(equal(stages, 1.0, 2.0, virtual=virtual, slices=slices), orders)
    least = (micro_batches * slices * virtual + stages - 1) * 3
    assert step.seconds == pytest.approx(least) if stages % slices == 0 else step.seconds >= least
    for stage in range(stages):
        held = SCHEDULES["seqpipe"].in_flight(stage, stages, micro_batches, virtual, slices)
        assert len(held) == virtual
        assert max(held) <= step.ranks[stage].live <= sum(held)


def test_rounds_of_slices_have_as_many_as_there_are_stages() -> None:
    with refused(CostModelError, 3, 2, 4):
        schedule_orders("seqpipe", 4, 3, virtual=2, slices=2)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 1.5, 1.0), (1.0, 2.0, 1.0)])
@pytest.mark.parametrize("micro_batches", [8, 9, 16])
@pytest.mark.parametrize("stages", STAGES)
def test_the_published_bubble_of_zb_h1(stages: int, micro_batches: int, times: tuple[float, float, float]) -> None:
    """Qi et al., section 2.3: (p-1)(F + B - W), at the peak memory of 1F1B."""
    forward, backward, weight = times
    ranks = equal(stages, *times)
    step = simulate(ranks, schedule_orders("zb_h1", stages, micro_batches))
    bubble = (stages - 1) * (forward + backward - weight)
    assert step.seconds == pytest.approx(micro_batches * sum(times) + bubble)
    assert max(use.live for use in step.ranks) == stages
    plain = simulate(ranks, schedule_orders("1f1b", stages, micro_batches))  # both parts of the backward in one turn
    assert plain.seconds == pytest.approx((micro_batches + stages - 1) * sum(times))
    assert max(use.live for use in plain.ranks) == stages


@pytest.mark.parametrize("transfer", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 16), (8, 9)])
def test_eager_1f1b_waits_for_transfers_only_while_it_fills_and_drains(
    stages: int, micro_batches: int, transfer: float
) -> None:
    """Zhuang et al., section 4; 1F1B waits for one in each of its rounds too, at half the memory."""
    ranks = with_chunk(equal(stages, 1.0, 2.0), send_forward=transfer, send_backward=transfer)
    step = simulate(ranks, schedule_orders("eager_1f1b", stages, micro_batches))
    assert step.seconds == pytest.approx((micro_batches + stages - 1) * 3.0 + 2 * (stages - 1) * transfer)
    held = [SCHEDULES["eager_1f1b"].in_flight(stage, stages, micro_batches, 1, 1)[0] for stage in range(stages)]
    assert [use.live for use in step.ranks] == held
    plain = simulate(ranks, schedule_orders("1f1b", stages, micro_batches))
    assert (plain.seconds > step.seconds) == (transfer > 0)


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 9), (4, 8), (4, 16), (8, 16)])
def test_stages_in_a_v_leave_no_bubble_but_the_way_to_the_last_rank(
    stages: int, micro_batches: int, schedule: str
) -> None:
    """Qi et al., "Pipeline parallelism with controllable memory", figure 3: all ranks hold p micro-batches, and with
    F = B = W the last rank waits for the first micro-batch alone. DualPipeV holds half a micro-batch more."""
    ranks = equal(stages, 1.0, 1.0, 1.0, virtual=2)
    orders = schedule_orders(schedule, stages, micro_batches, virtual=2)
    step = simulate(ranks, orders, v_shaped=True)
    assert step.seconds == pytest.approx(6 * micro_batches + stages - 1)
    more = int(schedule == "dualpipe_v")
    assert [use.live for use in step.ranks] == [2 * stages + more] * stages


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
def test_orders_in_a_v_come_to_an_end_with_any_number_of_micro_batches(schedule: str) -> None:
    for stages, micro_batches in product((2, 3, 5), (1, 2, 3, 7)):
        orders = schedule_orders(schedule, stages, micro_batches, virtual=2)
        step = simulate(equal(stages, 1.0, 1.5, 0.5, virtual=2), orders, v_shaped=True, record=False)
        assert step.seconds >= 6 * micro_batches


def test_turns_that_run_together_come_to_an_end_and_save_what_is_said() -> None:
    """With any number of micro-batches no rank waits for a pair that waits for it; and none takes longer."""
    for stages, micro_batches in product((1, 2, 3, 4, 8), (1, 2, 4, 5, 8, 16, 17)):
        orders = schedule_orders("dualpipe_v", stages, micro_batches, virtual=2)
        ranks = equal(stages, 1.0, 1.5, 0.5, virtual=2)
        alone = simulate(ranks, orders, v_shaped=True, record=False)
        for saved in (0.0, 0.4):
            paired = [replace(rank, paired=(saved, saved)) for rank in ranks]
            together = simulate(paired, orders, v_shaped=True, record=False)
            count = [len(paired_turns(order)) for order in orders]
            for one, other, pairs in zip(alone.ranks, together.ranks, count, strict=True):
                own = one.busy + one.exposed - other.busy - other.exposed
                assert own == pytest.approx(saved * pairs)
        if micro_batches >= 4 * stages:
            assert min(count) > micro_batches
            assert together.seconds < alone.seconds


@pytest.mark.parametrize("backward", [0.0, 1e-12])
def test_a_turn_of_a_pair_waits_for_the_input_of_the_other_however_short_that_is(backward: float) -> None:
    chunk = ChunkSeconds(forward=passes(0.5), backward=passes(3.0), weight_gradient=passes(1.0))
    short = replace(chunk, backward=passes(backward))
    ranks = [RankSeconds(chunks=(own, own), paired=(0.0, 0.0)) for own in (chunk, short)]
    orders = schedule_orders("dualpipe_v", 2, 4, virtual=2)
    step = simulate(ranks, orders, v_shaped=True)
    turns = [event for event in step.events if event.rank == 1 and event.stream == "computation"]
    pairs = paired_turns(orders[1])
    assert [turns[at + 1].start for at in pairs] == pytest.approx([turns[at].end for at in pairs])


def test_transfers_that_take_no_time_are_never_waited_for_in_pairs_either() -> None:
    ranks = [replace(rank, paired=(0.4, 0.4)) for rank in equal(3, 1.0, 1.5, 0.5, virtual=2)]
    orders = schedule_orders("dualpipe_v", 3, 8, virtual=2)
    free = simulate(ranks, orders, v_shaped=True, record=False).seconds
    waiting = simulate(ranks, orders, overlap=Overlap(transfers=False), v_shaped=True, record=False).seconds
    assert waiting == pytest.approx(free)


def test_two_ranks_with_transfers_by_hand() -> None:
    """F0 ends at 1, arrives at 1.5; F1 of rank 1 until 2.5; its B until 4.5, arrives at 5; B of rank 0 until 7."""
    ranks = with_chunk(equal(2, 1.0, 2.0), send_forward=0.5, send_backward=0.5)
    step = simulate(ranks, schedule_orders("1f1b", 2, 1))
    assert step.seconds == 7
    assert [(use.busy, use.exposed, use.idle) for use in step.ranks] == [(3, 0, 4), (3, 0, 4)]
    words = [(event.rank, event.stream, event.kind, event.start, event.end) for event in step.events]
    assert words == [
        (0, "computation", "forward", 0, 1),
        (0, "transfers", "send_forward", 1, 1.5),
        (0, "computation", "backward", 5, 7),
        (1, "computation", "forward", 1.5, 2.5),
        (1, "computation", "backward", 2.5, 4.5),
        (1, "transfers", "send_backward", 4.5, 5),
    ]


def test_transfers_that_are_waited_for_are_paid_by_the_sender_too() -> None:
    ranks = with_chunk(equal(2, 1.0, 2.0), send_forward=0.5, send_backward=0.5)
    orders = schedule_orders("1f1b", 2, 8)
    blocking = simulate(ranks, orders, overlap=Overlap(transfers=False))
    assert blocking.seconds > simulate(ranks, orders).seconds
    assert [use.exposed for use in blocking.ranks] == [4, 4]


def one_rank(**values: object) -> list[RankSeconds]:
    return [
        RankSeconds(chunks=(ChunkSeconds(forward=passes(4.0), backward=passes(8.0), **values),))  # type: ignore[arg-type]
    ]


def test_communication_inside_a_pass() -> None:
    inner = PassSeconds(computation=4.0, blocking=1.0, overlapped=6.0)
    ranks = [RankSeconds(chunks=(ChunkSeconds(forward=(inner,), backward=passes(8.0)),))]
    orders = schedule_orders("1f1b", 1, 2)
    step = simulate(ranks, orders)
    assert step.seconds == 2 * (6 + 1 + 8)  # the longer of the two, and what cannot overlap
    assert (step.ranks[0].busy, step.ranks[0].exposed, step.ranks[0].idle) == (24, 6, 0)
    assert simulate(ranks, orders, overlap=Overlap(inside=False)).seconds == 2 * (4 + 6 + 1 + 8)


def test_gathers_are_prefetched() -> None:
    """Only the first stands in nobody's shadow; one that is longer than the pass before it shows by the difference."""
    orders = schedule_orders("1f1b", 1, 2)
    assert simulate(one_rank(gather=3.0), orders).seconds == 3 + 24
    assert simulate(one_rank(gather=5.0), orders).seconds == 5 + (4 + 1) + 8 + (4 + 1) + 8
    waiting = simulate(one_rank(gather=3.0), orders, overlap=Overlap(gathers=False))
    assert (waiting.seconds, waiting.ranks[0].exposed) == (24 + 4 * 3, 12)


def test_reductions_start_inside_the_last_backward_pass() -> None:
    """Buckets are there at 2, 4, 6 and 8 of the last backward pass of 8: 3 s each end at 5, 8, 11 and 14."""
    orders = schedule_orders("1f1b", 1, 2)
    ranks = [replace(one_rank(reductions=(3.0,) * 4)[0], optimizer=1.0, weight_gather=2.0)]
    step = simulate(ranks, orders)
    assert step.seconds == 16 + 14 + 1 + 2
    assert (step.ranks[0].busy, step.ranks[0].exposed) == (25, 6 + 2)
    assert simulate(ranks, orders, overlap=Overlap(reductions=False)).seconds == 24 + 12 + 3
    each = simulate(one_rank(reductions=(1.0,), reduce_each=True), orders)
    assert [event.start for event in each.events if event.kind == "reduction"] == [12, 24]
    assert each.seconds == 25


def test_orders_that_wait_for_each_other() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it makes micro-batch 1, which rank 1 takes first."""
    forward, backward = (lambda part: Turn("forward", part)), (lambda part: Turn("backward", part))
    orders = (
        (forward(0), backward(0), forward(1), backward(1)),
        (forward(1), backward(1), forward(0), backward(0)),
    )
    with refused(CostModelError, "backward of micro-batch 0, chunk 0", "forward of micro-batch 1, chunk 0"):
        simulate(equal(2, 1.0, 1.0), orders)


@pytest.mark.parametrize(
    ("order", "facts"),
    [
        (
            [Turn("backward", 0), Turn("forward", 0)],
            ("backward of micro-batch 0, chunk 0", "forward of micro-batch 0, chunk 0"),
        ),
        ([Turn("forward", 0)], (1, 1, 1, 1, 2)),
        ([Turn("forward", 0), Turn("forward", 0)], ("forward of micro-batch 0, chunk 0", "twice")),
        ([Turn("forward", 0), Turn("forward", 0, 1)], ("forward of micro-batch 0, chunk 1", 1, 1, 1)),
        (
            [Turn("forward", 0), Turn("weight_gradient", 0)],
            ("weight_gradient of micro-batch 0, chunk 0", "input_gradient of micro-batch 0, chunk 0"),
        ),
        ([], (0, 0, 1, 1, 1, 2)),
    ],
)
def test_orders_that_are_no_step(order: list[Turn], facts: tuple[object, ...]) -> None:
    with refused(CostModelError, *facts):
        simulate(equal(1, 1.0, 1.0, 1.0), (tuple(order),))


def test_slices_go_back_in_reverse_order() -> None:
    turns = [Turn("forward", 0, 0, 0), Turn("forward", 0, 0, 1), Turn("backward", 0, 0, 0), Turn("backward", 0, 0, 1)]
    with refused(CostModelError, "backward of micro-batch 0, chunk 0", "backward of micro-batch 0, chunk 0, slice 1"):
        simulate(equal(1, 1.0, 1.0, slices=2), (tuple(turns),))


def test_refusals() -> None:
    with refused(CostModelError, "dualpipe", "1f1b", "gpipe"):
        schedule_orders("dualpipe", 2, 2)
    with refused(CostModelError, "1f1b", 2, "interleaved_1f1b"):
        schedule_orders("1f1b", 2, 2, virtual=2)
    with refused(CostModelError, "gpipe", 2, "seqpipe"):
        schedule_orders("gpipe", 2, 2, slices=2)
    with refused(CostModelError, "2 ranks", 1):
        simulate(equal(2, 1.0, 1.0), schedule_orders("1f1b", 1, 1))
    with refused(CostModelError, "rank 0", -1.0):
        simulate(equal(1, -1.0, 1.0), schedule_orders("1f1b", 1, 1))
    with refused(CostModelError, "rank 1", 2, "rank 0", 1):
        simulate(equal(1, 1.0, 1.0) + equal(1, 1.0, 1.0, virtual=2), schedule_orders("1f1b", 2, 1))


def test_64_ranks_and_256_micro_batches_have_an_event_each() -> None:
    ranks = with_chunk(equal(64, 1.0, 2.0), send_forward=0.01, send_backward=0.01)
    step = simulate(ranks, schedule_orders("1f1b", 64, 256))
    assert len(step.events) == 64 * 2 * 256 + 2 * 63 * 256


def test_a_step_of_passes_alone_takes_as_long_as_it_is_simulated() -> None:
    """Stages of unequal seconds, one or several on each rank, with as many micro-batches as ranks or more."""
    rng = random.Random(7)
    for ranks, virtual, rounds in product((1, 2, 3, 8), (1, 2, 5), (1, 3)):
        stages = [(rng.uniform(0.5, 2), rng.choice((0.0, rng.uniform(1, 4)))) for _ in range(ranks * virtual)]
        chunks = [ChunkSeconds(forward=passes(ahead), backward=passes(back)) for ahead, back in stages]
        turns = [RankSeconds(chunks=tuple(chunks[rank::ranks])) for rank in range(ranks)]
        name = "interleaved_1f1b" if virtual > 1 else "1f1b"
        orders = schedule_orders(name, ranks, ranks * rounds, virtual=virtual)
        assert step_of_passes(stages, orders) == simulate(turns, orders, record=False).seconds


def test_passes_whose_orders_wait_for_each_other_are_refused() -> None:
    forward, back = Turn("forward", 0), Turn("backward", 0)
    with refused(CostModelError, "wait for each other"):
        step_of_passes([(1.0, 1.0)] * 2, ((back, forward), (forward, back)))
