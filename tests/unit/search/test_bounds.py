"""Bounds are bounds: no plan that fits is faster, and what is found fits and costs what it says.

Plans are all there are where that is possible (one device a stage, so that only the division and the ways to run
blocks are open), else drawn at random and by changing what the search found.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from planner.plan.binding.bind import bind
from planner.plan.prediction.predict import stage_costs
from planner.strategy_search.decomposition.crossings import crossing_seconds
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.least_memory import impossible
from planner.strategy_search.decomposition.pieces import NEITHER, Column, Piece
from planner.strategy_search.decomposition.priced import State
from planner.strategy_search.engine import evaluation
from planner.strategy_search.engine import family as family_module
from planner.strategy_search.engine.composition import Composed, Composition, Tried
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.evaluation import NO_HINT, Evaluation
from planner.strategy_search.engine.next_price import NextPrice
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.request.bounds import bounds
from planner.strategy_search.request.configurations import configurations
from planner.strategy_search.request.offload import ANYTHING
from planner.strategy_search.request.space import Configuration, Pinned
from tests.unit.search.cases import (
    BATCH,
    MODELS,
    Case,
    cluster_of,
    column_of,
    columns_of,
    keepable,
    make_case,
    peak_of,
    plan_of,
    random_ranks,
    random_state,
    rank_peak_of,
    request_of,
    seconds_of,
    template_of,
    total,
    traced,
)

ALL = 1 + 1e-9
SHARES = (1.0, 0.6, 0.3, 0.1, 0.01)


def ways(piece: Piece) -> list[Column]:
    """Everything that can be chosen for a piece on one device: what is kept; nothing or all where that is much."""
    assert set(piece.sizes) == {1}
    free = keepable(piece)
    sizes = range(len(free) + 1) if len(free) < 3 else (0, len(free))
    subsets = itertools.chain.from_iterable(itertools.combinations(free, size) for size in sizes)
    return [column_of(piece, dict.fromkeys(piece.keys, 0), kept) for kept in subsets]


def divisions(case: Case) -> Iterator[tuple[int, ...]]:
    setting, blocks = case.setting, case.inner_blocks
    if setting.chunks > 1:
        yield (blocks // setting.ranks // setting.chunks,) * setting.ranks
        return
    for counts in itertools.product(range(blocks + 1), repeat=setting.ranks):
        held = list(counts)
        held[0] += case.chain.blocks_in_head
        held[-1] += case.chain.blocks_in_tail
        if sum(counts) == blocks and min(held) > 0:
            yield counts


def all_plans(case: Case) -> Iterator[tuple[RankFilling, ...]]:
    """Every plan of one device a stage, in which the chunks of a rank are run alike, or as they like."""
    chain, last, chunks = case.chain, case.setting.ranks - 1, case.setting.chunks
    free, alike = (chunks, 1) if case.setting.unlike(chain) else (1, chunks)
    inner = [column for piece in chain.inner for column in ways(piece)]
    heads = [column for piece in chain.head for column in ways(piece)]
    tails = [column for piece in chain.tail for column in ways(piece)]
    for counts in divisions(case):
        rows_of = itertools.product(*(itertools.product(inner, repeat=count * free) for count in counts))
        for head, tail, rows in itertools.product(heads, tails, rows_of):
            yield tuple(
                RankFilling(
                    head=head if rank == 0 else None,
                    inner=row * alike,
                    tail=tail if rank == last else None,
                    peak=0.0,
                    beside=0.0,
                )
                for rank, row in enumerate(rows)
            )


@pytest.mark.cases(4, 4)
@pytest.mark.parametrize("micro_batches", [4, 12])
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("model", ["chain-from-input", "chain", "aside", "residual"])
def test_no_plan_at_all_beats_the_bounds(model: str, ranks: int, chunks: int, micro_batches: int) -> None:
    configuration = Configuration(pipeline=ranks, virtual_stages=chunks, mesh=(), micro_batches=micro_batches)
    case = make_case(model, "cpu", configuration, 24)
    if chunks > 1 and (case.chain.blocks_in_head or case.chain.blocks_in_tail):
        pytest.skip("virtual stages hold equal blocks")
    state: State = (0,) * len(case.chain.shape)
    plans = list(all_plans(case))
    plans = plans if len(plans) < 1500 else random.Random(model).sample(plans, 1500)
    priced = [(seconds_of(case, state, ranks), peak_of(case, state, ranks)) for ranks in plans]
    leanest, fastest = min(peak for _, peak in priced), min(priced)[1]
    for share in SHARES:
        setting = replace(case.setting, capacity=leanest + share * (fastest - leanest))
        best = min(seconds for seconds, peak in priced if peak <= setting.capacity * ALL)
        outcome = Evaluation(case.chain, setting).run()
        assert outcome.bound <= best * ALL
        assert not impossible(case.chain, setting)[state]
        assert outcome.ranks
        assert outcome.bound <= outcome.seconds * ALL
        assert peak_of(case, state, outcome.ranks) <= setting.capacity * ALL
        assert outcome.seconds <= best * (1.1 if len(plans) < 1500 else 1.5)
        multipliers = Multipliers(case.chain, setting.weight)
        for price in (0.0, 1e-12, 1e-10, 1e-9, 1e-8, 1e-6, math.inf):
            for flights in sorted({setting.flights(rank) for rank in range(setting.ranks)}):
                for at_tail in (False, True) if case.chain.tail and 0 < price < math.inf else (False,):
                    multipliers.solve(price, flights, at_tail=at_tail)
                    assert float(multipliers.bounds(setting)[state]) <= best * ALL, (price, flights, at_tail)


def test_bounds_know_how_many_blocks_a_rank_has_memory_for() -> None:
    """So the largest interior is averaged over no more of them, and where all ranks have too little nothing fits."""
    case = make_case("llama-4", "cpu", Configuration(pipeline=2, mesh=(2,), micro_batches=4), 8)
    chain, weight = case.chain, case.setting.weight
    assert case.setting.holds(chain) > case.setting.most(chain) == 3
    scarce = replace(case.setting, capacity=2.5 * chain.least_fixed)
    assert scarce.holds(chain) == scarce.most(chain) == 2
    assert replace(scarce, chunks=2).holds(chain) == 2
    assert math.isinf(replace(scarce, capacity=math.inf).holds(chain))
    found = []
    for most in (2, 3):
        multipliers = Multipliers(chain, weight, most=most, holds=most)
        multipliers.solve_all([(0.0, 0.0, NEITHER), (1e-6, case.setting.flights(1), NEITHER)])
        found.append(multipliers.bounds(scarce))
    assert (found[0] > 1.05 * found[1]).all()
    scarce = replace(scarce, capacity=1.5 * chain.least_fixed)
    multipliers = Multipliers(chain, weight, most=scarce.most(chain), holds=scarce.holds(chain))
    multipliers.begin(scarce)
    assert np.isinf(multipliers.bounds(scarce)).all()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["llama-4", "kinds-in-turn"])
def test_bounds_of_some_states_are_those_of_all(model: str, ranks: int) -> None:
    case = make_case(model, "cpu", Configuration(pipeline=ranks, mesh=(2,), micro_batches=4), 8)
    setting = replace(case.setting, capacity=case.setting.capacity / 1e4)
    multipliers = Multipliers(case.chain, setting.weight)
    multipliers.begin(setting)
    if ranks == 1:
        multipliers.solve(0.0, 0.0)
    multipliers.solve(1e-9, setting.flights(0))
    whole = multipliers.bounds(setting)
    assert whole.size > 2
    for state in np.ndindex(whole.shape):
        (found,) = multipliers.bounds(setting, tuple(np.array([number]) for number in state))
        assert found == whole[state]


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("model", ["chain", "llama-4"])
def test_where_nothing_fits_nothing_is_bounded(model: str, ranks: int, chunks: int) -> None:
    """A little below the least into which anything was found to fit, that is proved."""
    configuration = Configuration(pipeline=ranks, virtual_stages=chunks, mesh=(), micro_batches=4)
    case = make_case(model, "cpu", configuration, 24)
    capacity = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least
    while Evaluation(case.chain, replace(case.setting, capacity=capacity)).run().ranks:
        capacity *= 0.97
    scarce = Evaluation(case.chain, replace(case.setting, capacity=0.95 * capacity)).run()
    assert not scarce.ranks
    assert scarce.bound == math.inf


def test_where_nothing_known_fits_a_price_is_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no more would be proved than where memory is free, as long as it is not proved that nothing fits."""
    case = make_case("llama-4", "cpu", Configuration(pipeline=2, mesh=(2,), micro_batches=4), 8)
    capacity = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least
    while Evaluation(case.chain, replace(case.setting, capacity=capacity)).run().ranks:
        capacity *= 0.97
    scarce = Evaluation(case.chain, replace(case.setting, capacity=capacity))
    monkeypatch.setattr(evaluation, "impossible", lambda chain, _: np.zeros(chain.shape, dtype=np.bool_))
    assert not scarce.run().ranks
    assert any(0 < priced.price < math.inf for priced in scarce.multipliers[0].priced)


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_a_configuration_is_not_given_up_before_prices_have_looked_for_leaner_choices(share: float) -> None:
    """With offload the leanest choices by an infinite price need much more than the leanest plan."""
    configuration = Configuration(pipeline=1, mesh=(2,), micro_batches=2)
    case = make_case("llama-4-words", "h100-80gb", configuration, 8, "bf16", offload=ANYTHING)
    leanest = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least
    found = Evaluation(case.chain, replace(case.setting, capacity=share * leanest))
    outcome = found.run()
    assert outcome.ranks
    assert outcome.bound <= outcome.seconds


