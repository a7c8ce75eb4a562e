"""Virtual stages that run unlike each other: what is found fits, and is about the best there is."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from costmodels import moments_in_flight
from planner.strategy_search.decomposition.free_chunks import free_chunks
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.pieces import Amounts, Column
from planner.strategy_search.decomposition.setting import setting_of
from planner.strategy_search.decomposition.stage_filling import Handed, Rank
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.finalists.settle import rank_problem
from planner.strategy_search.request.space import Configuration, Pattern, Pinned
from tests.unit.search.cases import make_case, peak_of

MICRO_BATCHES = 8


def ways(draw: random.Random, *, moment: float = 0.0) -> list[Column]:
    """Ways to run a block, of which the leaner take longer."""
    found = []
    for number in range(5):
        live, part = 100.0 / (number + 1) * draw.uniform(0.9, 1.1), 1.0 + 0.2 * number * draw.uniform(0.9, 1.1)
        amounts = Amounts(part=part, fixed=draw.uniform(0, 3), live=live, replay=moment * number, transient=moment)
        found.append(Column(recompute=number > 2, candidates={}, kept=frozenset(), amounts=amounts))
    return found


def rank_of(chunks: int, rank: int, *, handed: float = 0.0) -> Rank:
    return Rank(
        chunks=chunks, in_flight=0.0, ends=((Amounts(part=0.5, fixed=7.0, live=3.0), 2.0),) if not rank else (),
        received=0.0, passing=0.0, staying=0.0, ending=0.0, outliving=0.0, before=None, after=None, seconds=0.0,
        first=rank == 0, handed=Handed(received=handed, passing=0.0, staying=handed, ending=0.0, outliving=handed),
    )  # fmt: skip


def held(rank: Rank, moments: np.ndarray, chunks: list[tuple[Column, ...]]) -> float:
    """Bytes at the fullest moment, block by block."""
    every = [column.amounts for inner in chunks for column in inner] + [amounts for amounts, _ in rank.ends]
    most = 0.0
    for moment in moments:
        total = sum(a.fixed + a.live * moment[0] for a, _ in rank.ends)
        for number, (flights, inner) in enumerate(zip(moment, chunks, strict=True)):
            total += sum(column.amounts.fixed + flights * column.amounts.live for column in inner)
            again = [column.recompute for column in inner]
            assert rank.handed is not None
            if not (rank.first and number == 0):
                total += flights * (rank.handed.staying + (0.0 if again[0] else rank.handed.received))
            total += flights * rank.handed.outliving * sum(a and not b for a, b in itertools.pairwise(again))
        most = max(most, total)
    return most + max(a.replay for a in every) + max(a.transient for a in every)


@pytest.mark.cases(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_within_a_step_of_the_best(seed: int, rank: int) -> None:
    draw = random.Random(seed)
    columns, blocks, chunks = ways(draw), 2, 3
    own = rank_of(chunks, rank)
    moments = np.array(moments_in_flight(rank, 2, chunks, MICRO_BATCHES), dtype=np.float64)
    every = [*itertools.combinations_with_replacement(range(len(columns)), blocks)]
    plans = []
    for chosen in itertools.product(every, repeat=chunks):
        inner = [tuple(columns[way] for way in sorted(ways_, reverse=True)) for ways_ in chosen]
        parts = sum(column.amounts.part for one in inner for column in one)
        plans.append((held(own, moments, inner), parts))
    leanest, fullest = min(plan[0] for plan in plans), max(plan[0] for plan in plans)
    ends = sum(amounts.part for amounts, _ in own.ends)
    largest = max(b.amounts.part - a.amounts.part for a, b in itertools.pairwise(columns))
    for share in (0.05, 0.3, 0.6, 1.0):
        capacity = leanest + share * (fullest - leanest)
        found = free_chunks(own, columns, blocks, moments.tolist(), MICRO_BATCHES, capacity)
        assert found is not None
        inner = [found.inner[chunk * blocks : (chunk + 1) * blocks] for chunk in range(chunks)]
        assert found.peak == pytest.approx(held(own, moments, inner))
        assert found.peak <= capacity * (1 + 1e-9)
        best = min(parts for peak, parts in plans if peak <= capacity)
        assert best <= found.part - ends + 1e-9
        assert found.part - ends <= best + 2 * largest  # bytes are those of a mean moment, and not of the fullest
    assert free_chunks(own, columns, blocks, moments.tolist(), MICRO_BATCHES, leanest * 0.9) is None


def test_what_lives_for_a_moment_and_what_is_handed_over_counts() -> None:
    draw = random.Random(0)
    columns, own = ways(draw, moment=5.0), rank_of(3, 1, handed=4.0)
    moments = np.array(moments_in_flight(1, 2, 3, MICRO_BATCHES), dtype=np.float64)
    roomy = free_chunks(own, columns, 2, moments.tolist(), MICRO_BATCHES, 1e9)
    assert roomy is not None
    for share in (0.9, 0.7, 0.5, 0.4):
        found = free_chunks(own, columns, 2, moments.tolist(), MICRO_BATCHES, share * roomy.peak)
        assert found is not None
        inner = [found.inner[chunk * 2 : (chunk + 1) * 2] for chunk in range(3)]
        assert found.peak == pytest.approx(held(own, moments, inner))
        assert found.peak <= share * roomy.peak
        assert found.part > roomy.part


def test_the_first_chunks_are_the_lean_ones() -> None:
    """A plan whose chunks may run unlike each other takes less than one whose chunks run alike, in the same memory."""
    configuration = Configuration(pipeline=2, virtual_stages=4, mesh=(), micro_batches=8)
    case = make_case("residual-8", "h100-80gb", configuration, 8)
    free = Evaluation(case.chain, case.setting).run()
    least = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least
    most = max(rank.peak for rank in free.ranks)
    faster = 0
    for share in (0.9, 0.7, 0.5, 0.3):
        setting = replace(case.setting, capacity=least + share * (most - least))
        unlike, alike = (Evaluation(case.chain, replace(setting, alike=one)).run() for one in (False, True))
        assert unlike.ranks
        assert peak_of(case, unlike.state, unlike.ranks) <= setting.capacity * (1 + 1e-9)
        assert unlike.seconds <= alike.seconds * (1 + 1e-9)
        assert unlike.bound <= unlike.seconds
        if unlike.seconds < alike.seconds * (1 - 1e-6):
            faster += 1
            for rank in unlike.ranks:
                live = [sum(column.amounts.live for column in inner) for inner in rank.of_chunks(4)]
                assert live == sorted(live)
    assert faster


def test_engines_run_the_virtual_stages_of_a_rank_alike() -> None:
    free = Configuration(pipeline=2, virtual_stages=4, mesh=(), micro_batches=8)
    chain = make_case("residual-8", "h100-80gb", free, 8).chain
    engine = replace(free, decided=Pinned(pattern=Pattern(vocabulary=True)))
    assert setting_of(free, 1e9).unlike(chain)
    assert not setting_of(engine, 1e9).unlike(chain)
    assert not setting_of(replace(free, virtual_stages=1), 1e9).unlike(chain)


def test_the_least_memory_is_that_of_the_chunk_with_fewest_in_flight() -> None:
    """The last chunk of an earlier rank holds fewer micro-batches, on average, than any of the last rank, which holds
    one whenever its moments count."""
    configuration = Configuration(pipeline=2, virtual_stages=4, mesh=(), micro_batches=8)
    case = make_case("residual-8", "h100-80gb", configuration, 8)
    fewest = Multipliers(case.chain, case.setting.weight).least_flights(case.setting)
    assert fewest == min(min(chunks) for chunks in case.setting.in_flight) < min(case.setting.in_flight[-1])


def test_what_is_settled_holds_what_was_filled() -> None:
    """The problem of a rank whose chunks run unlike each other counts them at its fullest moment."""
    configuration = Configuration(pipeline=2, virtual_stages=4, mesh=(), micro_batches=8)
    case = make_case("residual-8", "h100-80gb", configuration, 8)
    free = Evaluation(case.chain, case.setting).run()
    least = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least
    most, unlike = max(rank.peak for rank in free.ranks), 0
    for share in (0.8, 0.6, 0.4, 0.2):
        setting = replace(case.setting, capacity=least + share * (most - least))
        outcome = Evaluation(case.chain, setting).run()
        for rank, filling in enumerate(outcome.ranks):
            unlike += len(set(filling.of_chunks(4))) > 1
            found = rank_problem(case.chain, setting, rank, filling, outcome.state)
            assert found.problem.evaluate(found.choice).peak + filling.beside == pytest.approx(filling.peak, rel=1e-9)
    assert unlike
