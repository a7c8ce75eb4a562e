"""Whoever decides by hand never gets a faster plan than whoever leaves it to the search, nor one that is faster than
the search has proved."""

import random
from dataclasses import replace
from typing import Any

import pytest

from hardware_profiles import device_type_of
from planner.errors import PlannerError
from planner.sharding.update import Update
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from tests.unit.search.cases import cluster_of, request_of

MODELS = (
    "llama-4", "gpt-4-tied", "mixture", "mixture-after-dense", "kinds-in-turn", "residual-shared", "post-norm", "chain",
)  # fmt: skip
CLOSE = 5e-4
"""By how much a plan of a search that nobody decides for may be slower: settling stops there."""
DECISIONS: dict[str, tuple[Any, ...]] = {
    "micro_batches": (1, 2, 4, 8),
    "pipeline": (1, 2, 4),
    "virtual_stages": (1, 2),
    "schedule": ("1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v", "dualpipe_v"),
    "interleave": (1, 2),
    "slices": (1, 2),
    "recompute": ("none", "selective", "full"),
    "never_kept": (("attention",),),
    "zero": (0, 1, 2, 3),
    "replicas": (1, 2),
    "data": (1, 2, 4),
    "tensor": (1, 2, 4),
    "context": (1, 2),
    "expert": (1, 2, 4),
    "sequence_parallel": (False, True),
    "micro_batch": (1, 2),
    "even": (True,),
}
OVERLAPS: dict[str, tuple[Any, ...]] = {"tensor_overlap": (1, 2, 4), "expert_overlap": (False, True)}
"""Left to the search on devices that are no CPUs."""


def random_request(draw: random.Random) -> SearchRequest:
    """A small model on a few devices, perhaps behind slow links, perhaps with little memory."""
    cluster = cluster_of(draw.choice(("cpu", "h100-80gb", "ascend-910b-64gb")), draw.choice((2, 4, 8)))
    if draw.random() < 0.3:
        slower = draw.choice((10, 100))
        levels = (replace(level, bandwidth=level.bandwidth / slower) for level in cluster.levels)
        cluster = replace(cluster, levels=tuple(levels))
    request = request_of(draw.choice(MODELS), cluster, draw.choice((8, 16, 32)))
    if draw.random() < 0.5:
        return request
    peak = search(request).plan.prediction.peak_bytes
    return replace(request, memory_limit=peak * draw.choice((0.98, 0.9, 0.8)))


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_free_search_is_no_slower_than_what_is_decided(seed: int) -> None:
    draw = random.Random(seed)
    request = random_request(draw)
    try:
        free = search(request)
    except PlannerError:  # less memory than anything needs
        free = None
    words = DECISIONS if device_type_of(request.cluster) == "cpu" else {**DECISIONS, **OVERLAPS}
    for _ in range(3):
        decided = {name: draw.choice(values) for name, values in words.items() if draw.random() < 0.2}
        gathers = draw.choice(("auto", "each", "block"))
        try:
            asked = replace(request, pinned=Pinned(**decided), update=Update(gathers=gathers))
            found = search(asked).plans[0]
        except PlannerError:  # what is decided cannot be had together
            continue
        assert free is not None, "decisions made room for a plan"
        assert free.plans[0].seconds <= found.seconds * (1 + CLOSE), (decided, gathers)
        if not found.plan.schedule_kind.v_shaped or free.plan.schedule_kind.v_shaped:  # bounds of others are about rows
            assert free.bound_seconds <= found.bounded * (1 + 1e-9), (decided, gathers)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"interleave": 0}, pytest.param({"slices": 0}, marks=pytest.mark.thorough)], ids=str)
def test_what_is_left_to_the_search_in_words_is_no_worse(asked: dict[str, Any]) -> None:
    """With so little memory that the best plan is a pipeline, where both have something to decide."""
    request = request_of("gpt-3", cluster_of("cpu", 4), 8)
    request = replace(request, memory_limit=0.9999 * search(request).plan.prediction.peak_bytes)
    free = search(request).plans[0].seconds
    assert search(replace(request, pinned=Pinned(**asked))).plans[0].seconds <= free * (1 + 1e-9)
