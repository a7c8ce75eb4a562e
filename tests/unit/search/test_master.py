"""The master: its dual values are where what prices prove of a rank is highest; mixtures of more than two ways."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.sharding.update import AHEAD, PLAIN
from planner.strategy_search.decomposition.block_ranges import block_ranges_of
from planner.strategy_search.decomposition.mixture import best_mixture
from planner.strategy_search.decomposition.pieces import Amounts, Column
from planner.strategy_search.decomposition.stage_filling import Rank, fill
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.solvers.linear_program import minimized
from tests.unit.search.cases import Case, make_case

MIB = 2.0**20


def test_a_linear_program_says_what_its_rows_cost() -> None:
    """A block takes 1 s and 4 bytes, or 3 s and 1 byte; 5 blocks have 11 bytes: a byte more saves 2/3 s."""
    rows, ends = np.array([[4.0, 1.0], [1.0, 1.0]]), (np.array([-math.inf, 5.0]), np.array([11.0, 5.0]))
    found = minimized(np.array([1.0, 3.0]), rows, *ends)
    assert found is not None
    assert found.columns == pytest.approx([2.0, 3.0])
    assert (found.value, found.duals.tolist()) == (pytest.approx(11.0), pytest.approx([-2 / 3, 11 / 3]))
    assert minimized(np.array([1.0, 3.0]), rows, ends[0], np.array([4.0, 5.0])) is None


def test_a_linear_program_at_the_edge_of_what_it_may_has_an_answer() -> None:
    """DeepSeek-V2-Lite in 8 GiB: the leanest ways to run three kinds of blocks need 1 + 8e-7 of the memory, which is
    within the tolerances of GLOP, and abnormal to it. Prices are asked for, no plan: those are filled by themselves."""
    costs = np.array([0.03007744, 0.03343744, 0.0348801, 0.04371981])
    rows = np.array([[0.12064419, 0.06225354, 0.63751619, 0.57581474], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])
    kinds = [3.0, 1.0, 1.0]
    lower = np.array([-math.inf, *kinds])
    found = minimized(costs, rows, lower, np.array([1.0, *kinds]))
    assert found is not None
    assert found.columns == pytest.approx([3, 1, 0, 1], abs=1e-4)
    assert minimized(costs, rows, lower, np.array([1 - 1e-4, *kinds])) is None


def scarce(share: float, gathers: str = "each") -> tuple[Case, Evaluation]:
    """Blocks on one rank of 8 devices whose memory is so scarce that they cannot all be run in the fastest way."""
    update = replace(PLAIN, gathers=gathers)
    configuration = Configuration(pipeline=1, mesh=(8,), micro_batches=2)
    case = make_case("llama70b-4-layers", "h100-80gb", configuration, 32, "bf16", update=update)
    free = Evaluation(case.chain, replace(case.setting, capacity=math.inf)).run()
    setting = replace(case.setting, capacity=share * free.ranks[0].peak)
    return case, Evaluation(case.chain, setting, rounds=40)


@pytest.mark.parametrize(("share", "gathers"), [(0.8, "each"), (0.6, "each"), (0.75, AHEAD)])
def test_what_no_column_improves_is_proved(share: float, gathers: str) -> None:
    """Where the pieces have no new column at the dual values, the program and the bound of the prices are the same."""
    case, evaluation = scarce(share, gathers)
    outcome = evaluation.run()
    block_range = case.chain.block_ranges.whole
    master = evaluation.composition.master(outcome.state, 0, block_range)
    assert master is not None
    assert master.price > 0
    bounds = evaluation.multipliers[0].bounds(evaluation.setting)
    assert master.seconds == pytest.approx(float(bounds[outcome.state]), rel=1e-3)
    assert outcome.bound <= outcome.seconds < math.inf


def column(draw: random.Random, *, recompute: bool) -> Column:
    part = draw.uniform(1, 2)
    amounts = Amounts(
        part=part,
        step=draw.uniform(0, 0.2),
        fixed=draw.uniform(1, 2) * MIB,
        live=draw.uniform(0.1, 3) * MIB,
        replay=draw.uniform(0, 1) * MIB,
        transient=draw.uniform(0, 1) * MIB,
        under=draw.uniform(0, 0.5),
        excess_forward=draw.uniform(-0.2, 0.2),
        excess_backward=draw.uniform(-0.2, 0.2),
        reduction=draw.uniform(0, 0.3),
        backward=0.6 * part,
    )
    return Column(recompute=recompute, candidates={}, kept=frozenset(), amounts=amounts)


@pytest.mark.parametrize("seed", range(12))
def test_mixtures_are_priced_as_pairs_are_and_never_slower(seed: int) -> None:
    draw = random.Random(seed)
    ways = [column(draw, recompute=number == 0) for number in range(3)]
    end = column(draw, recompute=False).amounts
    before = draw.choice([None, False])
    rank = Rank(
        chunks=draw.choice([1, 2]), in_flight=4.0, ends=((end, 2.0),), received=0.3 * MIB, passing=0.0, staying=0.0,
        ending=0.1 * MIB,
        outliving=0.2 * MIB, before=before, after=None, seconds=0.1, first=draw.random() < 0.5,
        begins=draw.random() < 0.5, relays=draw.random() < 0.5,
    )  # fmt: skip
    blocks = block_ranges_of((0,) * 9)
    least = min(one.amounts.fixed * rank.chunks + 4 * one.amounts.live for one in ways)
    capacity = 9 * least * draw.uniform(1.1, 1.6) + 16 * MIB
    (filled,) = fill([rank], [(one,) for one in ways], blocks, 16, capacity)
    assert filled.busy[blocks.whole] < math.inf
    taken = filled.filling(blocks.whole)
    chosen = [ways[taken.second]] * taken.lean + [ways[taken.first]] * (9 - taken.lean)
    pair = [(one, float(sum(own is one for own in chosen))) for one in ways]
    found = best_mixture(rank, [pair], (0,) * 9, 16, capacity)
    assert found is not None
    assert len(found.inner) == 9
    assert found.peak <= capacity * (1 + 1e-9)
    assert found.busy <= filled.busy[blocks.whole] * (1 + 1e-12)
    if sorted(map(id, found.inner)) == sorted(map(id, chosen)):
        part, step, peak, beside = (
            float(values[blocks.whole]) for values in (filled.part, filled.step, filled.peak, filled.beside)
        )
        assert (found.part, found.step) == (pytest.approx(part), pytest.approx(step))
        assert found.peak - found.beside == pytest.approx(peak - beside)
        assert found.beside <= beside, "blocks come in the better order"


def test_a_rank_is_mixed_of_more_ways_where_that_is_quicker() -> None:
    """Two ways balance what travels; a third makes them fit. Of pairs, none does both."""
    rank = Rank(
        chunks=1, in_flight=1.0, ends=(), received=0.0, passing=0.0, staying=0.0, ending=0.0, outliving=0.0,
        before=None, after=None,
        seconds=0.0, first=True, relays=True,
    )  # fmt: skip

    def way(part: float, nbytes: float, excess: float) -> Column:
        amounts = Amounts(part=part, live=nbytes, under=0.01, excess_forward=excess)
        return Column(recompute=False, candidates={}, kept=frozenset(), amounts=amounts)

    ways = [way(1.0, 6.0, -1.0), way(1.0, 5.0, 1.0), way(1.1, 1.0, 1.0)]
    blocks = block_ranges_of((0,) * 8)
    (pairs,) = fill([rank], [(one,) for one in ways], blocks, 1, 36.0)
    found = best_mixture(rank, [[(ways[0], 4.0), (ways[1], 2.0), (ways[2], 2.0)]], (0,) * 8, 1, 36.0)
    assert found is not None
    assert [sum(own is one for own in found.inner) for one in ways] == [4, 2, 2]
    assert found.busy == pytest.approx(8.2)
    assert pairs.busy[blocks.whole] == pytest.approx(8.3)


def test_what_only_the_ends_wait_for_counts_with_any_ways() -> None:
    """Nothing of the blocks travels; of what the head sends 0.9 s, so much is waited for as four blocks do not hide."""
    end = Amounts(part=1.0, under=0.9, excess_forward=0.9)
    rank = Rank(
        chunks=1, in_flight=1.0, ends=((end, 1.0),), received=0.0, passing=0.0, staying=0.0, ending=0.0, outliving=0.0,
        before=None, after=None,
        seconds=0.0,
    )  # fmt: skip
    way = Column(
        recompute=False, candidates={}, kept=frozenset(), amounts=Amounts(part=0.2, excess_forward=-0.1, live=1.0)
    )
    blocks = block_ranges_of((0,) * 4)
    (filled,) = fill([rank], [(way,)], blocks, 1, 10.0)
    mixed = best_mixture(rank, [[(way, 4.0)]], (0,) * 4, 1, 10.0)
    assert mixed is not None
    assert filled.busy[blocks.whole] == pytest.approx(1.0 + 0.8 + 0.5)
    assert mixed.busy == pytest.approx(1.0 + 0.8 + 0.5)
