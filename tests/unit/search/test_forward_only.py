"""Plans of the forward pass alone: nothing of training is in their time or memory, and what is proved holds."""

from dataclasses import replace

import pytest

from hardware_profiles import load_profile
from planner.errors import PlanFileError, RequestError
from planner.graph.forward_only import evaluating, without_updates
from planner.graph.rewriting.updates import UPDATE
from planner.plan.binding.bind import bind
from planner.plan.file import dump_plan, parse_plan
from planner.plan.prediction.memory.live import live_memory
from planner.plan.prediction.predict import predict, stage_costs
from planner.plan.prediction.timeline import timeline_of
from planner.plan.schedule import orders_of
from planner.sharding.update import Update
from planner.strategy_search.request.offload import Offload
from planner.strategy_search.request.space import Pinned, forward_pinned
from planner.strategy_search.search import search
from tests.distributed import plans
from tests.refusals import refused
from tests.unit.search.cases import BATCH, request_of, traced

FORWARD = Pinned(schedule="forward")
CPU4 = load_profile("cpu").with_devices(4)


def test_what_a_model_does_in_training_alone_is_switched_off() -> None:
    dropping, image = plans.traced("dropping"), plans.traced("resnet64")
    numbers = {
        argument
        for op in evaluating(dropping).operators
        if op.op in ("aten.dropout.default", "aten.feature_dropout.default")
        for argument in op.arguments[1:2]
    }
    assert numbers == {0.0}
    assert evaluating(image).updates == ()
    assert len(evaluating(image).operators) == len(image.operators)
    assert not any(op.op == UPDATE for op in without_updates(image).operators)
    plain = plans.traced("llama")
    assert evaluating(plain) is plain


@pytest.mark.thorough
@pytest.mark.slow
def test_a_forward_plan_has_no_time_and_memory_of_training() -> None:
    found = search(request_of("llama-4", CPU4, 8, pinned=replace(FORWARD, pipeline=2)))
    plan, trained = found.plan, search(request_of("llama-4", CPU4, 8, pinned=Pinned(pipeline=2))).plan
    time, memory = dict(plan.prediction.time), dict(plan.prediction.memory)
    for part in ("backward", "recomputation", "gradient accumulation", "gradient reduction", "optimizer"):
        assert time[part] == 0.0
    assert memory["gradients"] == memory["optimizer state"] == 0.0
    assert plan.prediction.step_seconds < dict(trained.prediction.time)["forward"] + trained.prediction.step_seconds / 2
    assert plan.prediction.step_seconds <= plan.prediction.objective_seconds * (1 + 1e-9)
    assert found.gap >= 0
    assert parse_plan(dump_plan(plan)) == plan
    assert {turn.kind for order in orders_of(plan) for turn in order} == {"forward"}
    bound = bind(plan, traced("llama-4"), BATCH)
    assert predict(bound, CPU4) == plan.prediction
    for rank, cost in enumerate(stage_costs(bound, CPU4)):
        assert sum(live_memory(bound, rank, cost.memory).values()) <= sum(cost.memory.values())


@pytest.mark.slow
@pytest.mark.thorough
def test_no_pruning_finds_a_faster_one() -> None:
    for update in (Update(buckets="none"), Update(buckets="none", gathers="auto")):
        asked = request_of("llama-2", CPU4, 8, pinned=FORWARD, update=update)
        pruned, every = search(asked), search(replace(asked, prune=False))
        assert pruned.plan.prediction.objective_seconds == pytest.approx(every.plan.prediction.objective_seconds)
        least = every.plan.prediction.objective_seconds
        assert pruned.plan.prediction.objective_seconds * (1 - pruned.objective_gap) <= least * (1 + 1e-9)


def test_offloaded_weights_are_fetched_for_one_pass() -> None:
    """They were priced for a backward pass, too, which no report could draw."""
    machine = load_profile("cpu").with_devices(2)
    pinned = replace(FORWARD, pipeline=2, mesh=(), micro_batches=2, offload=Offload(weights=("host",)))
    plan = search(request_of("llama-2", machine, 8, pinned=pinned)).plan
    bound = bind(plan, traced("llama-2"), BATCH)
    assert predict(bound, machine) == plan.prediction
    costs = stage_costs(bound, machine)
    chunks = [chunk for cost in costs for chunk in cost.chunks]
    assert all(chunk.forward.waits > 0 for chunk in chunks)
    assert all(chunk.backward.hidden == chunk.backward.waits == 0 for chunk in chunks)
    assert timeline_of(plan, costs).seconds > 0


def test_experts_exchange_no_gradients() -> None:
    """The exchange of a backward pass was priced, too; an audit found that nobody makes it."""
    machine = load_profile("cpu").with_devices(2)
    pinned = replace(FORWARD, pipeline=1, data=2, tensor=1, context=1, expert=2, micro_batches=1)
    plan = search(request_of("mixture", machine, 8, pinned=pinned)).plan
    costs = stage_costs(bind(plan, traced("mixture"), BATCH), machine)
    assert costs[0].chunks[0].forward.waits > 0
    assert costs[0].chunks[0].backward.waits == 0
    assert timeline_of(plan, costs).seconds > 0


def test_what_only_training_has_is_refused() -> None:
    with refused(RequestError, "recompute", "full"):
        request_of("llama-2", CPU4, 8, pinned=replace(FORWARD, recompute="full"))
    with refused(RequestError, "offload", "saved"):
        request_of("llama-2", CPU4, 8, pinned=replace(FORWARD, offload=Offload(saved=("host",))))
    chosen = {"clip_norm": 1.0, "gradients": "sum", "gradient_dtype": "fp32", "master_weights": False, "buckets": 2**20}
    chosen["local_parameters"] = ("*norm*",)
    for name, value in chosen.items():
        with refused(RequestError, "forward only", name, "leave it out"):
            request_of("llama-2", CPU4, 8, pinned=FORWARD, update=Update(**{name: value}))
    for zero in (1, 2):
        with refused(RequestError, "forward only", f"zero = {zero}", 3):
            request_of("llama-2", CPU4, 8, pinned=replace(FORWARD, zero=zero))
    with refused(RequestError, "gpipe"):
        forward_pinned(Pinned(schedule="gpipe"))
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(2), schedule="forward", recomputation="full")
    with refused(PlanFileError, "forward", "recomputation"):
        bind(plan, plans.traced("llama"), plans.BATCH)