def test_states_in_which_a_mixture_is_better_do_not_count_as_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = Configuration(pipeline=2, mesh=(2, 2), micro_batches=8)
    case = make_case("gpt-4-tied", "cpu", configuration, 16, recomputation=("none",))
    peak = max(rank.peak for rank in Evaluation(case.chain, case.setting).run().ranks)
    tight = replace(case.setting, capacity=0.588 * peak)
    seconds, mixed = Evaluation(case.chain, tight).run().seconds, list[float]()

    def quicker(_: Composition, tried: Tried) -> Composed | None:
        if tried.found is None:
            return None
        mixed.append(seconds * (1 - 1e-3 * (1 + len(mixed))))
        return (mixed[-1], *tried.found[1:])

    monkeypatch.setattr(Composition, "mixed", quicker)
    monkeypatch.setattr(evaluation, "_STATES", 2)
    assert Evaluation(case.chain, tight).run().seconds == mixed[-1]
    assert len(mixed) > 4


def test_states_that_may_be_much_better_are_looked_at_however_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = Configuration(pipeline=1, mesh=(2, 2), micro_batches=4)
    case = make_case("llama-6-tied", "cpu", configuration, 16, recomputation=("none", "full"))
    peak = max(rank.peak for rank in Evaluation(case.chain, case.setting).run().ranks)
    tight = replace(case.setting, capacity=0.459 * peak)
    found = list[float]()
    for states in (1, 1000):
        monkeypatch.setattr(evaluation, "_STATES", states)
        outcome = Evaluation(case.chain, tight).run()
        assert outcome.bound < outcome.seconds * 0.95
        found.append(outcome.seconds)
    assert found[0] == found[1]


