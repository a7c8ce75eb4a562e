"""Stages filled and blocks divided as well as by looking at everything."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from planner.sharding.update import Update
from planner.strategy_search.decomposition.block_ranges import BlockRanges, block_ranges_of
from planner.strategy_search.decomposition.division import divide, least_seconds, step_seconds
from planner.strategy_search.decomposition.pieces import Amounts, Column
from planner.strategy_search.decomposition.stage_filling import (
    Filled,
    Known,
    Rank,
    Way,
    _first_reaching,
    fill,
    fill_best,
)
from planner.strategy_search.engine.composition import Composition
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.engine.families import engine_of
from planner.strategy_search.request.space import Configuration, Pinned
from tests.unit.search.cases import cluster_of, make_case, request_of

BLOCKS = 6
ALIKE = block_ranges_of((0,) * BLOCKS)
WEIGHT = 3.5


def random_amounts(draw: random.Random, lean: float, scale: float = 1.0) -> Amounts:
    """The leaner, the slower; the interior and what lives for a moment are anything."""
    return Amounts(
        part=scale * (1 + lean + 0.2 * draw.random()),
        step=scale * draw.random(),
        fixed=scale * (3 - 2 * lean * draw.random()),
        live=scale * (5 - 4 * lean),
        replay=scale * 3 * draw.random() * draw.choice((0, 1)),
        transient=scale * 2 * draw.random(),
    )


def column(amounts: Amounts, recompute: bool) -> Column:
    return Column(recompute=recompute, candidates={}, kept=frozenset(), amounts=amounts)


def random_rank(draw: random.Random) -> Rank:
    chunks = draw.choice((1, 1, 2))
    ends = [(random_amounts(draw, 0.5, 0.3), draw.choice((1.0, 2.0))) for _ in range(draw.choice((0, 1, 2)))]
    return Rank(
        chunks=chunks,
        in_flight=draw.choice((1.0, 2.0, 4.0)) * chunks,
        ends=tuple(ends),
        received=draw.choice((0.0, 1.5)),
        passing=draw.choice((0.0, 0.7)),
        staying=draw.choice((0.0, 0.3)),
        ending=draw.choice((0.0, 1.0, -1.0)),
        outliving=draw.choice((0.0, 2.0)),
        before=draw.choice((None, True, False)),
        after=draw.choice((None, True, False)),
        seconds=draw.random() * 0.1,
    )


def busy_and_peak(rank: Rank, columns: list[Column]) -> tuple[float, float]:
    """Of a rank whose every chunk holds these blocks, written out block for block."""
    part = rank.seconds + sum(a.part for a, _ in rank.ends) + rank.chunks * sum(c.amounts.part for c in columns)
    step = sum(a.step for a, _ in rank.ends) + rank.chunks * sum(c.amounts.step for c in columns)
    memory = sum(a.fixed + flights * a.live for a, flights in rank.ends)
    memory += sum(rank.chunks * c.amounts.fixed + rank.in_flight * c.amounts.live for c in columns)
    everything = [a for a, _ in rank.ends] + [c.amounts for c in columns]
    memory += max((a.replay for a in everything), default=0.0) + max((a.transient for a in everything), default=0.0)
    ways = [w for w in (rank.before, *(c.recompute for c in columns), rank.after) if w is not None]
    if not ways or not ways[0]:
        memory += rank.received
    if not any(ways):
        memory += rank.passing
    memory += rank.staying
    if not ways or not ways[-1]:
        memory += rank.ending
    memory += rank.outliving * sum(one and not other for one, other in itertools.pairwise(ways))
    return WEIGHT * part + step, memory


def fillings(fast: Column, lean: Column, count: int) -> Iterator[list[Column]]:
    for first in range(count + 1):
        yield [lean] * first + [fast] * (count - first)


@pytest.mark.parametrize("seed", range(60))
def test_a_stage_is_filled_as_well_as_by_trying_all_mixtures(seed: int) -> None:
    draw = random.Random(seed)
    rank = random_rank(draw)
    fast, lean = column(random_amounts(draw, 0.0), False), column(random_amounts(draw, 0.9), draw.random() < 0.7)
    capacity = draw.uniform(5.0, 160.0)
    filled = fill([rank], [(fast,), (lean,)], ALIKE, WEIGHT, capacity)[0]
    for count in range(BLOCKS + 1):
        tried = [busy_and_peak(rank, columns) for columns in fillings(fast, lean, count)]
        fitting = [busy for busy, peak in tried if peak <= capacity * (1 + 1e-9)]
        assert math.isclose(float(filled.busy[count]), min(fitting, default=math.inf), rel_tol=1e-12)
        if fitting:
            taken = filled.filling(count)
            pool = [fast, lean]
            columns = [pool[taken.second]] * taken.lean + [pool[taken.first]] * (count - taken.lean)
            busy, peak = busy_and_peak(rank, columns)
            assert math.isclose(busy, float(filled.busy[count]), rel_tol=1e-12)
            assert math.isclose(peak, float(filled.peak[count]), rel_tol=1e-12)
            assert math.isclose(busy, WEIGHT * float(filled.part[count]) + float(filled.step[count]), rel_tol=1e-12)
            assert math.isclose(
                float(filled.beside[count]), rank.handing_over([c.recompute for c in columns]), abs_tol=1e-12
            )
        alike = [busy_and_peak(rank, [column] * count)[1] for column in (fast, lean)]
        assert math.isclose(float(filled.least[count]), min(alike), rel_tol=1e-12)
        assert fitting or float(filled.least[count]) > capacity


def test_the_best_of_several_ends_is_taken_for_every_number_of_blocks() -> None:
    draw = random.Random(5)
    ranks = [random_rank(draw) for _ in range(3)]
    pool = [(column(random_amounts(draw, 0.0), False),), (column(random_amounts(draw, 0.9), True),)]
    alone = [fill([rank], pool, ALIKE, WEIGHT, 60.0)[0] for rank in ranks]
    together = fill_best([ranks], pool, ALIKE, WEIGHT, 60.0)[0]
    for count in range(BLOCKS + 1):
        assert float(together.busy[count]) == min(float(filled.busy[count]) for filled in alone)
        if math.isfinite(float(together.busy[count])):
            chosen = alone[together.filling(count).variant]
            assert float(together.peak[count]) == float(chosen.peak[count])
            assert together.filling(count).lean == chosen.filling(count).lean


@pytest.mark.parametrize("seed", range(20))
def test_filled_ranks_are_filled_on_with_new_ways_alone(seed: int) -> None:
    draw = random.Random(seed)
    kinds = draw.choice(ROWS)
    ranks, block_ranges, capacity = [random_rank(draw) for _ in range(3)], block_ranges_of(kinds), draw.uniform(60, 250)
    leans = [draw.random() for _ in range(6)]
    ways = [tuple(column(random_amounts(draw, lean), lean > 0.5) for _ in set(kinds)) for lean in leans]
    known: Known = {}
    for count, own in ((2, ranks[:2]), (3, ranks), (3, ranks), (6, ranks)):  # the third rank comes later
        found = fill_best([own], ways[:count], block_ranges, WEIGHT, capacity, known=known)[0]
        anew = fill_best([own], ways[:count], block_ranges, WEIGHT, capacity)[0]
        for name in ("part", "step", "busy", "peak", "beside", "least", "variant", "first", "second", "lean"):
            assert (getattr(found, name) == getattr(anew, name)).all(), name


def random_filled(draw: random.Random, blocks: int, weight: float, *, steps: bool) -> Filled:
    """Monotone prices of 0 ... blocks; perhaps no more than some fit."""
    part = np.cumsum([draw.random() * 0.3, *(draw.uniform(0.5, 1.5) for _ in range(blocks))])
    step = np.cumsum([draw.random() for _ in range(blocks + 1)]) * steps
    fits = np.arange(blocks + 1) <= draw.choice((blocks, blocks, blocks - 1, blocks // 2))
    nothing = np.zeros(blocks + 1)
    places = np.zeros(blocks + 1, dtype=np.intp)
    return Filled(
        part=np.where(fits, part, math.inf),
        step=np.where(fits, step, math.inf),
        busy=np.where(fits, weight * part + step, math.inf),
        peak=nothing,
        beside=nothing,
        least=nothing,
        variant=places,
        first=places,
        second=places,
        lean=places,
    )


def best_division(ranks: list[Filled], least: list[int], blocks: int, micro_batches: int) -> float:
    choices = itertools.product(*(range(fewest, blocks + 1) for fewest in least))
    fitting = (
        counts
        for counts in choices
        if sum(counts) == blocks and all(rank.busy[n] < math.inf for rank, n in zip(ranks, counts, strict=True))
    )
    return min((step_seconds(ranks, counts, micro_batches, 1) for counts in fitting), default=math.inf)


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.parametrize("steps", [False, True])
def test_blocks_are_divided_as_well_as_by_trying_all_divisions(seed: int, steps: bool) -> None:
    draw = random.Random(seed)
    number, blocks, micro_batches = draw.randint(1, 4), draw.randint(4, 8), draw.choice((1, 2, 8))
    ranks = [random_filled(draw, blocks, micro_batches - (1 if number > 1 else 0), steps=steps) for _ in range(number)]
    least = [draw.choice((0, 1)) if number > 1 else 0 for _ in range(number)]
    found = divide(ranks, least, block_ranges_of((0,) * blocks), micro_batches=micro_batches, chunks=1)
    expected = best_division(ranks, least, blocks, micro_batches)
    if found is None:
        assert expected == math.inf
        return
    assert sum(found.blocks) == blocks
    assert all(count >= fewest for count, fewest in zip(found.blocks, least, strict=True))
    assert math.isclose(found.seconds, step_seconds(ranks, found.blocks, micro_batches, 1))
    assert found.seconds >= expected * (1 - 1e-12)
    # where one rank is slow in micro-batches and another at the end of the step, busy ranks are not all there is to it
    assert found.seconds <= expected * (1.1 if steps else 1 + 1e-12)


@pytest.mark.parametrize("chunks", [2, 4])
def test_equal_chunks_have_one_price(chunks: int) -> None:
    draw = random.Random(chunks)
    ranks = [random_filled(draw, 3, 8 - 1 / chunks, steps=True) for _ in range(2)]
    ranks = [rank for rank in ranks if math.isfinite(float(rank.busy[1]))]
    found = divide(ranks, [0, 0], block_ranges_of((0,) * 3), micro_batches=8, chunks=chunks, given=(1, 1))
    assert found is not None
    assert found.blocks == (1,) * len(ranks)
    parts, steps = [float(r.part[1]) for r in ranks], [float(r.step[1]) for r in ranks]
    expected = (8 - 1 / chunks) * max(parts) + sum(parts) / chunks + max(steps)
    assert math.isclose(found.seconds, expected, rel_tol=1e-12)


ROWS = ((0, 0, 1, 1, 1, 1), (0, 1, 0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 1, 1, 2), (1, 0, 0, 0))


def mixtures(ways: list[Way], kinds: tuple[int, ...]) -> Iterator[list[Column]]:
    """All fillings of one range of blocks: so many blocks at its beginning in one way, the others in another."""
    for first, second in itertools.product(ways, repeat=2):
        for lean in range(len(kinds) + 1):
            yield [(second if at < lean else first)[kind] for at, kind in enumerate(kinds)]


@pytest.mark.parametrize("kinds", ROWS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_stages_of_several_kinds_are_filled_as_well_as_by_trying_all_mixtures(
    kinds: tuple[int, ...], seed: int
) -> None:
    """Bytes for what blocks hand over are an upper bound here, so they are left out."""
    draw = random.Random(f"{kinds} {seed}")
    rank = replace(random_rank(draw), received=0.0, passing=0.0, ending=0.0, outliving=0.0)
    scales = [draw.uniform(0.5, 4.0) for _ in set(kinds)]
    ways = [
        tuple(column(random_amounts(draw, lean, scale), lean > 0.0) for scale in scales) for lean in (0.0, 0.5, 0.9)
    ]
    block_ranges = block_ranges_of(kinds)
    capacity = draw.uniform(10.0, 250.0)
    filled = fill([rank], ways, block_ranges, WEIGHT, capacity)[0]
    for start, stop in itertools.combinations(range(len(kinds) + 1), 2):
        number, held = block_ranges.of(start, stop - start), kinds[start:stop]
        fitting = [
            (busy, peak)
            for columns in mixtures(ways, held)
            for busy, peak in [busy_and_peak(rank, columns)]
            if peak <= capacity * (1 + 1e-9)
        ]
        if math.isinf(float(filled.busy[number])):
            continue
        taken = filled.filling(number)
        columns = [ways[taken.second if at < taken.lean else taken.first][kind] for at, kind in enumerate(held)]
        busy, peak = busy_and_peak(rank, columns)
        assert math.isclose(busy, float(filled.busy[number]), rel_tol=1e-12)
        assert peak <= float(filled.peak[number]) * (1 + 1e-12)
        assert peak <= capacity * (1 + 1e-9)
        assert busy >= min(fitting)[0] * (1 - 1e-12)


def priced_by_kinds(draw: random.Random, block_ranges: BlockRanges, weight: float) -> Filled:
    """Prices that are sums over blocks, each kind with its own; perhaps not everything fits."""
    part = 0.1 + np.array([draw.uniform(0.3, 2.0) for _ in block_ranges.counts]) @ block_ranges.counts
    room = draw.choice((10**6, 10**6, block_ranges.blocks // 2 + 1))
    fits = block_ranges.lengths <= room
    nothing, places = np.zeros(len(fits)), np.zeros(len(fits), dtype=np.intp)
    priced = np.where(fits, part, math.inf)
    return Filled(
        part=priced, step=np.where(fits, 0.0, math.inf), busy=weight * priced, peak=nothing, beside=nothing,
        least=nothing, variant=places, first=places, second=places, lean=places,
    )  # fmt: skip


@pytest.mark.parametrize("kinds", ROWS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_blocks_of_several_kinds_are_divided_at_the_best_borders(kinds: tuple[int, ...], seed: int) -> None:
    draw = random.Random(f"{kinds} {seed}")
    block_ranges, number, micro_batches = block_ranges_of(kinds), draw.randint(2, 4), draw.choice((2, 8))
    ranks = [priced_by_kinds(draw, block_ranges, micro_batches - 1) for _ in range(number)]
    found = divide(ranks, [1] * number, block_ranges, micro_batches=micro_batches, chunks=1)
    tried = []
    for borders in itertools.combinations(range(1, len(kinds)), number - 1):
        edges = (0, *borders, len(kinds))
        held = [block_ranges.of(a, b - a) for a, b in itertools.pairwise(edges)]
        tried.append(step_seconds(ranks, held, micro_batches, 1))
    best = min(tried, default=math.inf)
    if found is None:
        assert math.isinf(best)
        return
    assert sum(found.blocks) == len(kinds)
    assert math.isclose(found.seconds, best, rel_tol=1e-12)


@pytest.mark.parametrize(("blocks", "stages"), [(126, 16), (61, 16), (61, 32), (126, 100)])
def test_any_number_of_blocks_is_divided_over_any_number_of_stages(blocks: int, stages: int) -> None:
    """Equal ranks hold as many as they can, but for one."""
    draw = random.Random(0)
    block_ranges = block_ranges_of((0,) * blocks)
    rank = priced_by_kinds(draw, block_ranges, 31.0)
    rank = replace(
        rank, part=0.1 + block_ranges.lengths, step=np.zeros(blocks + 1), busy=31.0 * (0.1 + block_ranges.lengths)
    )
    found = divide([rank] * stages, [1] * stages, block_ranges, micro_batches=32, chunks=1)
    assert found is not None
    assert (sum(found.blocks), max(found.blocks)) == (blocks, -(-blocks // stages))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_where_nothing_fits_nothing_is_fast(micro_batches: int) -> None:
    """One micro-batch in one stage has no pace, which may be infinite all the same: what it proves is no NaN."""
    draw = random.Random(3)
    rank = replace(random_rank(draw), chunks=1)
    way = (column(random_amounts(draw, 0.5), recompute=False),)
    for room, fits in ((math.inf, True), (1e-3, False)):
        (filled,) = fill_best([(rank,)], [way], ALIKE, micro_batches, room, None, None)
        seconds = least_seconds([filled], [filled.part], [0], ALIKE, micro_batches=micro_batches, chunks=1)
        assert (0 < seconds < math.inf) if fits else seconds == math.inf


def test_steps_are_counted_until_they_add_up() -> None:
    """As a search through the multiples does, also where a quotient is rounded."""
    rng = np.random.default_rng(3)
    step = rng.uniform(1e-3, 1e10, size=(40, 1))
    wanted = step * rng.integers(-5, 130, size=(40, 60)) * (1 + rng.choice([-2e-16, 0.0, 2e-16], size=(40, 60)))
    wanted[0, :2] = -math.inf, math.inf
    searched = [multiples.searchsorted(own) for multiples, own in zip(step * np.arange(121), wanted, strict=True)]
    assert np.array_equal(_first_reaching(step, wanted, 120), searched)


@pytest.mark.parametrize(
    ("model", "ranks", "wanted"),
    [
        ("mixture-after-dense", 2, (1, 2)),
        ("kinds-one-after", 2, (2, 1)),
        ("residual-first", 4, (0, 1, 1, 1)),
        ("llama-4", 2, (2, 2)),
        ("gpt-3", 2, None),
    ],
)
def test_equal_ranks_count_blocks_in_head_and_tail(model: str, ranks: int, wanted: tuple[int, ...] | None) -> None:
    """The first block of a model is in the head if it is unlike the others, and the last one may be in the tail."""
    configuration = Configuration(pipeline=ranks, mesh=(1,), micro_batches=4, even=True)
    case = make_case(model, "cpu", configuration, 8)
    composition = Composition(case.pipeline_of_kinds, case.setting, [], math.inf)
    assert composition.given == wanted
    found = Evaluation(case.chain, case.setting).run().ranks
    assert wanted is None or tuple(len(rank.inner) for rank in found) == wanted


def test_divisions_with_equal_sums_are_told_apart_by_what_ranks_do_once_a_step() -> None:
    """With one micro-batch the sum of all ranks counts, wherever the blocks are."""
    updates = Update(gathers="each")
    asked = request_of("chain", cluster_of("h100-80gb", 2), 16, pinned=Pinned(recompute="none"), update=updates)
    found = engine_of(asked)[0].evaluate(Configuration(pipeline=2, mesh=(), micro_batches=1))
    assert found.bound <= found.seconds <= found.bound * (1 + 1e-6)
