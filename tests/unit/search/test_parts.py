"""Weights that hold several matrices are whole or apart, whichever is better."""

import math

import pytest

import planner
from planner.errors import InfeasibleError
from planner.graph.rewriting.fused_weights import with_fused_weights_apart
from planner.graph.trace import trace
from planner.plan.binding.apart import graph_of
from planner.plan.binding.bind import bind
from planner.strategy_search.job import given_job, machine_from
from planner.strategy_search.parts import best_of_parts, cuts_parts
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult
from tests.distributed.brought import fused

MODULE, ARGS, _ = fused()
GRAPH = trace(MODULE, ARGS)
APART = with_fused_weights_apart(GRAPH)


def found(**pinned: int) -> SearchResult:
    return planner.search(MODULE, "cpu", args=ARGS, devices=2, global_batch=4, pinned=pinned)


@pytest.fixture(scope="module")
def plans() -> dict[str, SearchResult]:
    return {degree: found(**{degree: 2}) for degree in ("tensor", "data")}


def test_tensor_parallelism_takes_weights_apart(plans: dict[str, SearchResult]) -> None:
    plan = plans["tensor"].plan
    assert cuts_parts(plan, APART)
    assert plan.model.fingerprint == APART.fingerprint()
    assert bind(plan, GRAPH, 2).whole.cuts == APART.cuts  # whoever traced the model knows which graph is meant


def test_data_parallelism_leaves_them_whole(plans: dict[str, SearchResult]) -> None:
    plan = plans["data"].plan
    assert plan.model.fingerprint == GRAPH.fingerprint()
    assert graph_of(plan, GRAPH) is GRAPH


@pytest.mark.parametrize("fails", ["apart", "whole", "both"])
def test_a_search_that_finds_nothing_leaves_the_other(fails: str, plans: dict[str, SearchResult]) -> None:
    request = given_job(MODULE, machine_from("cpu", devices=2), args=ARGS, global_batch=4).request()

    def solve(one: SearchRequest) -> SearchResult:
        kind = "whole" if one.graph is request.graph else "apart"
        if fails in (kind, "both"):
            raise InfeasibleError(kind)
        return plans["data"]

    if fails == "both":
        with pytest.raises(InfeasibleError, match="whole"):
            best_of_parts(request, solve, lambda _: math.inf)
    else:
        assert best_of_parts(request, solve, lambda _: 1.0) is plans["data"]
