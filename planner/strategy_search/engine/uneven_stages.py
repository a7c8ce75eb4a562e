"""Virtual stages that hold unequal numbers of blocks, from what the search has found for one range of blocks on each
rank.

    found, rank by rank     b B b b b | b B b b b     B: a lean block, the recomputed one of five
    virtual stages          0 1 0 1, rank r holds stages r, p + r, 2p + r, ...: of 2 and 3 blocks, 3 and 2

A rank keeps the number of blocks, and of lean ones, that the search has found: with blocks of one kind it takes as long
and holds as much as was found. Its stages hold equally many, but for one block: fewer in the first, where a pipeline
waits to be filled, and on the last rank in the last one, which the loss follows. Lean blocks are dealt to the stages of
a rank one by one, and come first in each.

Where blocks are of several kinds a rank holds others than the search had there: blocks are moved from one stage to
another as long as the busiest rank gets less busy, or stages more equal.

Not good for: blocks of several kinds whose memory differs a lot; the judge sees it, and the search leaves more room.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.limits import checked
from planner.strategy_search.decomposition.pieces import Chain, Column
from planner.strategy_search.engine.outcome import RankFilling

_MOVES = 64
"""Blocks that are moved from one stage to another, at most."""

_LESS = 1e-9
"""What the busiest rank, or the unevenness of stages, has to get less, relatively."""


def uneven_stages(chain: Chain, ranks: Sequence[RankFilling], virtual: int) -> list[tuple[Column, ...]]:
    """Inner blocks of `virtual` stages of every rank, stage by stage in the order of the model. A stage holds one or
    more; the first and the last, which hold what stands before the blocks and behind them, may hold none."""
    names = list(dict.fromkeys(piece.kind for piece in chain.inner))
    kinds = [names[kind] for kind in chain.block_ranges.kinds]
    usual = _usual_seconds(ranks)
    ends = [0.0] * (len(ranks) * virtual)
    for at, column in ((0, ranks[0].head), (-1, ranks[-1].tail)):
        ends[at] = 0.0 if column is None else column.amounts.part
    sizes = _sizes([len(rank.inner) for rank in ranks], ends, math.fsum(usual[one] for one in kinds) / len(kinds))
    if len(names) > 1:
        sizes = _levelled(sizes, [usual[kind] for kind in kinds], ends, len(ranks))
    borders = [0, *itertools.accumulate(sizes)]
    stages = [kinds[start:stop] for start, stop in itertools.pairwise(borders)]
    every = [column for rank in ranks for column in rank.inner]
    found: list[tuple[Column, ...]] = [()] * len(stages)
    for number, rank in enumerate(ranks):
        places = range(number, len(stages), len(ranks))
        for place, columns in zip(places, _dealt(rank.inner, every, [stages[at] for at in places]), strict=True):
            found[place] = columns
    return found


def _sizes(blocks: Sequence[int], ends: Sequence[float], seconds: float) -> list[int]:
    """Inner blocks of every stage, of ranks with so many that take so long each, beside what takes stages so long at
    the `ends`: each block goes to the quickest stage of its rank, of equals to the last one, or on the last rank to the
    first."""
    sizes, last = [0] * len(ends), len(blocks) - 1
    for rank, inner in enumerate(blocks):
        places = range(rank, len(ends), len(blocks))
        order = places if rank == last else places[::-1]
        for at in places:
            sizes[at] = int(0 < at < len(ends) - 1)
        for _ in range(inner - sum(sizes[at] for at in places)):
            sizes[min(order, key=lambda at: ends[at] + sizes[at] * seconds)] += 1
    return sizes


def _usual_seconds(ranks: Sequence[RankFilling]) -> dict[int, float]:
    """Seconds per micro-batch of a block of each kind, on average over those that were found."""
    found: dict[int, list[float]] = {}
    for column in (column for rank in ranks for column in rank.inner):
        found.setdefault(column.kind, []).append(column.amounts.part)
    return {kind: math.fsum(seconds) / len(seconds) for kind, seconds in found.items()}


def _levelled(sizes: Sequence[int], seconds: Sequence[float], ends: Sequence[float], ranks: int) -> list[int]:
    """Sizes of stages for blocks that take so long each, with one block after another in the stage where it makes the
    busiest rank least busy, and stages equal."""
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    usual, stages = float(sums[-1]) / len(seconds), len(sizes)

    def scores(counts: NDArray[np.intp]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # (tries, stages)
        borders = np.concatenate((np.zeros((len(counts), 1), dtype=np.intp), counts.cumsum(axis=1)), axis=1)
        own = sums[borders[:, 1:]] - sums[borders[:, :-1]] + ends
        busiest = own.reshape(len(counts), -1, ranks).sum(axis=1).max(axis=1)
        return busiest, ((own / usual) ** 2).sum(axis=1)

    best = np.array(sizes, dtype=np.intp)
    (busiest,), (uneven,) = scores(best[None])
    fewest = np.ones(stages, dtype=np.intp)
    fewest[[0, -1]] = 0
    for _ in checked(range(_MOVES)):
        sources = np.flatnonzero(best > fewest)
        if not len(sources):
            break
        tried = np.repeat(best[None], len(sources) * stages, axis=0)
        rows = np.arange(len(tried))
        tried[rows, np.repeat(sources, stages)] -= 1
        tried[rows, np.tile(np.arange(stages), len(sources))] += 1
        slowest, others = scores(tried)
        least = slowest.min(initial=busiest) * (1 + _LESS)
        found = int(np.where(slowest <= least, others, math.inf).argmin())
        if slowest[found] >= busiest * (1 - _LESS) and others[found] >= uneven * (1 - _LESS):
            break
        best, busiest, uneven = tried[found], slowest[found], others[found]
    return [int(count) for count in best]


def _dealt(own: Sequence[Column], every: Sequence[Column], stages: Sequence[Sequence[int]]) -> list[tuple[Column, ...]]:
    """Ways to run the blocks of the stages of a rank, which have blocks of such kinds: those that were found for it, as
    often, and those of `every` rank for a kind of which it had none."""
    found: list[list[Column | None]] = [[None] * len(stage) for stage in stages]
    for kind in sorted({kind for stage in stages for kind in stage}):
        left = [[at for at, one in enumerate(stage) if one == kind] for stage in stages]
        needed = sum(map(len, left))
        ways = [column for column in own if column.kind == kind]
        ways = ways or [column for column in every if column.kind == kind]
        for column, number in _numbers(ways, needed):
            for _ in range(number):  # to the stage that has fewest of them
                dealt = [sum(one is column for one in stage) for stage in found]
                stage = min((at for at, places in enumerate(left) if places), key=lambda at: (dealt[at], at))
                found[stage][left[stage].pop(0)] = column
    return [tuple(column for column in stage if column is not None) for stage in found]


def _numbers(ways: Sequence[Column], needed: int) -> list[tuple[Column, int]]:
    """How many of so many blocks are run in each of some ways, in the same shares, the leaner ones rounded up."""
    distinct = {id(column): column for column in ways}
    counts = {key: sum(id(column) == key for column in ways) for key in distinct}
    found, left, of = list[tuple[Column, int]](), needed, len(ways)
    for key, column in distinct.items():  # lean ones come first
        number = min(left, math.ceil(left * counts[key] / of)) if of else left
        found.append((column, number))
        left, of = left - number, of - counts[key]
    return found
