"""Weights of a block that are gathered together: an audit finds the messages, the work and the live memory that were
predicted."""

from dataclasses import replace

import pytest

from planner.plan.binding.bind import bind
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict
from planner.sharding.update import Update
from planner.strategy_search.request.space import Pinned
from runtime import StageAudit, audit
from runtime.auditing import audit as auditing
from tests.contract.test_priced_is_emitted import FULL, KEEPING, Hand, cluster_of
from tests.distributed import plans
from tests.distributed.searched import searched_plan
from tests.long_lists import first

TWO = {"micro_batches": 2}
CASES = (
    Hand(model="llama4", kind="zero3", mesh=(2,), settings=TWO),
    Hand(model="gpt4", kind="zero3", mesh=(2,), settings={**TWO, "stages": (2, 2), **KEEPING}),
    Hand(model="llama4", kind="zero3", mesh=(2,), settings={**TWO, "stages": (1, 2, 1), **FULL}),
    Hand(model="gpt4", kind="zero2", mesh=(2,), settings=TWO),
    Hand(model="llama4", kind="outer", mesh=(2, 2), settings=TWO),
    Hand(model="mixture4", kind="zero3", mesh=(2,), settings=TWO),
    Hand(model="gpt4", kind="zero3", mesh=(2,), settings={"micro_batches": 4, "stages": (2, 2), "schedule": "zb_h1"}),
)


AHEAD = (
    Hand(model="llama4", kind="zero3", mesh=(2,), settings=TWO),
    Hand(model="llama4", kind="zero3", mesh=(2,), settings={**TWO, "stages": (1, 2, 1), **FULL}),
    Hand(model="gpt4", kind="zero2", mesh=(2,), settings=TWO),
    Hand(model="gpt4", kind="zero3", mesh=(2,), settings={**TWO, "stages": (2, 2), **KEEPING}),
    Hand(model="llama4", kind="outer", mesh=(2, 2), settings=TWO),
    Hand(model="mixture4", kind="zero3", mesh=(2,), settings=TWO),
    Hand(model="gpt4", kind="zero3", mesh=(2,), settings={"micro_batches": 4, "stages": (2, 2), "schedule": "zb_h1"}),
)


def together(plan: Plan, dtype: str = "mixed", gathers: str = "block") -> Plan:
    update = Update(buckets="none", gathers=gathers, gradient_dtype=dtype)
    return replace(plan, training=replace(plan.training, update=update))


def audited(plan: Plan, model: str) -> list[StageAudit]:
    return list(audit(plan, plans.traced(model), plans.BATCH, cluster_of(plan)))


def messages(found: list[StageAudit]) -> int:
    return sum(row.emitted for stage in found for row in stage.collectives)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("make", first(2, CASES), ids=str)
def test_what_goes_together_is_emitted_as_predicted(make: Hand) -> None:
    plan = make()
    found = audited(together(plan), make.model)
    check(found)
    assert messages(found) < messages(audited(plan, make.model))


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("make", first(3, AHEAD), ids=str)
def test_what_comes_ahead_is_emitted_as_predicted(make: Hand) -> None:
    plan = make()
    found = audited(together(plan, gathers="ahead"), make.model)
    check(found)
    assert messages(found) == messages(audited(together(plan), make.model))


@pytest.mark.cases(1)
@pytest.mark.parametrize("gathers", ["ahead", "block"])
def test_a_message_over_one_axis_is_let_go_before_that_over_the_next(gathers: str) -> None:
    (stage,) = audited(together(Hand(model="llama", kind="zero3", mesh=(2, 2))(), gathers=gathers), "llama")
    assert stage.unequal == ()
    assert stage.peak == pytest.approx(stage.predicted_peak, rel=1e-3)


@pytest.mark.slow
@pytest.mark.thorough
def test_buckets_that_start_while_gradients_of_a_block_are_added_up_are_those_of_the_step() -> None:
    pinned = Pinned(tensor=2, data=2, zero=3, sequence_parallel=True, micro_batches=2)
    plan = searched_plan("llama4", 4, pinned=pinned, update=Update(buckets=2**20, gathers="ahead"))
    check(audited(plan, "llama4"))


def check(found: list[StageAudit]) -> None:
    for stage in found:
        assert stage.unequal == ()
        near = abs(stage.peak / stage.predicted_peak - 1)
        assert near < auditing.MEMORY_TOLERANCE, (stage.live, stage.predicted_live)
        assert stage.peak <= stage.stated


def test_fewer_messages_take_less_time() -> None:
    make = CASES[0]
    plan = make()
    traced, cluster = plans.traced(make.model), cluster_of(plan)
    alone, by_block = (predict(bind(one, traced, plans.BATCH), cluster) for one in (plan, together(plan)))
    assert by_block.step_seconds < alone.step_seconds
    assert dict(by_block.time)["parameter gathering"] < dict(alone.time)["parameter gathering"]
    assert sum(seconds for _, seconds in by_block.time) == pytest.approx(by_block.step_seconds)
