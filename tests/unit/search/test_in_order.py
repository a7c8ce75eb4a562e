"""Ranks before blocks of several kinds in their order: no division of the blocks is faster than what is said."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from planner.strategy_search.decomposition.in_order import InOrder, Reach
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.engine.next_price import Asked
from planner.strategy_search.request.space import Configuration
from tests.unit.search.cases import make_case

KINDS = ["aabbbb", "abab", "abbba", "aaabbbc", "abcabc"]


def along(kinds: str) -> np.ndarray:
    """How many of the first blocks are of each kind."""
    order = list(dict.fromkeys(kinds))
    return np.array([[kinds[:at].count(kind) for at in range(len(kinds) + 1)] for kind in order], dtype=np.float64)


def drawn(rng: np.random.Generator, kinds: int, states: int, ranks: int, most: int, *, leanest: int) -> Reach:
    """Random lines for some equal ranks, in which a byte more than a rank has is missing now and then."""
    return Reach(
        ends=rng.uniform(-1.0, 0.5, (3, states)),
        inner=rng.uniform(0.2, 2.0, (3, kinds, states)),
        most=most,
        left=rng.uniform(0.5, 6.0, (leanest, states)),
        leanest=rng.uniform(0.2, 1.5, (leanest, kinds, states)),
        ranks=ranks,
    )


def quickest(reaches: list[Reach], sums: np.ndarray, state: int) -> float:
    """The least time of the slowest rank over all divisions of the blocks."""
    ranks = [reach for reach in reaches for _ in range(reach.ranks)]
    blocks, best = sums.shape[1] - 1, math.inf
    for inside in itertools.combinations_with_replacement(range(blocks + 1), len(ranks) - 1):
        slowest = 0.0
        for reach, (start, end) in zip(ranks, itertools.pairwise((0, *inside, blocks)), strict=True):
            held = sums[:, end] - sums[:, start]
            if (held @ reach.leanest[..., state].T > reach.left[:, state]).any():
                slowest = math.inf
            for at in range(start, max(start, end - reach.most) + 1):  # of more than `most` blocks so many in a row
                counted = sums[:, min(end, at + reach.most)] - sums[:, at]
                slowest = max(slowest, *(reach.ends[:, state] + reach.inner[..., state] @ counted))
        best = min(best, slowest)
    return best


@pytest.mark.cases(4)
@pytest.mark.parametrize("leanest", [0, 2])
@pytest.mark.parametrize("kinds", KINDS)
def test_the_pace_is_that_of_the_best_division(kinds: str, leanest: int) -> None:
    sums, rng = along(kinds), np.random.default_rng(len(kinds) + leanest)
    for _ in range(10):
        number = len(sums)
        reaches = [drawn(rng, number, 4, ranks, len(kinds), leanest=leanest) for ranks in (1, 2, 1)]
        found = InOrder(reaches, sums).pace(40)
        wanted = [quickest(reaches, sums, state) for state in range(4)]
        assert found == pytest.approx(wanted, rel=1e-6)
        limit = np.array([1.0 if math.isinf(each) else each * 1.1 for each in wanted])
        assert InOrder(reaches, sums).pace(40, limit) == pytest.approx(wanted, rel=1e-6)
        assert InOrder(reaches, sums).pace(40, limit / 2) == pytest.approx(np.minimum(wanted, limit / 2), rel=1e-6) or (
            np.isinf(wanted).any()
        )


@pytest.mark.parametrize("kinds", KINDS)
def test_of_more_blocks_than_prices_speak_of_so_many_in_a_row_count(kinds: str) -> None:
    sums, rng = along(kinds), np.random.default_rng(len(kinds))
    for _ in range(10):
        reaches = [drawn(rng, len(sums), 4, ranks, 2, leanest=0) for ranks in (1, 1)]
        found = InOrder(reaches, sums).pace(40)
        assert found == pytest.approx([quickest(reaches, sums, state) for state in range(4)], rel=1e-6)


def test_the_units_of_the_most_blocks_are_those_of_no_more_small_ones_than_there_are() -> None:
    """As if all were of the kind with the smallest unit, three dense blocks of 78 left a rank without a bound."""
    case = make_case("kinds-three", "cpu", Configuration(pipeline=2, mesh=(), micro_batches=4), 16)
    rng = np.random.default_rng(5)
    for most in range(1, sum(case.chain.block_ranges.totals) + 1):
        multipliers = Multipliers(case.chain, 4.0, most=most)
        assert max(multipliers.counts) > 1
        units = rng.random((len(multipliers.counts), 7)) + 0.1
        every = np.repeat(units, multipliers.counts, axis=0)  # (blocks, states)
        assert multipliers.rank_bounds.units_of_most(units) == pytest.approx(np.sort(every, axis=0)[:most].sum(axis=0))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("model", "ranks"), [("kinds-three", 3), ("mixture-after-two-dense", 2)])
def test_little_is_left_where_blocks_of_several_kinds_have_little_memory(model: str, ranks: int) -> None:
    """In units that every kind is so many of, as much as 24% was left. A rank that has the first or the last block may
    have no other, so its bound counts no memory in which others run: 21% are left where these blocks stand apart."""
    case = make_case(model, "cpu", Configuration(pipeline=ranks, mesh=(2,), micro_batches=8), 32)
    free = Evaluation(case.chain, replace(case.setting, capacity=math.inf)).run()
    least = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least
    most = max(rank.peak for rank in free.ranks)
    found = Evaluation(case.chain, replace(case.setting, capacity=least + 0.3 * (most - least)), rounds=40).run()
    assert (0.78 if ranks == 3 else 0.84) * found.seconds <= found.bound <= found.seconds


def test_a_price_is_asked_for_later_ranks_once() -> None:
    case = make_case("kinds-first", "cpu", Configuration(pipeline=3, mesh=(), micro_batches=8), 16)
    prices = Evaluation(case.chain, case.setting).next_price
    asked = Asked(kind=0, price=1e-9, flights=3.0, under=(0.5, 0.0, 0.0))
    assert [one.flights for one in prices.of_later_ranks(asked)] == [2.0, 1.0]
    assert prices.of_later_ranks(asked) == []
    assert prices.of_later_ranks(replace(asked, price=math.inf)) == []
