"""The step as its schedule runs it: less than the sum that the search minimises, more where nothing covers messages."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from costmodels import schedule_orders, simulate
from hardware_profiles import Cluster, Hidden, load_profile
from planner.plan.binding.bind import bind
from planner.plan.plan import Plan, Prediction
from planner.plan.prediction.predict import predict, stage_costs
from planner.plan.prediction.step import AHEAD, BETWEEN_STAGES, UNCOVERED, ChunkCost, PassCost, ranks_seconds, step_of
from planner.plan.prediction.walk import operator_visit
from planner.pricing.inner_messages import inner_messages
from planner.pricing.message import message_seconds
from tests.distributed import plans

ONCE = {"gradient reduction": 3.0, "optimizer": 1.0, "weight gathering": 2.0}


def one(work: float, waits: float = 0.0, hidden: float = 0.0) -> PassCost:
    return PassCost(work=work, waits=waits, hidden=hidden)


def chunk(forward: PassCost, backward: PassCost, **hidden: float) -> ChunkCost:
    return ChunkCost(blocks=4, forward=forward, backward=backward, **hidden)


def test_a_rank_alone_waits_for_nobody() -> None:
    step = step_of([[chunk(one(10.0, 1.0), one(20.0, 2.0))]], [ONCE], 5)
    assert step.seconds == 5 * 33.0 + 6.0
    assert (step.busiest, step.uncovered, step.bubble) == (0, 0.0, 0.0)


def test_an_early_stage_that_is_quick_hides_its_work() -> None:
    """Two ranks of 3 and 30 seconds: the quick one fills the pipeline, then its work is in the shade of the other."""
    quick, slow = [chunk(one(1.0), one(2.0))], [chunk(one(10.0), one(20.0))]
    step = step_of([quick, slow], [ONCE, ONCE], 8)
    assert step.seconds == 1 + 8 * 30 + 2 + 6
    assert (step.busiest, step.bubble) == (1, 3.0)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_without_a_flush_the_slowest_rank_sets_the_pace_with_its_whole_update(schedule: str) -> None:
    quick, slow = [chunk(one(1.0), one(2.0))], [chunk(one(10.0), one(20.0))]
    assert step_of([quick, slow], [ONCE, ONCE], 8, schedule).seconds == 8 * 30 + sum(ONCE.values())


def test_what_a_quick_rank_does_once_is_in_the_shade() -> None:
    ranks = [[chunk(one(1.0), one(2.0))]] * 2
    late = {**ONCE, "gradient reduction": 5.0}
    assert step_of(ranks, [ONCE, late], 4).seconds == 5 * 3.0 + 6.0  # the last rank ends its passes 2 s earlier
    assert step_of(ranks, [late, ONCE], 4).seconds == 5 * 3.0 + 8.0


@pytest.mark.parametrize("hidden", [0.0, 5.0, 10.0])
def test_messages_that_find_work_enough_take_nothing(hidden: float) -> None:
    plain = step_of([[chunk(one(10.0), one(20.0))]], [ONCE], 4)
    covered = [chunk(one(10.0, hidden=hidden), one(20.0, hidden=hidden), reductions=hidden, weights=10.0 - hidden)]
    assert step_of([covered], [ONCE], 4) == plain


def test_messages_longer_than_the_work_make_the_pass_longer() -> None:
    step = step_of([[chunk(one(10.0, hidden=12.0), one(20.0, hidden=21.0))]], [ONCE], 4)
    assert step.seconds == 4 * 33.0 + 6.0
    assert step.uncovered == pytest.approx(4 * 3.0)


def test_reductions_longer_than_the_last_backward_pass_delay_the_optimizer() -> None:
    """Four buckets of 10 s, the first of them when a fifth of the pass is done."""
    step = step_of([[chunk(one(10.0), one(20.0), reductions=40.0)]], [ONCE], 4)
    assert step.seconds == pytest.approx(4 * 30.0 - 20.0 + 4.0 + 40.0 + 6.0)
    assert step.uncovered == pytest.approx(24.0)


def test_weights_longer_than_the_forward_pass_of_the_next_step_are_waited_for() -> None:
    step = step_of([[chunk(one(10.0, hidden=4.0), one(20.0), weights=9.0)]], [ONCE], 4)
    assert step.uncovered == pytest.approx(3.0)


def cluster_of(plan: Plan, profile: str = "h100-80gb", **hidden: float) -> Cluster:
    cluster = load_profile(profile).with_devices(plan.cluster.devices)
    return cluster.with_software(replace(cluster.software, hidden=Hidden(**hidden)))


def priced(plan: Plan, profile: str = "h100-80gb", **hidden: float) -> Prediction:
    bound = bind(plan, plans.traced(plan.model.reference), plans.BATCH)
    return predict(bound, cluster_of(plan, profile, **hidden))


def hand_plans() -> Iterator[Plan]:
    for model, stages in (("llama4", (4,)), ("llama4", (1,) * 4), ("gpt4", (3, 1)), ("llama4", (1, 3))):
        for kind in ("zero1", "zero2", "zero3"):
            yield plans.hand_plan(kind, model, plans.mesh_of(4), stages=stages, micro_batches=4)
    for stages in ((4,), (2, 2)):
        yield plans.hand_plan("megatron", "llama4", plans.mesh_of(2, 2), stages=stages, micro_batches=2)


@pytest.mark.cases(4)
@pytest.mark.parametrize("plan", hand_plans())
def test_a_plan_takes_what_the_simulation_says(plan: Plan) -> None:
    bound = bind(plan, plans.traced(plan.model.reference), plans.BATCH)
    for share in (0.0, 0.5, 1.0):
        cluster = cluster_of(plan, tensor=share, gathers=share, reductions=share)
        prediction = predict(bound, cluster)
        costs = stage_costs(bound, cluster)
        ranks = ranks_seconds([cost.chunks for cost in costs], [cost.once for cost in costs], "1f1b")
        found = simulate(ranks, schedule_orders("1f1b", plan.pipeline, plan.training.micro_batches))
        assert prediction.step_seconds == pytest.approx(found.seconds)
        assert math.fsum(seconds for _, seconds in prediction.time) == pytest.approx(prediction.step_seconds)
        assert all(seconds >= 0 for name, seconds in prediction.time if name not in (AHEAD, BETWEEN_STAGES))
        assert (UNCOVERED in dict(prediction.time)) == (share > 0)


@pytest.mark.cases(4)
@pytest.mark.parametrize("plan", hand_plans())
def test_hiding_more_is_never_slower_and_never_hides_work(plan: Plan) -> None:
    steps = [priced(plan, tensor=h, gathers=h, reductions=h) for h in (0.0, 0.25, 0.5, 1.0)]
    for before, after in pairwise(steps):
        assert after.step_seconds <= before.step_seconds * (1 + 1e-9)
        assert after.objective_seconds <= before.objective_seconds * (1 + 1e-9)
    if plan.pipeline == 1:
        summed = [step.objective_seconds + dict(step.time).get(AHEAD, 0.0) for step in steps]
        assert steps[0].step_seconds == pytest.approx(summed[0], rel=1e-12)
        assert steps[-1].step_seconds >= summed[-1] * (1 - 1e-12)


def test_what_the_sum_takes_for_hidden_shows_where_there_is_not_work_enough() -> None:
    """Weights that are gathered for every use, on slow links."""
    plan = plans.hand_plan("zero3", "llama4", plans.mesh_of(4), stages=(4,), micro_batches=4)
    waited, hidden = priced(plan, "cpu"), priced(plan, "cpu", gathers=1.0)
    gathering = dict(waited.time)["parameter gathering"]
    uncovered = dict(hidden.time)[UNCOVERED]
    assert 0 < uncovered < gathering
    assert hidden.step_seconds == pytest.approx(hidden.objective_seconds + uncovered)
    assert hidden.step_seconds < waited.step_seconds


@pytest.mark.parametrize("recomputation", ["none", "full"])
def test_what_an_operator_sends_itself_is_hidden_as_often_as_it_is_sent(
    recomputation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss over a split vocabulary: forward once, backward once, and never again, as it is in no block."""
    plan = plans.hand_plan("megatron", "llama4", plans.mesh_of(2, 2), stages=(4,), recomputation=recomputation)
    bound = bind(plan, plans.traced(plan.model.reference), plans.BATCH)
    cluster = cluster_of(plan, tensor=1.0)

    def hidden() -> tuple[float, float]:
        ((one,),) = [cost.chunks for cost in stage_costs(bound, cluster)]
        return one.forward.hidden, one.backward.hidden

    with_them = hidden()
    monkeypatch.setattr(operator_visit, "inner_messages", lambda *_: ())
    without = hidden()
    expected = [0.0, 0.0]
    for op in bound.operators:
        for inner in inner_messages(op.rule, op.strategy, plan.mesh):
            seconds = message_seconds(inner.message, plan.mesh, cluster)
            expected[0] += inner.forward * seconds
            expected[1] += inner.backward * seconds
    assert expected[0] > 0
    assert [one - other for one, other in zip(with_them, without, strict=True)] == pytest.approx(expected)
