"""Gradients of norms under sequence parallelism are sums over the tokens of a device: they are added up over the
micro-batches and reduced once a step, in the buckets of the plan, here one collective for all of them, as Megatron-LM
does when it finalises gradients."""

from collections.abc import Mapping

import pytest

import planner
from hardware_profiles import load_profile
from planner.plan.binding.bind import bind
from planner.plan.layout.per_step_communication import reduction_starts
from planner.plan.prediction.predict import stage_costs
from planner.sharding.layout import PARTIAL
from tests.unit.search.cases import BATCH, traced

SPLITS: tuple[Mapping[str, int], ...] = (
    {"tensor": 2},
    {"tensor": 2, "data": 2, "zero": 0},
    {"tensor": 2, "data": 2, "zero": 2},
    {"tensor": 2, "data": 2, "zero": 3},
)


@pytest.mark.cases(3)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_norms_are_reduced_once_a_step_together(split: Mapping[str, int], micro_batches: int) -> None:
    devices, graph = split["tensor"] * split.get("data", 1), traced("llama-2")
    pinned = {**split, "sequence_parallel": True, "micro_batches": micro_batches, "recompute": "none"}
    update = {"buckets": 1 << 20}
    plan = planner.search(
        graph, "cpu", devices=devices, global_batch=16, pinned=pinned, update=update, batch=BATCH
    ).plan
    bound = bind(plan, graph, BATCH)
    norms = {name for name in bound.parameters if "norm" in name}
    tensor = len(plan.mesh.sizes) - 1
    assert {bound.parameters[name].gradient[tensor] for name in norms} == {PARTIAL}
    buckets = reduction_starts(bound, bound.parameters.keys()).buckets
    assert [set(bucket.names) for bucket in buckets if norms & set(bucket.names)] == [norms]
    (cost,) = stage_costs(bound, load_profile("cpu").with_devices(devices))
    sums = [sent for sent in cost.messages if sent.message.kind == "all_reduce" and sent.message.axis == tensor]
    assert not [sent for sent in sums if "norm" in sent.owner and sent.phase == "backward"]
