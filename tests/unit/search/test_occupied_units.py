"""Collectives that occupy a part of the device while they overlap with computation."""

import math
from dataclasses import replace

import pytest

from hardware_profiles import Cluster
from planner.plan.prediction.predict import predict
from planner.sharding.update import Update
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from tests.unit.search.cases import cluster_of, request_of, with_quick_host
from tests.unit.search.test_block_gathers import check_bound

UNITS = 33.0
SHARE = UNITS / 132  # of an H100
UNDER = {
    "gathering under computation": Pinned(data=4, zero=3, micro_batches=2, recompute="none"),
    "reduction under computation": Pinned(data=4, zero=0, micro_batches=1),
}


def occupied(cluster: Cluster, units: float = UNITS) -> Cluster:
    return replace(cluster, device=replace(cluster.device, communication_units=units))


@pytest.mark.parametrize("under", UNDER)
def test_its_share_of_an_overlapped_collective_is_exposed(under: str) -> None:
    """Of seconds that overlap the occupied share is exposed; terms still come to the step."""
    cluster = with_quick_host(occupied(cluster_of("h100-80gb", 4), 0))
    update = Update(gathers="ahead", buckets=2**12)
    request = request_of("llama-4", cluster, 64, pinned=UNDER[under], update=update, precision="bf16")
    bound = search(request).bound
    free, less = predict(bound, cluster), predict(bound, occupied(cluster))
    overlapped = -dict(free.time)[under]
    assert overlapped > 0
    assert less.step_seconds > free.step_seconds
    assert math.fsum(seconds for _, seconds in less.time) == pytest.approx(less.step_seconds)
    assert -dict(less.time)[under] == pytest.approx((1 - SHARE) * overlapped)


@pytest.mark.cases(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize("slower", [1, 30, 1e3])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_bounds_know_of_it(pipeline: int, slower: float) -> None:
    """No plan that is drawn takes less than the bound, whether its collectives are shorter than its work or longer."""
    pinned = Pinned(pipeline=pipeline, micro_batches=4, schedule="1f1b")
    check_bound(occupied(cluster_of("h100-80gb", 4)), slower, pinned, Update(gathers="ahead"))


@pytest.mark.slow
def test_layouts_under_products_know_of_it() -> None:
    request = request_of(
        "llama70b-4-layers",
        occupied(cluster_of("h100-80gb", 8)),
        8,
        pinned=Pinned(pipeline=1, context=1, tensor=8, micro_batches=1, interleave=1),
        precision="bf16",
    )
    found = search(request)
    assert found.plans[0].seconds >= found.bound_seconds * (1 - 1e-9)
    assert found.gap < 0.08
    free = search(replace(request, cluster=occupied(cluster_of("h100-80gb", 8), 0)))
    assert found.plans[0].seconds > free.plans[0].seconds
    less, under = predict(free.bound, request.cluster), "tensor parallelism under computation"
    assert 0 < -dict(less.time)[under] < -dict(free.plan.prediction.time)[under]


def test_more_units_never_make_a_step_shorter() -> None:
    cluster = cluster_of("h100-80gb", 4)
    request = request_of("llama-4", cluster, 64, pinned=Pinned(data=4, zero=3, micro_batches=2), precision="bf16")
    bound = search(replace(request, update=Update(gathers="ahead"))).bound
    steps = [predict(bound, occupied(cluster, units)).step_seconds for units in (0, 10, 20, 66, 131)]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]
