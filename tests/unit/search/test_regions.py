"""Bounds of many configurations at once: none is more than what is found in a configuration, with all memory there is,
and a search that has them finds what one without them does."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from hardware_profiles import load_profile, load_software, of_one_kind
from planner.engines.spaces import SPACES
from planner.errors import InfeasibleError
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.outline import model_reference
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.families import all_configurations, engine_of, families_of, family_of
from planner.strategy_search.engine.family import least_share
from planner.strategy_search.engine.regions import Regions, _run
from planner.strategy_search.exploration.families import Families
from planner.strategy_search.exploration.frontier import Frontier
from planner.strategy_search.exploration.lower_bounds import LowerBounds
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.within import best_plans, within
from tests.property.test_engine_spaces import request_for

Members = list[tuple[Configuration, ...]]


@cache
def mixtral() -> SearchRequest:
    """A toy model with experts on sixteen devices, of which eight are in a host, for Megatron-LM."""
    space = SPACES["megatron"]
    cluster = load_profile("h100-80gb").with_devices(16).with_software(load_software(space.software))
    built = build_model("mixtral-tiny", dtype="bfloat16")
    graph = trace(built.module, built.args, built.kwargs)
    reference = model_reference(graph, name="mixtral-tiny", sequence_length=built.sequence_length, batch=built.batch)
    return SearchRequest(graph=graph, batch=built.batch, model=reference, cluster=cluster, global_batch=64, space=space)


def quick(request: SearchRequest) -> SearchRequest:
    """Hosts launch in no time, which would be most of what a toy takes."""
    cluster = of_one_kind(request.cluster, "an engine")
    return replace(request, cluster=replace(cluster, device=replace(cluster.device, host_latency=0.0)))


def regions_of(request: SearchRequest) -> tuple[Engine, Members, Regions]:
    engine, _ = engine_of(within(SPACES["megatron"], request))
    families = families_of(all_configurations(engine))
    return engine, families, Regions(engine=engine, families=families)


def bounds_of(regions: Regions, members: tuple[Configuration, ...]) -> Sequence[float]:
    """What is proved of one configuration, better and better."""
    found = [0.0]
    while (better := regions.better(members, found[-1])) is not None:
        found.append(better)
    return found


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("experts", [False, True])
def test_nothing_that_is_found_takes_less(experts: bool) -> None:
    engine, families, regions = regions_of(quick(mixtral() if experts else request_for("megatron")))
    best, steps = 0.0, 0
    for members in families[:: len(families) // 10]:
        one = members[len(members) // 2]
        bounds = bounds_of(regions, (one,))
        try:
            outcome = engine.evaluate(one)
        except NothingAgreesError:
            continue
        assert bounds[-1] <= outcome.seconds * (1 + 1e-9)
        best, steps = max(best, bounds[-1] / outcome.seconds), max(steps, len(bounds) - 1)
    assert best > 0.1, "they say something, of a toy, whose kernels do not shrink with what they work on"
    assert steps > 1


@pytest.mark.slow
@pytest.mark.thorough
def test_unequal_virtual_stages_of_families_that_are_not_opened_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by their work alone."""
    monkeypatch.setattr("planner.strategy_search.exploration.families.MANY", 1)
    asked = quick(request_for("megatron", "llama-tiny+num_layers=5"))
    request = replace(asked, pinned=Pinned(pipeline=2, context=1, zero=1, recompute="none"))
    engine, _ = engine_of(within(SPACES["megatron"], request))
    families, found = Families(engine), SimpleNamespace(engine=engine, request=engine.request)
    families.list_all()
    assert families.regions is not None
    frontier, better = Frontier(families), 0
    for members in [members for members in families.all if any(map(families.is_apart, members))]:
        bound, usual = families.bound_of_all(members), families.usual(members)
        while (more := families.regions.better(usual, bound)) is not None:
            bound = more
        frontier.push(bound, members)
        c = next(c for c in members if families.is_apart(c))
        own = LowerBounds(frontier, found, math.inf).of_each()[c]  # type: ignore[arg-type]
        assert least_share(c) * bound <= own <= engine.evaluate(c).seconds * (1 + 1e-9)
        better += own > families.bound_before(c)
    assert better > 1


