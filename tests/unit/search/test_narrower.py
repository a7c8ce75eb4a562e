"""Around the best plan narrower searches look for faster ones."""

import itertools
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

import planner
from planner.errors import LimitError
from planner.limits import limited
from planner.plan.layout.roles import roles
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.engine import exchange_overlap, product_overlap
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.families import Shared, all_configurations, engine_of
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.engine.scheduling import halves_may_cover
from planner.strategy_search.finalists import plan_maker
from planner.strategy_search.finalists.finalists import Finalists
from planner.strategy_search.finalists.overlapping import Overlapping
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import Ranked, with_proof
from planner.strategy_search.finalists.room import Room
from planner.strategy_search.refinement import rings
from planner.strategy_search.refinement.around import bound_of_like
from planner.strategy_search.refinement.narrower import (
    EXPOSED,
    FEW,
    SMALL,
    WIDE,
    least_of_narrower,
    near,
    with_narrower,
)
from planner.strategy_search.refinement.simplicity import _Simplifier, with_simplicity
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.result import Progress, SearchResult
from planner.strategy_search.search import least_in_a_v, least_work, search
from tests.unit.search.cases import cluster_of, request_of

MODEL = "llama70b-4-layers"


def request(**pinned: object) -> SearchRequest:
    chosen = Pinned(**{"pipeline": 1, "micro_batches": 8, "interleave": 1, **pinned})  # type: ignore[arg-type]
    return request_of(MODEL, cluster_of("h100-80gb", 8), 8, pinned=chosen, precision="bf16")


def opened(result: SearchResult, gap: float) -> SearchResult:
    """The same of a search that has proved no more than that."""
    bound = result.plan.prediction.step_seconds * (1 - gap)
    return replace(result, plans=(with_proof(result.plans[0], bound, covered=True),), bound_seconds=bound)


@pytest.fixture(scope="module")
def slow() -> SearchResult:
    """A result with slow layouts, as if they had been chosen for an overlap that the plan does not get: norms are
    replicated."""
    return opened(search(request(tensor=8, sequence_parallel=False, tensor_overlap=1)), 0.019)


def told(_: Progress) -> None:
    pass


def phases(request: SearchRequest, result: SearchResult) -> list[str]:
    """What was tried, in order."""
    found: dict[str, None] = {}
    with_narrower(request, result, Shared(), lambda progress: found.update({progress.phase: None}), lambda: False)
    return list(found)


def test_a_faster_plan_with_one_purpose_for_every_axis_comes_in_the_place_of_the_best_one(slow: SearchResult) -> None:
    wide = opened(slow, 0.5)
    found = with_narrower(request(), wide, Shared(), told, lambda: False)
    assert found.plan.prediction.step_seconds < 0.99 * slow.plan.prediction.step_seconds
    assert found.bound_seconds == wide.bound_seconds
    assert found.gap < wide.gap
    assert found.statistics.evaluated > wide.statistics.evaluated


