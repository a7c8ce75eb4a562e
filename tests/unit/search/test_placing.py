"""Which tables the search moves to the host: compared with all subsets, and what is ruled out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_profiles import load_profile
from planner.errors import InfeasibleError
from planner.graph.placed import place_of, tables_of
from planner.graph.trace import trace
from planner.models.dlrm import DLRM, DLRMConfig
from planner.models.zoo import build_model
from planner.plan.outline import model_reference
from planner.sharding.update import Update
from planner.strategy_search.objectives import front, plan_for
from planner.strategy_search.refinement.placing import movable, with_placing
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import SearchResult, Statistics
from tests.long_lists import first
from tests.refusals import refused
from tests.unit.search.cases import with_quick_host

BATCH = 64


def request_of(rows: Sequence[int], devices: int = 2, **decided: object) -> SearchRequest:
    config = DLRMConfig(
        table_rows=tuple(rows), table_width=64, dense_features=13, bottom_sizes=(128, 64), top_sizes=(128,)
    )
    with torch.device("meta"):
        module = DLRM(config)
        ids = torch.zeros(BATCH, len(rows), dtype=torch.int64).unbind(1)
        clicks = torch.zeros(BATCH, dtype=torch.int64)
    graph = trace(module, (torch.zeros(BATCH, 13, device="meta"), list(ids), clicks))
    reference = model_reference(graph, name="small", sequence_length=None, batch=BATCH)
    quick = Pinned(pipeline=1, micro_batches=1)
    asked = {"pinned": quick, "precision": "fp32", "global_batch": 1024 * devices, "placing": "auto", **decided}
    cluster = with_quick_host(load_profile("h100-80gb").with_devices(devices))  # latencies are not what decides
    return SearchRequest(graph=graph, batch=BATCH, model=reference, cluster=cluster, **asked)


def found(request: SearchRequest) -> SearchResult:
    return plan_for(request, lambda _: None, lambda: False)


def exhaustively(request: SearchRequest) -> float:
    """The least objective over all subsets of the tables that can be on the host."""
    tables, best = movable(request), math.inf
    for subset in chain.from_iterable(combinations(tables, count) for count in range(len(tables) + 1)):
        update = replace(request.update, placed=tuple((name, "host") for name in subset))
        try:
            best = min(best, found(replace(request, placing="given", update=update)).plans[0].objective)
        except InfeasibleError:
            continue
    return best


GIB = 2**30
CASES = {
    "one large table": ((10_000_000, 1000, 20), 2, {}),
    "small tables": ((3000, 400, 50), 2, {}),
    "tables that compete": ((2_000_000, 900_000, 300_000), 4, {}),
    "little memory": ((6_000_000, 5_000_000, 4_000_000), 2, {"memory_limit": 3.0 * GIB}),
    "four tables": ((8_000_000, 500_000, 40_000, 1000), 2, {}),
    "one device": ((4_000_000, 300_000, 10_000), 1, {}),
    "sgd": ((3_000_000, 2_000_000, 1000), 2, {"optimizer": "sgd"}),
}  # fmt: skip


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("case", first(2, list(CASES)))
def test_no_subset_of_the_tables_is_better(case: str) -> None:
    rows, devices, decided = CASES[case]
    request = request_of(rows, devices, **decided)
    assert found(request).plans[0].objective <= exhaustively(request) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_tables_move_alone_where_the_model_does_not_fit() -> None:
    """By default, and then no more than a plan with them fits: as `auto` does it; a model that fits is left alone."""
    model = build_model("dlrm-terabyte", dtype="float32", device="meta")
    graph = trace(model.module, model.args)
    request = SearchRequest(
        graph=graph, batch=model.batch, precision="fp32", global_batch=64,
        model=model_reference(graph, name="dlrm-terabyte", sequence_length=None, batch=model.batch),
        cluster=load_profile("h100-80gb").with_devices(2),
    )  # fmt: skip
    with refused(InfeasibleError, "dlrm-terabyte", "2 x h100-80gb"):
        found(request)
    moved = found(replace(request, placing="fit"))
    assert moved.placements > 1
    assert all(place == "host" for _, place in moved.plan.training.update.placed)
    assert place_of("tables.19.weight", moved.plan.training.update.placed) == "host"  # the largest
    assert not moved.plan.training.update.local_parameters
    eight = replace(request, placing="fit", cluster=load_profile("h100-80gb").with_devices(8))
    assert found(eight).plan.training.update.placed == ()


def test_what_is_given_stays_and_the_rest_is_chosen() -> None:
    placed = (("tables.1.*", "servers"),)
    request = request_of((10_000_000, 5_000_000, 20), update=Update(placed=placed))
    assert movable(request) == ("tables.0.weight", "tables.2.weight")
    assert found(request).plan.training.update.placed[:1] == placed


@pytest.mark.parametrize(
    "decided",
    [{"optimizer": "lamb"}, {"update": Update(clip_norm=1.0)}],
    ids=["lamb", "clipped"],
)
def test_nothing_moves_where_that_is_ruled_out(decided: dict[str, object]) -> None:
    assert movable(request_of((10_000_000, 1000), **decided)) == ()


def test_nothing_moves_where_nothing_is_known_of_hosts_or_they_have_no_room() -> None:
    request = request_of((10_000_000, 1000))
    assert movable(replace(request, cluster=replace(request.cluster, host=None))) == ()
    assert movable(request_of((400_000_000, 1000), 1)) == ()  # 286 GiB with two moments, and there are 256


@pytest.mark.thorough
def test_a_front_has_the_tables_of_its_fastest_plan() -> None:
    request = request_of((6_000_000, 1000), pinned=Pinned(mesh=(2,), pipeline=1, micro_batches=1))
    points = front(request)
    fastest = min(points, key=lambda point: point.plan.prediction.step_seconds).plan.training.update.placed
    assert fastest
    assert {point.plan.training.update.placed for point in points} == {fastest}


def pretended(seconds: Callable[[int], float]) -> Callable[[SearchRequest], SearchResult]:
    """A search that takes so long for every number of tables on the host, infinitely where nothing fits."""
    statistics = Statistics(configurations=1, evaluated=1, solved=1, seconds=0.0)

    def solve(request: SearchRequest) -> SearchResult:
        count = sum(place_of(name, request.update.placed) is not None for name in tables_of(request.graph))
        if seconds(count) == math.inf:
            raise InfeasibleError("it does not fit")
        return SearchResult(plans=(), bound_seconds=seconds(count), statistics=statistics)

    return solve


@cache
def tables() -> SearchRequest:
    return request_of(range(3, 30))


@given(best=st.integers(0, 27), needed=st.integers(0, 27), slopes=st.tuples(st.integers(1, 9), st.integers(1, 9)))
@settings(max_examples=40)
def test_the_valley_is_found_wherever_it_is(best: int, needed: int, slopes: tuple[int, int]) -> None:
    """Also where the first so many must leave for a plan to fit."""

    def seconds(count: int) -> float:
        return math.inf if count < needed else 100.0 + abs(count - best) * slopes[count > best]

    result = with_placing(tables(), pretended(seconds), lambda result: result.bound_seconds)
    assert result.bound_seconds == min(map(seconds, range(28)))
    assert result.placements <= 2 + 2 * math.ceil(math.log2(28))


def test_a_search_that_is_stopped_takes_the_best_so_far() -> None:
    asked = []
    result = with_placing(
        tables(), pretended(float), lambda result: asked.append(1) or result.bound_seconds, lambda: bool(asked)
    )
    assert (result.bound_seconds, len(asked)) == (0.0, 1)
    with pytest.raises(InfeasibleError, match="it does not fit"):
        with_placing(tables(), pretended(lambda _: math.inf), lambda result: result.bound_seconds)
