"""What people write by hand is among the candidates, so the search is never slower than Megatron or FSDP."""

import math
from dataclasses import replace

import pytest

from costmodels import usable_memory
from planner.plan.bind import bind
from planner.plan.predict import predict
from planner.search.search import search
from planner.search.solvers import SOLVERS
from planner.search.space import Configuration, Pinned
from planner.search.stage_problem import stage_problem
from tests.unit.search.by_hand import ALL_CUT, COPIES, UPDATE_CUT, Option, by_hand
from tests.unit.search.cases import BATCH, Case, evaluated, make_case, plan_of, request_of, traced

MEGATRON = ("data", "tensor")
BY_HAND: tuple[tuple[str, int, tuple[int, ...], tuple[str, ...], Option, bool], ...] = (
    ("llama8b", 32, (8,), ("tensor",), COPIES, True),
    ("llama8b", 32, (2, 4), MEGATRON, UPDATE_CUT, True),
    ("llama8b", 32, (8,), ("data",), COPIES, False),
    ("llama8b", 32, (8,), ("data",), UPDATE_CUT, False),
    ("llama8b", 32, (8,), ("data",), ALL_CUT, True),
    ("llama70b-4-layers", 128, (8, 8), MEGATRON, COPIES, True),
    ("llama70b-4-layers", 128, (8, 8), MEGATRON, UPDATE_CUT, True),
    ("llama70b-4-layers", 128, (8, 8), ("data", "data"), UPDATE_CUT, True),
    ("llama70b-4-layers", 128, (64,), ("data",), COPIES, False),
    ("llama70b-4-layers", 128, (64,), ("data",), ALL_CUT, True),
)


def case_of(model: str, batch: int, mesh: tuple[int, ...], recompute: bool) -> Case:
    configuration = Configuration(stages=1, mesh=mesh, micro_batches=batch // math.prod(mesh), recompute=recompute)
    return make_case(model, "h100-80gb", configuration, batch, "bf16")


@pytest.mark.parametrize(("model", "batch", "mesh", "axes", "on_data", "fits"), BY_HAND)
def test_never_slower_than_by_hand(
    model: str, batch: int, mesh: tuple[int, ...], axes: tuple[str, ...], on_data: Option, fits: bool
) -> None:
    case = case_of(model, batch, mesh, recompute=True)
    choices = by_hand(case, axes, on_data)
    room = usable_memory(case.cluster.device)
    problem = stage_problem(case.tables, case.kinds[0].terms, case.cluster, room)
    people = evaluated(problem, choices[0])
    assert people.feasible is fits
    best = SOLVERS["dynamic_programming"](problem.problem)
    assert best.status == "optimal"
    assert best.evaluation is not None
    if fits:
        assert best.evaluation.time <= people.time * (1 + 1e-9)
    unlimited = SOLVERS["dynamic_programming"](replace(problem.problem, memory_limit=math.inf))
    assert unlimited.evaluation is not None
    assert unlimited.evaluation.time <= people.time * (1 + 1e-9)
    # the judge says the same of the plan written by hand
    prediction = predict(bind(plan_of(case, choices), traced(model), BATCH), case.cluster)
    assert math.isclose(prediction.step_seconds, people.time, rel_tol=1e-9)
    assert (prediction.peak_bytes <= prediction.capacity_bytes) is fits


@pytest.mark.parametrize(
    ("model", "batch", "devices", "mesh"), [("llama8b", 32, 8, (2, 4)), ("llama70b-4-layers", 128, 64, (8, 8))]
)
def test_a_search_on_the_same_mesh_is_never_slower(model: str, batch: int, devices: int, mesh: tuple[int, ...]) -> None:
    case = case_of(model, batch, mesh, recompute=False)
    pinned = Pinned(stages=1, mesh=mesh, micro_batches=case.configuration.micro_batches)
    found = search(request_of(model, case.cluster, batch, precision="bf16", pinned=pinned)).plan.prediction
    assert case.cluster.devices == devices
    compared = 0
    for recompute in (False, True):
        case = case_of(model, batch, mesh, recompute)
        for on_data in (COPIES, UPDATE_CUT, ALL_CUT):
            plan = plan_of(case, by_hand(case, ("data", "tensor"), on_data))
            people = predict(bind(plan, traced(model), BATCH), case.cluster)
            if people.peak_bytes <= people.capacity_bytes:
                assert found.step_seconds <= people.step_seconds * (1 + 1e-9)
                compared += 1
    assert compared >= 2
