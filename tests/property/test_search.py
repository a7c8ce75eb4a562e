"""Laws of the search: bounds bound, and cutting off by them never loses the best plan."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import usable_memory
from planner.errors import InfeasibleError
from planner.plan.bind import bind
from planner.plan.predict import predict, stage_costs
from planner.plan.verify import verify
from planner.search.request import SearchRequest
from planner.search.search import SearchResult, search
from planner.search.solvers import SOLVERS
from planner.search.space import FREE, Pinned, bounds, configurations
from planner.search.stage_problem import stage_problem
from tests.unit.search.cases import (
    BATCH,
    cluster_of,
    make_case,
    plan_of,
    random_choices,
    request_of,
    small_memory,
    template_of,
    traced,
)

SMALL = (
    "chain",
    "chain-keeps-nothing",
    "perceptron",
    "residual",
    "residual-first",
    "residual-frozen-half",
    "residual-frozen-rows",
    "single-2",
)
LARGER = (*SMALL, "gpt-4-tied", "llama-4", "llama-1")
PROFILES = ("cpu", "h100-80gb", "ascend-910b-64gb")


@st.composite
def requests(draw: st.DrawFn) -> SearchRequest:
    """A small request; half of them on machines whose memory is short."""
    model, profile = draw(st.sampled_from(SMALL)), draw(st.sampled_from(PROFILES))
    cluster = cluster_of(profile, draw(st.sampled_from([1, 2, 4, 8])))
    pinned = draw(st.sampled_from([FREE, FREE, Pinned(recompute=False), Pinned(stages=1)]))
    options = {"optimizer": draw(st.sampled_from(["adamw", "sgd"])), "pinned": pinned}
    global_batch = draw(st.sampled_from([2, 4, 6, 8]))
    if draw(st.booleans()):
        cluster = small_memory(cluster, draw(st.floats(4.0, 7.0).map(lambda power: 10**power)))
    precision = draw(st.sampled_from(["fp32", "bf16"]))
    return request_of(model, cluster, global_batch, precision=precision, **options)


def outcome(request: SearchRequest) -> SearchResult | None:
    try:
        return search(request)
    except InfeasibleError:
        return None


@settings(max_examples=25)
@given(request=requests())
def test_pruning_never_loses_the_best_plan(request: SearchRequest) -> None:
    pruned, full = outcome(request), outcome(replace(request, prune=False))
    assert (pruned is None) == (full is None)
    if pruned is not None and full is not None:
        found, best = pruned.plan.prediction, full.plan.prediction
        assert math.isclose(found.step_seconds, best.step_seconds, rel_tol=1e-9)
        assert full.tried == full.configurations
        assert found.peak_bytes <= request.cluster.device.memory * (1 + 1e-9)
        verdict = verify(pruned.plan, request.graph, request.batch, request.cluster)
        assert verdict.as_stated
        assert verdict.fits


@settings(max_examples=15)
@given(request=requests(), more=st.floats(1.0, 4.0))
def test_more_memory_never_makes_a_slower_plan(request: SearchRequest, more: float) -> None:
    pinned = replace(request.pinned, stages=1)  # with stages the first one decides for all, so this does not hold
    request = replace(request, pinned=pinned)
    device = request.cluster.device
    roomier = replace(request.cluster, device=replace(device, memory=device.memory * more))
    first, second = outcome(request), outcome(replace(request, cluster=roomier))
    if first is not None:
        assert second is not None
        assert second.plan.prediction.step_seconds <= first.plan.prediction.step_seconds * (1 + 1e-9)


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_nothing_beats_the_bounds(data: st.DataObject, seed: int) -> None:
    """Neither the fastest nor the leanest nor any random choice of a configuration is below its bounds."""
    model, profile = data.draw(st.sampled_from(LARGER)), data.draw(st.sampled_from(PROFILES))
    devices, global_batch = data.draw(st.sampled_from([1, 2, 4, 8])), 8
    template, cluster = template_of(model), cluster_of(profile, devices)
    limits = bounds(template, BATCH, cluster, "fp32", "adamw")
    configuration = data.draw(st.sampled_from(list(configurations(template, devices, global_batch, FREE))))
    case = make_case(model, profile, configuration, global_batch)
    least_seconds = limits.step_seconds(configuration, devices, global_batch)
    least_bytes = limits.device_bytes(configuration, devices, global_batch, template.blocks.count)
    assert least_seconds > 0
    assert least_bytes > 0
    # the stages at their fastest and leanest, each by itself
    busy = []
    for at, kind in enumerate(case.kinds):
        fastest = SOLVERS["dynamic_programming"](stage_problem(case.tables, kind.terms, cluster, math.inf).problem)
        assert fastest.evaluation is not None
        busy.append(fastest.evaluation.time)
        if at == 0:
            leanest = SOLVERS["dynamic_programming"](stage_problem(case.tables, kind.terms, cluster, 0.0).problem)
            assert leanest.least_memory is not None
            assert leanest.least_memory >= least_bytes * (1 - 1e-9)
    if configuration.stages == 1:
        assert busy[0] >= least_seconds * (1 - 1e-9)
    # and the judge on a choice that nobody made better
    bound = bind(plan_of(case, random_choices(case, random.Random(seed))), traced(model), BATCH)
    prediction = predict(bound, cluster)
    assert prediction.step_seconds >= least_seconds * (1 - 1e-9)
    first = stage_costs(bound, cluster)[0]
    assert math.fsum(first.memory.values()) >= least_bytes * (1 - 1e-9)
    assert prediction.peak_bytes >= least_bytes
    assert usable_memory(cluster.device) < cluster.device.memory


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_the_time_bound_is_close_where_work_decides(devices: int) -> None:
    """Matrix products of thousands of rows: what the bound leaves out is a few percent."""
    cluster, template = cluster_of("h100-80gb", devices), template_of("wide")
    limits = bounds(template, BATCH, cluster, "fp32", "adamw")
    seen = 0
    for configuration in configurations(template, devices, 8, FREE):
        case = make_case("wide", "h100-80gb", configuration, 8)
        if configuration.stages == 1:
            problem = case.problems()[0].problem
            fastest = SOLVERS["dynamic_programming"](problem)
            assert fastest.evaluation is not None
            assert 0.9 < limits.step_seconds(configuration, devices, 8) / fastest.evaluation.time <= 1
            seen += 1
    assert seen >= 8


@pytest.mark.parametrize("model", ["wide", "chain", "residual", "residual-frozen-half"])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_free_search_is_as_good_as_the_best_pinned_one(model: str, profile: str) -> None:
    """Every configuration searched by itself: the free search finds the best of them, and prunes where work decides."""
    cluster, template = cluster_of(profile, 4), template_of(model)
    request = request_of(model, cluster, 8)
    found = search(request)
    times = []
    for point in configurations(template, 4, 8, FREE):
        pinned = Pinned(
            stages=point.stages, mesh=point.mesh, micro_batches=point.micro_batches, recompute=point.recompute
        )
        alone = outcome(replace(request, pinned=pinned))
        times.append(math.inf if alone is None else alone.plan.prediction.step_seconds)
    assert len(times) == found.configurations > 10
    assert math.isclose(found.plan.prediction.step_seconds, min(times), rel_tol=1e-9)
    assert len({round(time, 12) for time in times}) >= 4
    assert found.tried < found.configurations or model != "wide"
