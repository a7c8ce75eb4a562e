"""More memory, faster links and more devices never make the answer worse by more than the gap that it states."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from hardware_profiles import Cluster, Machine
from planner.errors import InfeasibleError
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from tests.unit.search.cases import cluster_of, request_of

MODELS = ("residual", "post-norm", "gpt-3", "chain")
ROUNDING = 1e-9


def _request(draw: random.Random) -> SearchRequest:
    """A small model on a few devices, perhaps behind slow links."""
    cluster = cluster_of(draw.choice(("cpu", "h100-80gb")), draw.choice((2, 4)))
    slower = _with_links(cluster, draw.choice((1.0, 0.1, 0.01)))
    return request_of(draw.choice(MODELS), slower, 8)


def _with_links(cluster: Machine, factor: float) -> Cluster:
    assert isinstance(cluster, Cluster)
    return replace(cluster, levels=tuple(replace(one, bandwidth=one.bandwidth * factor) for one in cluster.levels))


def _answer(request: SearchRequest) -> SearchResult | None:
    try:
        return search(request)
    except InfeasibleError:
        return None


def _more_memory(request: SearchRequest, draw: random.Random) -> tuple[SearchRequest, SearchRequest]:
    peak = search(request).plan.prediction.peak_bytes
    scarce = replace(request, memory_limit=peak * draw.choice((0.98, 0.9, 0.8)))
    return scarce, replace(request, memory_limit=peak * draw.choice((1.0, 1.2, 2.0)))


def _faster_links(request: SearchRequest, draw: random.Random) -> tuple[SearchRequest, SearchRequest]:
    return request, replace(request, cluster=_with_links(request.cluster, draw.choice((1.1, 2.0, 10.0))))


def _more_devices(request: SearchRequest, draw: random.Random) -> tuple[SearchRequest, SearchRequest]:
    return request, replace(request, cluster=request.cluster.with_devices(2 * request.cluster.devices))


MORE = (_more_memory, _faster_links, _more_devices)


@pytest.mark.cases(1, 4)
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "more"), [(seed, more) for seed in range(20) for more in MORE])
def test_more_is_never_worse(
    seed: int, more: Callable[[SearchRequest, random.Random], tuple[SearchRequest, SearchRequest]]
) -> None:
    """What is proved is about what a gap is of. A step that its schedule makes shorter than that is no promise."""
    draw = random.Random(seed)
    without, with_more = more(_request(draw), draw)
    less, found = _answer(without), _answer(with_more)
    if less is None:
        return
    assert found is not None, "more left nothing that fits"
    before, after = less.plans[0], found.plans[0]
    assert found.bound_seconds <= before.objective * (1 + ROUNDING), "what was found before is ruled out"
    assert after.bounded * (1 - found.objective_gap) <= before.bounded * (1 + ROUNDING)
    assert after.seconds <= max(before.seconds, before.objective) / (1 - found.gap) * (1 + ROUNDING)
