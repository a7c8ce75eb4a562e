"""Around the best plan, plans are looked for that wait for collectives of tensor parallelism."""

from dataclasses import replace

import pytest

from planner.strategy_search.engine.proofs import with_proof
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import Progress, SearchResult
from planner.strategy_search.search import search
from planner.strategy_search.waited_for import OPEN, with_waiting
from tests.unit.search.cases import cluster_of, request_of

MODEL = "llama70b-4-layers"


def request(**pinned: object) -> SearchRequest:
    chosen = Pinned(**{"pipeline": 1, "micro_batches": 8, "interleave": 1, **pinned})  # type: ignore[arg-type]
    return request_of(MODEL, cluster_of("h100-80gb", 8), 8, pinned=chosen, precision="bf16")


@pytest.fixture(scope="module")
def slow() -> SearchResult:
    """What a search may have ended with whose layouts were chosen for overlaps that there are not: here norms are
    whole, and half of the step is open."""
    found = search(request(tensor=8, sequence_parallel=False, tensor_overlap=1))
    bound = found.plan.prediction.step_seconds / 2
    return replace(found, plans=(with_proof(found.plans[0], bound, covered=True),), bound_seconds=bound)


def told(_: Progress) -> None:
    pass


def test_a_faster_plan_that_waits_comes_in_the_place_of_the_best_one(slow: SearchResult) -> None:
    found = with_waiting(request(), slow, told, lambda: False)
    assert found.plan.prediction.step_seconds < 0.99 * slow.plan.prediction.step_seconds
    assert found.plan.training.tensor_overlap == ()
    best, tried = found.plans[0].configuration, slow.plans[0].configuration
    assert (best.mesh, best.pipeline, best.micro_batches) == (tried.mesh, tried.pipeline, tried.micro_batches)
    assert found.bound_seconds == slow.bound_seconds
    assert found.gap == pytest.approx(1 - found.bound_seconds / found.plan.prediction.step_seconds, abs=1e-3)
    assert found.statistics.evaluated > slow.statistics.evaluated


def test_nothing_is_looked_for_where_it_could_not_be_faster(slow: SearchResult) -> None:
    near = slow.plan.prediction.step_seconds * (1 - OPEN / 2)
    closed = replace(slow, plans=(with_proof(slow.plans[0], near, covered=True),), bound_seconds=near)
    assert with_waiting(request(), closed, told, lambda: False) is closed
    assert with_waiting(request(tensor_overlap=1), slow, told, lambda: False) is slow  # it was all about such plans
    assert with_waiting(replace(request(), top=3), slow, told, lambda: False) is slow
    assert with_waiting(request(), slow, told, lambda: True) is slow


def test_the_best_plan_stays_where_plans_that_wait_are_slower() -> None:
    free = search(request(tensor=8, sequence_parallel=True))
    bound = free.plan.prediction.step_seconds / 2
    opened = replace(free, plans=(with_proof(free.plans[0], bound, covered=True),), bound_seconds=bound)
    assert free.plan.training.tensor_overlap
    assert with_waiting(request(tensor=8, sequence_parallel=True), opened, told, lambda: False).plan == opened.plan
