"""What a plan can be best at beside time."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from hardware_profiles import Cluster
from planner.errors import InfeasibleError, LimitError
from planner.nearest import divisors
from planner.sharding.update import PLAIN
from planner.strategy_search import objectives
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.objectives import FRONT_STEP, PRECISION, front, least_cost, least_memory, plan_for
from planner.strategy_search.request.request import Objective, SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import Progress, SearchResult
from planner.strategy_search.search import search
from planner.strategy_search.tables.table_builder import TableBuilder
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, request_of


def nothing(_: Progress) -> None:
    """Nobody listens."""


def never() -> bool:
    return False


def bare(cluster: Cluster) -> Cluster:
    """Nothing set aside, so that bytes of small models count."""
    return replace(cluster, device=replace(cluster.device, reserved=0.0, allocator_slack=0.0))


def request(model: str, devices: int) -> SearchRequest:
    return request_of(model, bare(cluster_of("cpu", devices)), 8)


@pytest.mark.cases(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "devices"), [("perceptron", 4), ("post-norm", 2), ("chain", 3)])
def test_the_least_memory_is_the_least(model: str, devices: int) -> None:
    asked = request(model, devices)
    found = least_memory(asked, nothing, never).plan.prediction
    fastest = search(asked).plan.prediction
    assert found.peak_bytes <= fastest.peak_bytes
    assert found.step_seconds >= fastest.step_seconds * (1 - 1e-9)
    with pytest.raises(InfeasibleError):  # by what plans state, which is more than `find_fitting` counts
        search(replace(asked, memory_limit=found.peak_bytes * (1 - 4 * PRECISION)))
    # within that memory nothing is faster
    again = search(replace(asked, memory_limit=found.peak_bytes))
    assert again.bound_seconds <= found.objective_seconds * (1 + 1e-9)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-4", "perceptron", "residual"])
def test_no_number_of_devices_is_cheaper(model: str) -> None:
    asked = request(model, 4)
    found = least_cost(asked, nothing, never).plan
    cost = found.prediction.step_seconds * found.cluster.devices
    for devices in divisors(4):
        other = search(replace(asked, cluster=asked.cluster.with_devices(devices))).plan
        assert cost <= other.prediction.step_seconds * devices * (1 + 1e-9)


def test_numbers_of_devices_that_fill_no_whole_nodes_are_left_out() -> None:
    """Of 12 devices in nodes of 4, 6 are one node and a half."""
    pinned = Pinned(pipeline=1, micro_batches=1)
    asked = request_of("perceptron", cluster_of("gh200-96gb", 12), 12, pinned=pinned, update=PLAIN)
    assert least_cost(asked, nothing, never).plan.cluster.devices in (12, 4, 3, 2, 1)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_number_of_devices_that_is_too_small_is_left_out() -> None:
    asked = request("post-norm", 4)
    alone = least_memory(replace(asked, cluster=asked.cluster.with_devices(1)), nothing, never)
    scarce = replace(asked, memory_limit=0.7 * alone.plan.prediction.peak_bytes)
    with pytest.raises(InfeasibleError):
        search(replace(scarce, cluster=asked.cluster.with_devices(1)))
    assert least_cost(scarce, nothing, never).plan.cluster.devices > 1
    with refused(InfeasibleError, "post-norm", "4 x cpu"):
        least_cost(replace(asked, memory_limit=100.0), nothing, never)


@pytest.mark.cases(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "devices"), [("perceptron", 2), ("residual-first", 2)])
def test_the_front_falls_in_memory_and_rises_in_time(model: str, devices: int) -> None:
    points = [found.plan.prediction for found in front(request(model, devices))]
    assert len(points) > 1
    assert points[0].step_seconds == search(request(model, devices)).plan.prediction.step_seconds
    for one, other in pairwise(points):
        assert other.peak_bytes <= FRONT_STEP * one.peak_bytes * (1 + 1e-9)
        assert other.step_seconds >= one.step_seconds * (1 - 1e-9)
    least = least_memory(request(model, devices), nothing, never).plan.prediction.peak_bytes
    assert points[-1].peak_bytes <= least / FRONT_STEP * (1 + 4 * PRECISION)


def test_a_front_of_cost_has_cheaper_and_slower_plans() -> None:
    pinned = Pinned(pipeline=1, tensor=1, micro_batches=1)
    asked = replace(request_of("gpt-3", cluster_of("cpu", 4), 4096, update=PLAIN, pinned=pinned), objective="cost")
    points = front(asked)
    assert len(points) > 1
    for one, other in pairwise(points):
        here, there = one.plan.prediction.step_seconds, other.plan.prediction.step_seconds
        assert here < there
        assert here * one.plan.cluster.devices > there * other.plan.cluster.devices
        assert one.plan.training.global_batch == other.plan.training.global_batch
    assert points[-1].plan.prediction == least_cost(asked, nothing, never).plan.prediction
    with refused(InfeasibleError, "gpt-3", "4 x cpu"):
        front(replace(asked, memory_limit=100.0))


@pytest.mark.thorough
def test_a_front_can_be_stopped() -> None:
    searches: list[Progress] = []

    def note(progress: Progress) -> None:
        if progress.done == 1 and progress.phase.startswith("searching"):
            searches.append(progress)

    assert 1 <= len(front(request("llama-4", 2), note, lambda: len(searches) >= 2)) <= 2
    assert len(searches) == 2
    assert front(request("llama-4", 2), nothing, lambda: True) == ()


def test_a_front_of_nothing_says_why() -> None:
    with refused(InfeasibleError, "llama-4", "2 x cpu"):
        front(replace(request("llama-4", 2), memory_limit=100.0, update=PLAIN))


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("objective", ["time", "memory", "cost"])
def test_the_objective_decides(objective: Objective) -> None:
    asked = replace(request("perceptron", 4), objective=objective)
    wanted = {"time": search(asked), "memory": least_memory(asked, nothing, never)}
    wanted["cost"] = least_cost(asked, nothing, never)
    found = plan_for(asked, nothing, never).plans[0]
    assert math.isclose(found.seconds, wanted[objective].plans[0].seconds, rel_tol=1e-12)


def test_every_objective_tries_rings_where_nothing_fits_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request_of("llama-1", cluster_of("h100-80gb", 2), 1)
    found, in_time = search(replace(asked, pinned=Pinned(mesh=(2,)))), True

    def by_rings(one: SearchRequest, *_: object, **__: object) -> SearchResult:
        if one.pinned.context_by == "auto" and not in_time:
            raise LimitError("no time is left")
        if one.pinned.context_by != "auto" or one.memory_limit is not None:
            raise InfeasibleError("nothing fits")
        return found

    monkeypatch.setattr(objectives, "best_plans", by_rings)
    monkeypatch.setattr(objectives, "anything_fits", lambda *_: False)
    for solve in (least_memory, least_cost):
        assert solve(asked, nothing, never).plans == found.plans
    for objective in ("memory", "cost"):
        (point,) = front(replace(asked, objective=objective))
        assert point.plans == found.plans
    in_time = False
    with refused(LimitError, "no time is left"):
        least_cost(asked, nothing, never)


def test_searches_that_differ_in_memory_share_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, shared, built = replace(request("chain", 2), update=PLAIN), Shared(), list[object]()
    build = TableBuilder.build
    monkeypatch.setattr(TableBuilder, "build", lambda *given: (built.append(given), build(*given))[1])
    first = search(asked, shared=shared)
    leaner = replace(asked, memory_limit=0.9 * first.plan.prediction.peak_bytes)
    built.clear()
    again = search(leaner, shared=shared)
    more = len(built)
    alone = search(leaner)
    assert more < len(built) - more
    assert again.plan == alone.plan != first.plan
    assert again.bound_seconds == alone.bound_seconds