@pytest.mark.parametrize("cutoff", [math.inf, 1e6])
def test_where_nothing_is_found_yet_states_are_given_up_for_a_cutoff_alone(
    monkeypatch: pytest.MonkeyPatch, cutoff: float
) -> None:
    """Chunks of a rank run unlike each other, and the first states have nothing that fits."""
    configuration = Configuration(pipeline=2, virtual_stages=2, mesh=(2,), micro_batches=4)
    case, compose = make_case("llama-4", "cpu", configuration, 16), Composition.compose
    assert case.setting.unlike(case.chain)
    given_up = list[State]()

    def late(own: Composition, state: State) -> Tried:
        tried = compose(own, state)
        if len(given_up) < 3:
            given_up.append(state)
            return replace(tried, found=None, division=None)
        return tried

    monkeypatch.setattr(Composition, "compose", late)
    monkeypatch.setattr(NextPrice, "next", lambda *_: None)
    monkeypatch.setattr(evaluation, "_STATES_UNLIKE", 1)
    assert bool(Evaluation(case.chain, case.setting, cutoff=cutoff).run().ranks) == (cutoff == math.inf)


def changed(case: Case, ranks: tuple[RankFilling, ...], draw: random.Random) -> tuple[RankFilling, ...]:
    """A few other choices, alike for equal blocks."""

    def other(column: Column | None, pieces: tuple[Piece, ...]) -> Column | None:
        if column is None:
            return None
        piece = next(p for p in pieces if p.recompute == column.recompute and p.kind == column.kind)
        candidates, kept, free = dict(column.candidates), set(column.kept), keepable(piece)
        for key in draw.sample(piece.keys, min(draw.randint(0, 2), len(piece.keys))):
            if key not in case.chain.boundary:
                candidates[key] = draw.randrange(piece.sizes[piece.keys.index(key)])
        kept ^= set(draw.sample(free, min(draw.randint(0, 1), len(free))))
        return column_of(piece, candidates, kept)

    found = []
    for held in ranks:
        twins = {id(column): other(column, case.chain.inner) for column in held.inner}
        inner = tuple(twin for column in held.inner if (twin := twins[id(column)]) is not None)
        head, tail = other(held.head, case.chain.head), other(held.tail, case.chain.tail)
        found.append(replace(held, head=head, inner=inner, tail=tail))
    return tuple(found)


