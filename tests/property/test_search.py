"""Laws of the search: bounds bound, and cutting off by them never loses the best plan."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import usable_memory
from planner.errors import InfeasibleError, RequestError
from planner.plan.binding.bind import bind
from planner.plan.compare.verify import verify
from planner.plan.prediction.predict import predict, stage_costs
from planner.strategy_search.engine.contenders import NEAR
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.request.bounds import bounds
from planner.strategy_search.request.configurations import configurations
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE, Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from tests.unit.search.cases import (
    BATCH,
    cluster_of,
    make_case,
    plan_of,
    random_ranks,
    random_state,
    request_of,
    small_memory,
    template_of,
    traced,
)

SMALL = (
    "aside",
    "chain",
    "chain-keeps-nothing",
    "perceptron",
    "post-norm",
    "residual",
    "residual-first",
    "residual-frozen-half",
    "residual-frozen-rows",
    "single-2",
)
LARGER = (*SMALL, "gpt-4-tied", "llama-4", "llama-1")
PROFILES = ("cpu", "h100-80gb", "ascend-910b-64gb")
PINNED = (
    FREE,
    FREE,
    FREE,
    Pinned(virtual_stages=0),
    Pinned(recompute="none"),
    Pinned(recompute="selective"),
    Pinned(recompute="full"),
    Pinned(pipeline=1),
    Pinned(pipeline=2),
    Pinned(data=2),
    Pinned(tensor=2, zero=1),
    Pinned(zero=3),
    Pinned(sequence_parallel=False, context=1),
)


@st.composite
def requests(draw: st.DrawFn) -> SearchRequest:
    """A small request; half of them on machines whose memory is short."""
    model, profile = draw(st.sampled_from(SMALL)), draw(st.sampled_from(PROFILES))
    cluster = cluster_of(profile, draw(st.sampled_from([1, 2, 3, 4, 6, 8])))
    global_batch = draw(st.sampled_from([2, 4, 6, 8, 12]))
    if draw(st.booleans()):
        cluster = small_memory(cluster, draw(st.floats(4.0, 6.0).map(lambda power: 10**power)))
    return request_of(
        model,
        cluster,
        global_batch,
        precision=draw(st.sampled_from(["fp32", "bf16"])),
        optimizer=draw(st.sampled_from(["adamw", "sgd"])),
        pinned=draw(st.sampled_from(PINNED)),
        top=draw(st.sampled_from([1, 1, 3])),
    )


def outcome(request: SearchRequest) -> SearchResult | type[Exception]:
    """What is found; or why nothing is."""
    try:
        return search(request)
    except (InfeasibleError, RequestError) as error:
        return type(error)


@pytest.mark.slow
@pytest.mark.thorough
@settings(max_examples=8)
@given(request=requests())
def test_pruning_never_loses_the_best_plan(request: SearchRequest) -> None:
    """Equal where memory is plenty and where both are proved. Else the prices that were tried elsewhere may lead to
    another plan, but neither is below what the other has proved."""
    pruned, full = outcome(request), outcome(replace(request, prune=False))
    if not isinstance(pruned, SearchResult) or not isinstance(full, SearchResult):
        assert pruned == full
        return
    assert full.statistics.evaluated <= full.statistics.configurations == pruned.statistics.configurations
    assert pruned.statistics.evaluated <= full.statistics.evaluated
    roomy = request.cluster.device.reserved > 0
    seconds = [[ranked.seconds for ranked in result.plans] for result in (pruned, full)]
    objectives = [min(ranked.objective for ranked in result.plans) for result in (pruned, full)]
    if roomy:
        assert seconds[0] == pytest.approx(seconds[1], rel=NEAR)
    if pruned.status == full.status == "optimal":
        assert objectives[0] == pytest.approx(objectives[1], rel=1e-9)
    for result in (pruned, full):
        assert result.bound_seconds <= min(objectives) * (1 + 1e-9)
        assert (result.status == "optimal") == (result.bound_seconds >= result.plans[0].objective * (1 - 1e-9))
        for ranked in result.plans:
            assert ranked.plan.prediction.peak_bytes <= request.cluster.device.memory * (1 + 1e-9)
            verdict = verify(ranked.plan, request.graph, request.batch, request.cluster)
            assert verdict.as_stated, verdict.remarks
            assert verdict.fits


@pytest.mark.slow
@pytest.mark.exhaustive
@settings(max_examples=10)
@given(request=requests(), more=st.floats(1.0, 4.0))
def test_more_memory_never_proves_a_slower_plan(request: SearchRequest, more: float) -> None:
    device = request.cluster.device
    roomier = replace(request.cluster, device=replace(device, memory=device.memory * more))
    first, second = outcome(request), outcome(replace(request, cluster=roomier))
    if isinstance(first, SearchResult):
        assert isinstance(second, SearchResult)
        assert second.bound_seconds <= first.plans[0].objective * (1 + 1e-9)
        if second.status == "optimal":
            assert second.plans[0].objective <= first.plans[0].objective * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_nothing_beats_the_bounds_of_the_work(data: st.DataObject, seed: int) -> None:
    """Neither the fastest nor the leanest nor any random choice of a configuration is below its bounds."""
    model, profile = data.draw(st.sampled_from(LARGER)), data.draw(st.sampled_from(PROFILES))
    devices, global_batch = data.draw(st.sampled_from([1, 2, 3, 4, 8])), 24
    template, cluster = template_of(model), cluster_of(profile, devices)
    limits = bounds(template, BATCH, cluster, "fp32", "adamw")
    configuration = data.draw(st.sampled_from(list(configurations(template, devices, global_batch, FREE))))
    ways = data.draw(st.sampled_from([("none", "selective", "full"), ("full",), ("none",)]))
    case = make_case(model, profile, configuration, global_batch, recomputation=ways)  # type: ignore[arg-type]
    least_seconds = limits.step_seconds(configuration, devices, global_batch, ways == ("full",))
    least_bytes = limits.device_bytes(devices)
    assert least_seconds > 0
    assert least_bytes > 0
    fastest = Evaluation(case.chain, case.setting).run()
    assert fastest.seconds >= least_seconds * (1 - 1e-9)
    leanest = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run()
    assert leanest.least >= least_bytes * (1 - 1e-9)
    # and the prediction on a choice that nobody made better
    draw = random.Random(seed)
    bound = bind(plan_of(case, random_ranks(case, draw, random_state(case, draw))), traced(model), BATCH)
    prediction = predict(bound, cluster)
    assert prediction.objective_seconds >= least_seconds * (1 - 1e-9)
    fullest = max(math.fsum(cost.memory.values()) for cost in stage_costs(bound, cluster))
    assert fullest >= least_bytes * (1 - 1e-9)
    assert prediction.peak_bytes >= least_bytes
    assert usable_memory(cluster.device) < cluster.device.memory


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_the_time_bound_is_close_where_work_decides(devices: int) -> None:
    """Matrix products of thousands of rows: what the bound leaves out is a few percent."""
    cluster, template = cluster_of("h100-80gb", devices), template_of("wide")
    limits = bounds(template, BATCH, cluster, "fp32", "adamw")
    seen = 0
    for configuration in configurations(template, devices, 8, FREE):
        if configuration.pipeline == 1:
            case = make_case("wide", "h100-80gb", configuration, 8)
            fastest = Evaluation(case.chain, replace(case.setting, capacity=math.inf)).run().seconds
            assert 0.9 < limits.step_seconds(configuration, devices, 8, False) / fastest <= 1
            seen += 1
    assert seen >= 4


@pytest.mark.cases(0, 3)
@pytest.mark.slow
@pytest.mark.parametrize("model", ["wide", "chain", "residual", "residual-frozen-half"])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_free_search_is_as_good_as_the_best_pinned_one(model: str, profile: str) -> None:
    """Every configuration searched by itself: the free search finds the best of them, and prunes where work decides."""
    cluster, template = cluster_of(profile, 4), template_of(model)
    request = request_of(model, cluster, 8)
    found = search(request)
    times = []
    for point in configurations(template, 4, 8, FREE):
        pinned = Pinned(pipeline=point.pipeline, mesh=point.mesh, micro_batches=point.micro_batches)
        alone = outcome(replace(request, pinned=pinned))
        found_alone = alone.plans[0] if isinstance(alone, SearchResult) else None
        times.append((found_alone.objective, found_alone.seconds) if found_alone else (math.inf, math.inf))
    assert len(times) == found.statistics.configurations > 10
    objective, seconds = min(times)
    assert found.plans[0].seconds <= seconds * (1 + 1e-9)
    assert found.bound_seconds <= objective * (1 + 1e-9)
    assert len({round(time, 12) for time, _ in times}) >= 4
    assert found.statistics.evaluated < found.statistics.configurations