def test_gathers_are_tried_around_a_plan_whose_micro_batch_is_decided(
    slow: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of a micro-batch and the number of micro-batches decide the same."""
    tried = list[set[int]]()

    def listed(asked: SearchRequest, *_: object, among: Callable[[Configuration], bool], **__: object) -> SearchResult:
        tried.append({c.micro_batches for c in all_configurations(engine_of(asked)[0]) if among(c)})
        return slow

    monkeypatch.setattr("planner.strategy_search.refinement.narrower.search", listed)
    pinned = Pinned(pipeline=1, tensor=8, micro_batch=1)
    phases(replace(request(), pinned=pinned, update=Update(gathers="auto")), opened(slow, 0.5))
    assert tried == [{8}, {8}]


def test_nothing_is_looked_for_where_it_could_not_be_faster(slow: SearchResult) -> None:
    closed, wide = opened(slow, WIDE / 2), opened(slow, 0.5)
    assert with_narrower(request(), closed, Shared(), told, lambda: False) is closed
    assert with_narrower(replace(request(), top=3), wide, Shared(), told, lambda: False) is wide
    assert with_narrower(request(), wide, Shared(), told, lambda: True) == wide.cut_short("interrupt")


def test_a_limit_of_memory_that_the_last_search_reaches_is_told(slow: SearchResult) -> None:
    """There is room when it begins, and none in its first table."""
    clock, readings = itertools.count(), itertools.chain([0.0], itertools.repeat(2.0))
    wide = opened(slow, 0.5)
    with limited(memory=1.0, clock=lambda: float(next(clock)), resident=lambda: next(readings)):
        assert with_narrower(request(), wide, Shared(), told, lambda: False) == wide.cut_short("memory")


def test_a_plan_that_is_found_when_time_is_over_stays(slow: SearchResult) -> None:
    """Whatever would have been tried, weights gathered otherwise first."""
    asked, clock = replace(request(tensor_overlap=1), update=Update(gathers="auto")), itertools.count()
    with limited(seconds=0.5, clock=lambda: float(next(clock))):
        late = opened(slow, 0.5).cut_short("time")
        assert with_narrower(asked, opened(slow, 0.5), Shared(), told, lambda: False) == late


@pytest.mark.slow
def test_what_is_decided_is_not_tried(slow: SearchResult) -> None:
    asked = replace(request(), update=Update(gathers="auto"))
    assert phases(asked, slow) == []
    own = slow.plans[0].found.outcome.gathers
    ways = [f"trying weights gathered {way}" for way in ("ahead", "each", "block") if way != own]
    assert len(ways) == 2
    roles = "trying one purpose for every axis"
    assert phases(asked, opened(slow, 0.5)) == [*ways, roles]
    assert phases(replace(asked, update=Update(gathers="each")), opened(slow, 0.5)) == [roles]
    assert phases(replace(asked, pinned=replace(asked.pinned, zero=3)), opened(slow, 0.5)) == ways


def test_after_a_long_search_only_degrees_near_those_of_the_plan_are_looked_at(slow: SearchResult) -> None:
    """Tensor 8, or 4 with a context of two: not tensor 2, nor a longer context."""
    engine, _ = engine_of(request(replicas=1))
    looked_at = list(filter(near(roles(slow.plans[0].bound)), all_configurations(engine)))
    found = {tuple(zip(c.roles, c.mesh, strict=True)) for c in looked_at}
    assert found == {(("tensor", 8),), (("context", 2), ("tensor", 4))}
    few, wide = opened(slow, 0.5), opened(slow, 0.5)
    many = replace(wide, statistics=replace(wide.statistics, evaluated=FEW + 1))
    large = replace(wide, statistics=replace(wide.statistics, configurations=SMALL + 1))
    asked = replace(request(), update=Update(gathers="each"))
    every, *some = (with_narrower(asked, one, Shared(), told, lambda: False).statistics for one in (few, many, large))
    for before, after in zip((many, large), some, strict=True):
        assert after.configurations - before.statistics.configurations == len(looked_at)
    assert every.configurations - few.statistics.configurations > len(looked_at)


def test_what_narrower_searches_may_find_is_bounded_by_the_configurations_that_they_look_at(slow: SearchResult) -> None:
    best = slow.plans[0].configuration
    others = {replace(best, micro_batches=2 * best.micro_batches): 1.0, replace(best, mesh=(2, 4)): 3.0}
    known = replace(slow, bounds={best: 4.0, **others}, bound_seconds=0.5)
    assert least_of_narrower(known) == 0.5  # the whole space is small
    large = replace(known, statistics=replace(slow.statistics, configurations=SMALL + 1))
    assert least_of_narrower(large) == 3.0
    assert least_of_narrower(replace(large, bounds={})) == 0.5


def test_weights_come_in_the_way_that_makes_the_step_shorter() -> None:
    """The search may have ended with one by one, where layouts of one purpose are slower, too."""
    decided = request(data=8, zero=3, tensor_overlap=1, micro_batches=1)
    found = opened(search(replace(decided, update=Update(gathers="each"))), 0.5)
    better = with_narrower(replace(decided, update=Update(gathers="auto")), found, Shared(), told, lambda: False)
    assert better.plan.training.update.gathers == "ahead"
    assert better.plan.prediction.step_seconds < found.plan.prediction.step_seconds


def test_what_is_proved_with_free_axes_holds_where_each_has_one_purpose() -> None:
    """And rules out configurations before their tables are built."""
    free = search(request(tensor_overlap=1))
    (best, *_) = free.plans
    roles = request(tensor_overlap=1, replicas=1)
    engine, _ = engine_of(roles)
    known = {c: free.bounds.get(replace(c, roles=(), zigzag=False), 0.0) for c in all_configurations(engine)}
    two = {c: bound for c, bound in known.items() if len(c.mesh) <= 2}
    assert all(two.values())
    for c, bound in two.items():
        assert bound <= engine.evaluate(c).seconds * (1 + 1e-9), c
    without, found = (search(roles, known=best, bounds=bounds) for bounds in ({}, free.bounds))
    assert found.plan == without.plan
    assert found.statistics.evaluated < without.statistics.evaluated


def made(slow: SearchResult) -> tuple[PlanMaker, Contender]:
    """What makes plans of the request without its decisions, and the contender of its configuration."""
    asked = request()
    engine, prepared = engine_of(asked)
    configuration = replace(slow.plans[0].configuration, roles=(), decided=None)
    maker = PlanMaker(request=asked, engine=engine, prepared=prepared, bound=0.0, limits=(math.inf,), covered=True)
    return maker, engine.contender(configuration, engine.evaluate(configuration))


def test_equal_plans_are_priced_once(slow: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that leaves more memory free is often the same plan, with the same overlaps."""
    maker, contender = made(slow)
    overlapping, first = Overlapping(maker=maker), maker.unsettled(contender)
    overlapped = overlapping.overlapped(first)
    for module in (plan_maker, product_overlap, exchange_overlap):
        monkeypatch.setattr(module, "predict", lambda *_: pytest.fail("it is priced again"))
    again = maker.unsettled(replace(contender, room=1.0))
    assert again.found is not first.found
    assert again.bound is first.bound
    other = overlapping.overlapped(again)
    assert other is overlapping.overlapped(again)
    assert (other.found, other.bound) == (again.found, overlapped.bound)


def test_where_overlap_is_hoped_for_in_vain_layouts_that_wait_are_tried(slow: SearchResult) -> None:
    """The plan of a contender takes longer than its sum, as its norms are replicated; what waits is found for it."""
    maker, contender = made(slow)
    finalists, worse = Finalists(maker=maker, found=()), slow.plans[0]
    found = finalists._waiting_for_collectives(contender, worse)
    assert found is not None
    assert found.seconds < 0.99 * worse.seconds
    assert finalists._waiting_for_collectives(contender, found) is None
    close = replace(contender, outcome=replace(contender.outcome, seconds=worse.seconds))
    assert close.objective == worse.seconds
    assert finalists._waiting_for_collectives(close, worse) is None
    given = Finalists(maker=replace(maker, request=request(tensor_overlap=4)), found=())
    assert given._waiting_for_collectives(contender, worse) is None
    recursion = replace(maker.request, algorithm="recursive_programming")
    by_recursion = Finalists(maker=replace(maker, request=recursion), found=())
    assert by_recursion._waiting_for_collectives(contender, worse) is None


def test_what_has_no_room_for_overlaps_is_made_to_fit_where_it_wins_without(
    slow: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another plan is known already, and is slower than that."""
    maker, contender = made(slow)
    finalists, ranked, leaned = Finalists(maker=maker, found=()), slow.plans[0], list[float]()

    def lean(_: Room, found: Contender, overfull: Ranked, cutoff: float) -> Ranked:
        leaned.append(cutoff)
        return overfull

    monkeypatch.setattr(PlanMaker, "overfull_by", lambda *_: 1.0)
    monkeypatch.setattr(PlanMaker, "storable", lambda *_: False)
    monkeypatch.setattr(Overlapping, "missing", lambda *_: 1.0)
    monkeypatch.setattr(Finalists, "_may_win", lambda *_: True)
    monkeypatch.setattr(Room, "with_room", lambda _, found, overfull, cutoff: overfull)
    monkeypatch.setattr(Room, "lean", lean)
    for cutoff in (math.inf, 2 * ranked.seconds, ranked.seconds / 2):
        assert finalists._finished(contender, ranked, cutoff) is ranked
    assert leaned == [math.inf, 2 * ranked.seconds]


def test_where_time_is_over_before_layouts_that_wait_are_found_the_plan_is_kept(
    slow: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, contender = made(slow)
    finalists, plan = Finalists(maker=maker, found=(contender,)), slow.plans[0]
    finalists._known[id(contender)], finalists._before[id(plan)] = (contender, plan), plan

    def late(*_: object, **__: object) -> Outcome:
        raise LimitError("the time limit of 1 s is reached")

    monkeypatch.setattr(Engine, "evaluate", late)
    (found,) = finalists.plans(settle=False)
    assert found.seconds <= plan.seconds


def test_of_a_plan_in_a_v_that_comes_in_the_place_of_another_is_said_what_is_proved_of_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Pinned(pipeline=4, mesh=(1,), micro_batches=4)
    free = request_of("llama-12", cluster_of("h100-80gb", 4), 16, pinned=ranks, update=PLAIN)
    plain, lying = (search(replace(free, pinned=replace(ranks, schedule=name))) for name in ("1f1b", "zb_v"))
    monkeypatch.setattr("planner.strategy_search.refinement.narrower.search", lambda *_, **__: lying)
    asked, shared = replace(free, update=Update(gathers="auto")), Shared()
    found = with_narrower(asked, opened(plain, 0.05), shared, told, lambda: False)
    assert found.plan.schedule == "zb_v"
    assert found.bound_seconds == least_in_a_v(asked, shared) < 0.95 * plain.plan.prediction.step_seconds
    monkeypatch.setattr(rings, "search", lambda *_, **__: lying)
    monkeypatch.setattr(
        rings, "roles", lambda _: SimpleNamespace(context=2, replicated=1, pipeline=4, data=1, tensor=1)
    )
    monkeypatch.setattr(rings, "_left_open", lambda _: True)
    ringed = rings.with_rings_around_best(free, plain, shared, told, lambda: False)
    assert ringed.plan.schedule == "zb_v"
    assert ringed.bound_seconds == least_in_a_v(free, shared) < plain.bound_seconds
    assert ringed.plan.provenance.gap == pytest.approx(ringed.gap, rel=1e-2)
    known = replace(lying, bound_seconds=least_in_a_v(free, shared), usual_seconds=plain.bound_seconds)
    assert bound_of_like(lying.plans[0], known, free, shared) == known.bound_seconds
    assert bound_of_like(plain.plans[0], known, free, shared) == plain.bound_seconds
    monkeypatch.setattr(_Simplifier, "simplest", lambda _: (plain.plans[0], (), ("stages in a V",)))
    simple = with_simplicity(replace(free, simplicity=0.5), known, shared)
    assert simple.plan.schedule == "1f1b"
    assert simple.bound_seconds == plain.bound_seconds > known.bound_seconds
    assert simple.plan.provenance.gap == pytest.approx(simple.gap, rel=1e-2, abs=1e-9)


def test_slices_that_come_in_the_place_of_whole_sequences_are_bounded_by_their_work(slow: SearchResult) -> None:
    (best,), shared, asked = slow.plans, Shared(), request()
    sliced = replace(best, bound=replace(best.bound, plan=replace(best.plan, slices=2)))
    bound = bound_of_like(sliced, slow, asked, shared)
    assert bound == least_work(asked, shared) < bound_of_like(best, slow, asked, shared) == slow.bound_seconds


def test_nothing_is_proved_of_a_simpler_plan_on_three_axes(slow: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    (best,), known = slow.plans, replace(slow, bound_seconds=slow.plans[0].bounded)
    mesh = SimpleNamespace(sizes=(2, 2, 2))
    other = replace(best, bound=replace(best.bound, plan=replace(best.plan, mesh=mesh)))  # type: ignore[arg-type]
    for simple, status in ((best, "optimal"), (other, "feasible")):
        monkeypatch.setattr(_Simplifier, "simplest", lambda _, simple=simple: (simple, (), ("more",)))
        found = with_simplicity(replace(request(), simplicity=0.5), known, Shared())
        assert found.status == found.plan.provenance.status == status


def test_a_result_holds_nothing_of_its_search(slow: SearchResult) -> None:
    """Nor what it was told to call: it can be sent to another process."""
    again = pickle.loads(pickle.dumps(slow))
    assert again.plan == slow.plan
    assert again.bound_seconds == slow.bound_seconds


@pytest.mark.slow
def test_halves_of_micro_batches_take_turns_where_two_have_no_memory() -> None:
    """Experts behind slow links: the exchange of one half runs beside the work of the other."""
    model = "mixtral-8x7b+num_layers=4"
    asked = {"devices": 8, "global_batch": 32, "simplicity": 0.0}
    one = planner.search(model, "ascend-910b-64gb", pinned={"interleave": 1}, **asked).plan
    result = planner.search(model, "ascend-910b-64gb", **asked)
    turned = result.plan
    assert turned.training.interleave == 2
    assert turned.training.micro_batches == 2 * one.training.micro_batches
    assert turned.prediction.step_seconds < 0.99 * one.prediction.step_seconds
    assert result.bound_seconds <= result.plans[0].bounded
    cluster, peak = cluster_of("ascend-910b-64gb", 8), one.prediction.peak_bytes
    roomy = peak + 2 * dict(one.prediction.memory)["activations"]
    assert halves_may_cover(one, Pinned(), cluster, peak, EXPOSED)
    assert not halves_may_cover(one, Pinned(), cluster, roomy, EXPOSED)
    assert not halves_may_cover(one, Pinned(micro_batches=8), cluster, peak, EXPOSED)
    assert not halves_may_cover(one, Pinned(interleave=1), cluster, peak, EXPOSED)
    assert not halves_may_cover(one, Pinned(), cluster, peak, 0.1)