def some_cases(model: str, draw: random.Random) -> Iterator[Case]:
    for profile, devices in (("cpu", 2), ("h100-80gb", 8), ("ascend-910b-64gb", 3)):
        space = list(configurations(template_of(model), devices, 12, Pinned(virtual_stages=0)))
        space = [configuration for configuration in space if not configuration.uneven]  # these count with averages
        for configuration in draw.sample(space, min(1, len(space))):
            case = make_case(model, profile, configuration, 12)
            if case.setting.chunks == 1 or not (case.chain.blocks_in_head or case.chain.blocks_in_tail):
                yield case


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if model not in ("wide", "llama-6-tied")])
def test_what_is_found_fits_and_nothing_that_fits_beats_its_bound(model: str) -> None:
    draw = random.Random(model)
    for case in some_cases(model, draw):
        free = Evaluation(case.chain, case.setting).run()
        assert free.ranks
        peak = max(rank.peak for rank in free.ranks)
        least = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least
        for share in (1.0, 0.5, 0.1):
            setting = replace(case.setting, capacity=least + share * (peak - least))
            outcome = Evaluation(case.chain, setting).run()
            assert outcome.ranks
            assert outcome.bound <= outcome.seconds * ALL
            assert math.isclose(outcome.seconds, seconds_of(case, outcome.state, outcome.ranks), rel_tol=1e-9)
            costs = stage_costs(bind(plan_of(case, outcome.ranks), traced(model), BATCH), case.cluster)
            for held, cost in zip(outcome.ranks, costs, strict=True):
                assert math.fsum(cost.memory.values()) <= held.peak * ALL
                assert held.peak <= setting.capacity * ALL
            plans = [(outcome.state, changed(case, outcome.ranks, draw)) for _ in range(8)]
            states = [random_state(case, draw) for _ in range(3)]
            plans += [(state, random_ranks(case, draw, state)) for state in states]
            for state, ranks in plans:
                if peak_of(case, state, ranks) <= setting.capacity:
                    assert not impossible(case.chain, setting)[state]
                    assert outcome.bound <= seconds_of(case, state, ranks) * ALL


def test_what_follows_the_blocks_is_in_flight_once() -> None:
    """With virtual stages the last rank has more in flight on average than its last chunk, which has the logits."""
    configuration = Configuration(pipeline=2, virtual_stages=2, mesh=(), micro_batches=4)
    case, draw = make_case("llama-4-words", "cpu", configuration, 96), random.Random(0)
    state: State = (0,) * len(case.chain.shape)
    for _ in range(8):
        ranks = random_ranks(case, draw, state)
        setting = replace(case.setting, capacity=peak_of(case, state, ranks))
        assert Evaluation(case.chain, setting).run().bound <= seconds_of(case, state, ranks) * ALL


