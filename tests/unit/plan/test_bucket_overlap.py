"""Buckets of gradients start behind the part of the backward pass that fills them, and hide under what is left."""

import math
from dataclasses import replace

import pytest

from planner.plan.binding.bind import bind
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict, stage_costs
from planner.plan.prediction.step import REDUCED_AHEAD, UNCOVERED, bucketed
from planner.plan.prediction.walk.bucket_overlap import SLOTS
from planner.sharding.update import Update
from tests.contract.test_priced_is_emitted import cluster_of
from tests.distributed import plans


def in_buckets(size: int) -> Plan:
    """Four blocks on two devices, each with all weights and a half of the states."""
    plan = plans.hand_plan("zero1", "llama4", plans.mesh_of(2), micro_batches=2)
    return replace(plan, training=replace(plan.training, update=Update(buckets=size, gathers="each")))


def test_a_bucket_waits_for_the_last_of_its_members() -> None:
    plan = in_buckets(1 << 14)
    (cost,) = stage_costs(bind(plan, plans.traced("llama4"), plans.BATCH), cluster_of(plan))
    (chunk,) = cost.chunks
    assert len(chunk.buckets) == 5 * SLOTS  # head, and four blocks; the embedding is through with the first
    assert chunk.buckets[-1] > 0
    ends = range(SLOTS - 1, len(chunk.buckets), SLOTS)
    assert any(
        seconds > 0 for at, seconds in enumerate(chunk.buckets) if at not in ends
    )  # some start inside of a block
    assert sum(seconds > 0 for seconds in chunk.buckets) > 1
    assert 0 < bucketed(cost.chunks) <= cost.once["gradient reduction"] + cost.beyond["gradient reduction"] + 1e-15


def test_one_bucket_for_all_has_nothing_to_hide_under() -> None:
    """It is full when the pass is over."""
    small, whole = (
        predict(bind(plan, plans.traced("llama4"), plans.BATCH), cluster_of(plan))
        for plan in (in_buckets(1 << 14), in_buckets(1 << 30))
    )
    time = dict(whole.time)
    assert time[UNCOVERED] == pytest.approx(-time[REDUCED_AHEAD])
    assert dict(small.time)[UNCOVERED] < -dict(small.time)[REDUCED_AHEAD]
    for one in (small, whole):
        assert math.fsum(seconds for _, seconds in one.time) == pytest.approx(one.step_seconds)
