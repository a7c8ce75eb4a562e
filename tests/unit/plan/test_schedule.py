"""Which schedules a plan may name, and what follows from them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from costmodels import SCHEDULES, Turn, most_in_flight, schedule_orders, simulate
from planner.errors import PlanFileError
from planner.plan.binding.bind import bind
from planner.plan.layout.deferred_weight_gradients import arrivals, deferred_weight_gradients
from planner.plan.layout.stage_cut import cut_stage
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict, stage_costs
from planner.plan.prediction.step import ranks_seconds
from planner.plan.schedule import in_flight_of, moments_of, most_deferred, orders_of
from planner.plan.schedule_checks import check_schedule
from tests.contract.test_priced_is_emitted import cluster_of
from tests.distributed import plans


def plan_of(schedule: str = "1f1b", **settings: object) -> Plan:
    given = {"stages": (1, 1, 1, 1), "micro_batches": 4, "schedule": schedule, **settings}
    return plans.hand_plan("zero1", "llama4", plans.mesh_of(), **given)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_schedule_says_of_itself_is_what_its_turns_do(name: str) -> None:
    schedule, several = SCHEDULES[name], SCHEDULES[name].interleaved or SCHEDULES[name].v_shaped
    virtual = 2 if several else 1
    slices = 2 if schedule.sliced else 1
    for stage, turns in enumerate(schedule_orders(name, 4, 8, virtual=virtual, slices=slices)):
        assert schedule.splits_backward == any(turn.kind == "weight_gradient" for turn in turns)
        assert schedule.sliced == any(turn.slice > 0 for turn in turns)
        assert several == any(turn.chunk > 0 for turn in turns)
        assert schedule.holds_all == (most_in_flight(turns) == 8 * virtual * slices)
        assert schedule.trains == any(turn.kind != "forward" for turn in turns)
        if not schedule.trains:
            assert schedule.in_flight(stage, 4, 8, virtual, slices) == (1,)
            continue
        held = tuple(most_held([turn for turn in turns if turn.chunk == chunk]) for chunk in range(virtual))
        assert schedule.in_flight(stage, 4, 8, virtual, slices) == held


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.trains])
def test_it_does_so_with_any_numbers(name: str) -> None:
    """Few micro-batches for the ranks, one chunk where there may be several, slices that do not divide the ranks."""
    schedule = SCHEDULES[name]
    chunks = (2,) if schedule.v_shaped else (1, 2, 3) if schedule.virtual else (1,)
    for ranks, turns, virtual, slices in product(
        range(1, 5), range(1, 7), chunks, (1, 2, 3) if schedule.sliced else (1,)
    ):
        if virtual > 1 and not schedule.v_shaped and turns * slices % ranks:
            continue
        for rank, order in enumerate(schedule_orders(name, ranks, turns, virtual=virtual, slices=slices)):
            held = tuple(most_held([turn for turn in order if turn.chunk == chunk]) for chunk in range(virtual))
            assert schedule.in_flight(rank, ranks, turns, virtual, slices) == held, (ranks, turns, virtual, slices)


def most_held(turns: Sequence[Turn]) -> int:
    """Forward passes at most whose backward pass has not begun."""
    live = most = 0
    for turn in turns:
        live += (turn.kind == "forward") - (turn.kind in ("backward", "input_gradient"))
        most = max(most, live)
    return most


def test_chunks_in_a_v_are_not_at_their_most_together() -> None:
    """Both hold 2p halves of micro-batches together; weight gradients wait when fewer are in flight."""
    plan = replace(plan_of("zb_v", stages=(1, 1, 1, 1), micro_batches=8, global_batch=16), virtual_stages=2)
    for rank in range(2):
        found = moments_of(plan, rank)
        assert max(sum(moment.live) for moment in found) == 4
        assert all(sum(moment.live) + sum(moment.waiting) <= 5 for moment in found)
    assert sum(in_flight_of(plan, 0)) == 5


def test_what_zero_bubble_defers() -> None:
    assert [most_deferred(plan_of("zb_h1"), rank) for rank in range(4)] == [1, 2, 3, 4]
    assert most_deferred(plan_of(), 3) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "gpipe", "virtual_stages": 2}, ("gpipe has one stage on each rank", "take interleaved_1f1b")),
        ({"schedule": "interleaved_1f1b"}, ("takes virtual_stages = 2 or more, not 1", "1f1b has one")),
        ({"stages": (2, 2), "micro_batches": 2**18, "global_batch": 2**18}, ("524288 passes", "at most 262144")),
        ({"schedule": "zb_h1", "stages": (4,)}, ("zb_h1 is about a pipeline of 2 ranks or more", "take 1f1b")),
        (
            {"schedule": "interleaved_1f1b", "virtual_stages": 2, "micro_batches": 3, "global_batch": 12},
            (
                "3 is no multiple of 2, the pipeline ranks",
                "of a global batch of 12 the nearest legal values are 2 and 4",
            ),
        ),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_named(settings: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanFileError) as caught:
        check_schedule(plan_of(**settings))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_the_step_is_that_of_the_schedule(schedule: str) -> None:
    plan = plan_of(schedule)
    bound = bind(plan, plans.traced("llama4"), plans.BATCH)
    cluster = cluster_of(plan)
    costs = stage_costs(bound, cluster)
    ranks = ranks_seconds([cost.chunks for cost in costs], [cost.all_once for cost in costs], schedule)
    assert orders_of(plan) == schedule_orders(schedule, 4, 4)
    assert predict(bound, cluster).step_seconds == pytest.approx(simulate(ranks, orders_of(plan)).seconds)


def test_taking_apart_moves_seconds_and_adds_none() -> None:
    costs, flops = {}, set()
    for schedule in ("1f1b", "zb_h1"):
        bound = bind(plan_of(schedule), plans.traced("llama4"), plans.BATCH)
        costs[schedule] = stage_costs(bound, cluster_of(bound.plan))
        flops.add(predict(bound, cluster_of(bound.plan)).model_flops)
    assert len(flops) == 1
    for plain, apart in zip(costs["1f1b"], costs["zb_h1"], strict=True):
        assert apart.micro_batch == plain.micro_batch
        (whole,), (first,) = plain.chunks, apart.chunks
        assert first.later is not None
        assert first.later.work > 0
        assert first.backward.work + first.later.work == pytest.approx(whole.backward.work)
        assert sum(apart.memory.values()) > sum(plain.memory.values())


def test_linear_layers_are_put_off_and_nothing_else() -> None:
    bound = bind(plan_of("zb_h1"), plans.traced("llama4"), plans.BATCH)
    later = {at: places for at in range(len(bound.operators)) if (places := deferred_weight_gradients(bound, at))}
    kinds = {bound.operators[at].operator.op for at in later}
    assert (kinds, set(later.values())) == ({"aten.linear.default"}, {(1,)})
    linear = [op for op in bound.operators if op.operator.op == "aten.linear.default"]
    assert len(later) == len(linear)
    plain = replace(bound, plan=replace(bound.plan, schedule="1f1b"))
    assert not any(deferred_weight_gradients(plain, at) for at in later)


def test_a_tied_weight_arrives_once_for_each_turn() -> None:
    plan = plans.hand_plan("zero1", "gpt4", plans.mesh_of(), stages=(2, 2), micro_batches=4, schedule="zb_h1")
    bound = bind(plan, plans.traced("gpt4"), plans.BATCH)
    counts = [arrivals(bound, cut_stage(bound, stage)) for stage in range(2)]
    (tied,) = counts[0].keys() & counts[1].keys()
    assert (counts[0][tied], counts[1][tied]) == (1, 1)
    assert set(counts[0].values()) == {1}