@pytest.mark.parametrize(("model", "ranks"), [("chain-from-input", 2), ("residual-constant", 2), ("residual-8", 4)])
def test_virtual_stages_are_filled_as_they_are_at_their_fullest(model: str, ranks: int) -> None:
    """What stands before and behind the blocks, and what chunks receive, is not held equally often at every moment at
    which all chunks together hold most."""
    configuration = Configuration(pipeline=ranks, virtual_stages=2, mesh=(), micro_batches=8)
    case = make_case(model, "h100-80gb", configuration, 8)
    free = Evaluation(case.chain, case.setting).run()
    least = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least
    for share in (1.0, 0.5, 0.1):
        most = max(rank.peak for rank in free.ranks)
        setting = replace(case.setting, capacity=least + share * (most - least))
        outcome = Evaluation(case.chain, setting).run()
        assert outcome.ranks
        costs = stage_costs(bind(plan_of(case, outcome.ranks), traced(model), BATCH), case.cluster)
        held = [math.fsum(cost.memory.values()) for cost in costs]
        assert held == pytest.approx([rank.peak for rank in outcome.ranks], rel=1e-9)


def engine_of(model: str, profile: str, devices: int, memory: float | None) -> Engine:
    request = request_of(model, cluster_of(profile, devices), 12, memory_limit=memory)
    template = template_of(model)
    limits = (bounds(template, BATCH, cluster_of(profile, devices), request.precision, request.optimizer),)
    return Engine(request=request, template=template, limits=limits)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("profile", [pytest.param("cpu", marks=pytest.mark.thorough), "h100-80gb"])
@pytest.mark.parametrize("model", [model for model in MODELS if model not in ("wide", "llama-6-tied", "llama-1")])
def test_the_largest_micro_batch_bounds_its_parts(model: str, profile: str) -> None:
    """Members of a family, with memory that is plenty or scarce, are never faster than their family says."""
    draw = random.Random(model + profile)
    devices = draw.choice((2, 4, 6))
    roomy = engine_of(model, profile, devices, None)
    space = list(configurations(roomy.template, devices, 12, Pinned(virtual_stages=0)))
    chosen = draw.choice(space).family
    members = [c for c in space if c.family == chosen and c.virtual_stages == 1]
    device = roomy.request.cluster.device
    peaks = [max(rank.peak for rank in roomy.evaluate(member).ranks) for member in members]
    for usable in (None, float(np.mean(peaks)), 0.6 * min(peaks)):
        memory = None if usable is None else usable * (1 + device.allocator_slack) + device.reserved
        engine = engine_of(model, profile, devices, memory)
        family = engine.family(min(members, key=lambda c: c.micro_batches))
        for member in members:
            outcome = engine.evaluate(member)
            assert engine.bound(member) <= outcome.seconds * ALL
            assert family.step_seconds([member])[0] <= outcome.seconds * ALL, member
            for price in (0.0, outcome.price, 1e-9, 1e-7):
                assert family.priced_seconds(member, (price, NEITHER)) <= outcome.seconds * ALL, (member, price)
            assert not outcome.ranks or family.least_bytes(member) <= max(rank.peak for rank in outcome.ranks) * ALL


@pytest.mark.slow
def test_prices_asked_for_with_one_stage_on_each_rank_bound_virtual_stages() -> None:
    engine = engine_of("llama-4", "h100-80gb", 2, None)
    space = configurations(engine.template, 2, 12, Pinned(pipeline=2, virtual_stages=0))
    members = {(c.virtual_stages, c.micro_batches): c for c in space}
    family = engine.family(members[1, 2])
    for m in (2, 6):
        assert family.priced_seconds(members[2, m], NO_HINT, cutoff=1e-12) > 0  # nothing is known: it is asked for
    family = engine.family(members[1, 2])
    for m in (2, 6):
        for price in (0.0, 1e-7):
            family.priced_seconds(members[1, m], (price, NEITHER))
        proved = family.priced_seconds(members[2, m], NO_HINT, cutoff=1e-12)  # which whatever is known reaches
        assert 0 < proved <= engine.evaluate(members[2, m]).seconds * ALL


@pytest.mark.slow
def test_bounds_of_virtual_stages_count_what_crosses_between_all_of_them() -> None:
    engine = engine_of("llama-4", "cpu", 2, None)
    space = configurations(engine.template, 2, 12, Pinned(pipeline=2, virtual_stages=0))
    members = {(c.virtual_stages, c.micro_batches): c for c in space}
    family = engine.family(members[1, 2])
    asked = [members[v, m] for m in (2, 6) for v in (1, 2)]
    found = dict(zip(asked, family.step_seconds(asked), strict=True))
    for m in (2, 6):
        plain, several = members[1, m], members[2, m]
        assert family_module.least_share(several) * found[plain] * 1.01 < found[several]
        assert found[several] <= engine.evaluate(several).seconds * ALL
        assert found[several] == pytest.approx(family.step_seconds([several])[0], rel=0.05)  # asked for by itself