def with_room_for(request: SearchRequest, room: float) -> SearchRequest:
    """As much memory as leaves tensors so many bytes."""
    known = {limit: engine_of(replace(request, memory_limit=limit))[0].capacities[0] for limit in (20e9, 40e9)}
    each = (known[40e9] - known[20e9]) / 20e9
    return replace(request, memory_limit=20e9 + (room - known[20e9]) / each)


@pytest.mark.slow
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("engine_name", ["megatron", "torch"])
@pytest.mark.parametrize("experts", [False, True])
def test_blocks_that_are_computed_again_for_lack_of_memory_count(engine_name: str, experts: bool) -> None:
    space = SPACES[engine_name]
    request = replace(quick(mixtral() if experts else request_for("megatron")), space=space)
    families = families_of(all_configurations(engine_of(within(space, request))[0]))
    assert min(configuration.pipeline for members in families for configuration in members) == 1
    tighter, impossible = 0, 0
    for room in (30e6, 20e6, 14e6):
        engine, _ = engine_of(within(space, with_room_for(within(space, request), room)))
        regions = Regions(engine=engine, families=families)
        for members in families[3 :: len(families) // 40]:
            one = members[len(members) // 2]
            timed, bound = regions._moving(one, _run(one)).step_seconds([one]), regions._by_memory((one,))
            assert bound >= timed
            try:
                outcome = engine.evaluate(one)
            except NothingAgreesError:
                continue
            assert bound <= outcome.seconds * (1 + 1e-9)
            tighter += timed < bound < math.inf
            impossible += bound == math.inf
    assert tighter > 2, "some blocks are computed again"
    assert impossible > 2, "where even that is too much, nothing is priced"


@pytest.mark.slow
@pytest.mark.thorough
def test_what_misses_is_said_where_bounds_rule_out_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.strategy_search.exploration.families.MANY", 1)
    request = within(SPACES["megatron"], quick(request_for("megatron")))
    with pytest.raises(InfeasibleError, match=r"needs? .*[KMG]iB"):
        best_plans(replace(with_room_for(request, 3e6), alternatives=(), space=request.space))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sequence_is_cut_over_more_devices_than_there_are_samples() -> None:
    """One sample on eight devices, which cut its sequence: where they cut samples, as many more of these are priced."""
    built = build_model("llama8b", dtype="bfloat16", sequence_length=8192)
    graph = trace(built.module, built.args, built.kwargs)
    reference = model_reference(graph, name="llama8b", sequence_length=8192, batch=built.batch)
    pinned = Pinned(pipeline=1, tensor=1, zero=3, recompute="none", context_by="ring")
    request = replace(request_for("megatron"), graph=graph, model=reference, global_batch=1, pinned=pinned)
    engine, families, regions = regions_of(quick(request))
    for members in families:
        bounds = bounds_of(regions, members)
        assert len(bounds) > 1
        assert bounds[-1] <= engine.evaluate(members[0]).seconds


@pytest.mark.slow
@pytest.mark.thorough
def test_a_plan_holds_no_less_than_its_parameters() -> None:
    engine, families, regions = regions_of(mixtral())
    for members in families[:: len(families) // 12]:
        family = family_of(engine, members)
        if family is not None:
            least = min(map(family.least_bytes, members))
            assert 0 < regions.least_bytes(members[0]) <= least * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_search_with_them_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    request = quick(request_for("megatron"))
    opened = list[int]()
    monkeypatch.setattr(Frontier, "open_family", counted(opened))
    found = []
    for many in (1, math.inf):
        monkeypatch.setattr("planner.strategy_search.exploration.families.MANY", many)
        found.append(best_plans(replace(request, top=2)))
        opened.append(-1)
    with_them, without = found
    assert [one.plan for one in with_them.plans] == [one.plan for one in without.plans]
    assert with_them.bound_seconds <= with_them.plans[0].objective
    at = opened.index(-1)
    assert at < len(opened) - at - 2, "fewer families are opened"


def counted(opened: list[int]) -> object:
    original = Frontier.open_family

    def opens(self: Frontier, members: tuple[Configuration, ...], floor: float, cutoff: float) -> None:
        opened.append(len(members))
        original(self, members, floor, cutoff)

    return opens
