"""A limit of time holds for all that a request asks for, and leaves a plan whatever is searched within it.

Time is counted in calls of functions, so that every run sees the same.
"""

import sys
from dataclasses import replace
from functools import cache
from types import FrameType

import pytest

from planner.limits import limited
from planner.plan.compare.verify import verify
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import SearchResult
from tests.unit.search.cases import cluster_of, request_of

LATE = 1.2
"""Of the limit, what a request may take."""

LIMIT = 20.0  # seconds


class Calls:
    """A clock of calls of functions, of which so many take a second."""

    def __init__(self, pace: float) -> None:
        self.calls, self.pace = 0, pace

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"

    def clock(self) -> float:
        return self.calls / self.pace


def run(request: SearchRequest, seconds: float | None, pace: float) -> tuple[SearchResult, float]:
    """The best plan of a request, and the seconds that it took."""
    calls = Calls(pace)
    with limited(seconds, clock=calls.clock):
        sys.setprofile(calls)
        try:
            found = plan_for(request, lambda _: None, lambda: False)
        finally:
            sys.setprofile(None)
    return found, calls.clock()


def asked(what: str) -> SearchRequest:
    request = request_of("llama-1", cluster_of("h100-80gb", 4), 16, pinned=Pinned(pipeline=1))
    if what == "gathers":
        return replace(request, update=replace(request.update, gathers="auto"))
    return replace(request, objective=what)  # type: ignore[arg-type]


@cache
def halved(what: str) -> tuple[SearchResult, SearchResult, float]:
    """What is found without a limit, and within one of half the time, and how long that takes of `LIMIT`."""
    best, whole = run(asked(what), None, 1.0)
    return best, *run(asked(what), LIMIT, 0.5 * whole / LIMIT)


@pytest.mark.parametrize(
    "what",
    [
        "time",
        pytest.param("cost", marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param("memory", marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param("gathers", marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_a_request_ends_within_its_time_with_a_plan(what: str) -> None:
    request = asked(what)
    best, found, took = halved(what)
    assert took <= LATE * LIMIT
    assert found.statistics.stopped
    assert not best.statistics.stopped
    assert 0 <= found.gap < 1
    used = request.cluster.with_devices(found.plan.cluster.devices)
    assert verify(found.plan, request.graph, request.batch, used).as_stated


def test_what_a_short_limit_leaves_is_a_conventional_plan() -> None:
    """A few times as slow a machine would not come to anything else."""
    best, found, _ = halved("time")
    assert found.statistics.stopped
    assert found.bound_seconds <= best.plans[0].seconds <= found.plans[0].seconds <= 1.1 * best.plans[0].seconds