def test_what_is_forgotten_of_many_states_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of members of a family in turn no more is kept than what was asked last, and the same is proved."""
    engine = engine_of("llama-4", "h100-80gb", 2, None)
    space = configurations(engine.template, 2, 12, Pinned(pipeline=2, virtual_stages=0))
    members = sorted(space, key=lambda c: (c.virtual_stages, c.micro_batches))

    def proved() -> tuple[list[float], int]:
        known = engine_of("llama-4", "h100-80gb", 2, None).family(members[0])
        found = [known.priced_seconds(one, (1e-7, NEITHER)) for one in (*members, *members)]
        return found, sum(len(bounds._duals) for _, bounds in known._parts)

    kept, number = proved()
    monkeypatch.setattr(family_module, "_MANY_STATES", 1)
    monkeypatch.setattr(family_module, "_RECENT", 1)
    found, fewer = proved()
    assert found == kept
    assert fewer < number


def test_memory_has_a_price_where_a_plan_would_be_faster_with_more_of_it() -> None:
    """Also where every price that the search asks for was solved for another state before."""
    roomy = engine_of("residual", "h100-80gb", 4, None)
    member = next(configurations(roomy.template, 4, 12, Pinned(pipeline=1, micro_batches=1)))
    peak, device = max(rank.peak for rank in roomy.evaluate(member).ranks), roomy.request.cluster.device
    memory = [share * peak * (1 + device.allocator_slack) + device.reserved for share in (0.9, 0.7)]
    more, less = (engine_of("residual", "h100-80gb", 4, one).evaluate(member) for one in memory)
    assert more.seconds < less.seconds
    assert less.price > 0


def test_a_price_without_a_choice_for_a_kind_rules_no_state_out() -> None:
    """A price that excludes candidates with many transient bytes may leave a kind of block no choice in a state."""
    case = make_case("kinds-in-turn", "h100-80gb", Configuration(pipeline=1, mesh=(2,), micro_batches=1), 4)
    multipliers = Multipliers(case.chain, 1.0)
    multipliers.solve(0.0, 0.0)
    known = multipliers.bounds(case.setting)
    assert np.isfinite(known).any()
    free = multipliers.priced[0]
    head, inner, tail = free.values
    without = np.concatenate([np.full_like(inner[:1], math.inf), inner[1:]])
    multipliers.priced.append(replace(free, proves=False, values=(head, without, tail)))
    np.testing.assert_allclose(multipliers.bounds(case.setting), known, rtol=1e-9)


@pytest.mark.parametrize(
    ("model", "rank"), [("mixture-after-dense", 0), ("kinds-one-before", 0), ("kinds-one-after", 3)]
)
def test_a_rank_without_inner_blocks_needs_no_memory_for_them(model: str, rank: int) -> None:
    """The first block is in the head, or the last one in the tail, and no other is on that rank."""
    case = make_case(model, "h100-80gb", Configuration(pipeline=4, mesh=(2,), micro_batches=4), 8)
    chain, setting, price = case.chain, case.setting, 1e-9
    multipliers = Multipliers(chain, setting.weight)
    multipliers.solve(price, setting.flights(rank))
    (priced,) = multipliers.priced
    state = tuple(0 for _ in chain.shape)
    ends = RankFilling(head=None, inner=(), tail=None, peak=0.0, beside=0.0)
    own = priced.best_column(priced.head if rank == 0 else priced.tail, state, chain)
    ends = replace(ends, head=own) if rank == 0 else replace(ends, tail=own)
    ranks = [ends] * setting.ranks
    setting = replace(setting, capacity=rank_peak_of(case, state, ranks, rank))
    part, step = (total(columns_of(case, ranks, rank), name) for name in ("part", "step"))
    busy = setting.weight * (part + float(crossing_seconds(chain, setting, rank)[state])) + step
    reaches = multipliers.rank_bounds.reaches(setting, np.ones(chain.shape, dtype=np.bool_))
    assert reaches[0 if rank == 0 else -1].ends.max(axis=0)[state] <= busy * (1 + 1e-9)
