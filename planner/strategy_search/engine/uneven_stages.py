"""Virtual stages that hold unequal numbers of blocks, from what the search has found for one range of blocks on each
rank.

    found, rank by rank     b B b b b | b B b b b     B: a lean block, the recomputed one of five
    virtual stages          0 1 0 1, rank r holds stages r, p + r, 2p + r, ...: of 2 and 3 blocks, 3 and 2

A rank keeps the number of blocks, and of lean ones, that the search has found: with blocks of one kind it takes as long
and holds as much as was found. Its stages hold equally many, but for one block. Lean blocks are dealt to the stages of
a rank one by one, and come first in each.

Where blocks are of several kinds a rank holds others than the search had there: blocks are moved from one stage to
another as long as the busiest rank gets less busy, or stages more equal.

Ranks that are equally busy wait for each other all the same where their stages take unequally long, a tenth of the step
and more. Least where the larger stages follow each other, from one rank to the next and back to the first:

    larger stages last      1 1 1 1 2 2 2 2     waits for 9% (four ranks of two stages, 32 micro-batches)
    one after the other     1 1 2 2 2 2 1 1     2.6%

So a few ways to say which stages are the larger ones are simulated: of each rank the same, or of the first half of the
ranks the next. What is left of the waiting, which no sum knows, is added to the sum.

Not good for: blocks of several kinds whose memory differs a lot; the judge sees it, and the search leaves more room.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodels import ChunkSeconds, PassSeconds, RankSeconds, schedule_orders, simulate, step_time
from hardware_profiles import Seconds
from planner.limits import checked
from planner.plan.plan import INTERLEAVED
from planner.strategy_search.decomposition.pieces import Chain, Column
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.request.space import Configuration

Passes: TypeAlias = tuple[Seconds, Seconds]
"""Of a micro-batch, forward and backward."""

_ROUNDS = 4
"""Micro-batches for each rank with which ways to cut ranks into stages are compared."""

_ROUNDS_OF_MANY = 2
_MANY = 16
"""The same for more ranks than that, whose step has many turns."""

_DIGITS = 2
"""Digits of what stages take, in blocks, by which ways are compared."""

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
    ends = [(0.0, 0.0)] * (len(ranks) * virtual)
    for at, column in ((0, ranks[0].head), (-1, ranks[-1].tail)):
        ends[at] = (0.0, 0.0) if column is None else _passes(column)
    mean = math.fsum(math.fsum(usual[kind]) for kind in kinds) / len(kinds)
    blocks = tuple([_to(usual[kind], mean) for kind in kinds])
    counts = tuple([len(rank.inner) for rank in ranks])
    sizes = _best_sizes(counts, blocks, tuple([_to(end, mean) for end in ends]), len(names))
    borders = [0, *itertools.accumulate(sizes)]
    stages = [kinds[start:stop] for start, stop in itertools.pairwise(borders)]
    every = [column for rank in ranks for column in rank.inner]
    found: list[tuple[Column, ...]] = [()] * len(stages)
    for number, rank in enumerate(ranks):
        places = range(number, len(stages), len(ranks))
        for place, columns in zip(places, _dealt(rank.inner, every, [stages[at] for at in places]), strict=True):
            found[place] = columns
    return found


def waiting_of_uneven(chain: Chain, ranks: Sequence[RankFilling], configuration: Configuration) -> Seconds:
    """Seconds of a step that ranks wait for each other as their stages take unequally long, without what travels and
    what comes once a step."""
    stages = [list(inner) for inner in uneven_stages(chain, ranks, configuration.virtual_stages)]
    stages[0] += [one for one in (ranks[0].head,) if one is not None]
    stages[-1] += [one for one in (ranks[-1].tail,) if one is not None]
    passes = [_summed([_passes(column) for column in own]) for own in stages]
    return _waiting(passes, configuration.pipeline, configuration.micro_batches)


@lru_cache(maxsize=64)
def _best_sizes(
    ranks: tuple[int, ...], blocks: tuple[Passes, ...], ends: tuple[Passes, ...], kinds: int
) -> tuple[int, ...]:
    """Inner blocks of every stage, of ranks with so many: of the ways to say which stages hold a block more, the one
    with which ranks wait least for each other."""
    p, virtual = len(ranks), len(ends) // len(ranks)
    total, beside = [math.fsum(one) for one in blocks], [math.fsum(one) for one in ends]
    ways = [[virtual - 1] * (p - 1) + [0]]
    for first in range(virtual):
        behind, half = (first + 1) % virtual, p // 2
        ways += [[first] * p, [behind] * half + [first] * (p - half)]
    found = dict[tuple[int, ...], Seconds]()
    for way in ways:
        sizes = _sizes(ranks, beside, math.fsum(total) / len(total), way)
        if kinds > 1:
            sizes = _levelled(sizes, total, beside, p)
        if tuple(sizes) not in found:
            borders = [0, *itertools.accumulate(sizes)]
            own = [_summed(blocks[start:stop]) for start, stop in itertools.pairwise(borders)]
            passes = [_summed(pair) for pair in zip(own, ends, strict=True)]
            found[tuple(sizes)] = _waiting(passes, p, p * (_ROUNDS if p <= _MANY else _ROUNDS_OF_MANY))
    return min(found, key=lambda sizes: found[sizes])


def _to(passes: Passes, mean: Seconds) -> Passes:
    """Shares of what a block takes on average, so coarse that what is alike is looked at once."""
    ahead, back = passes
    return (round(ahead / mean, _DIGITS), round(back / mean, _DIGITS)) if mean else (0.0, 0.0)


def _passes(column: Column) -> Passes:
    return column.amounts.part - column.amounts.backward, column.amounts.backward


def _summed(several: Sequence[Passes]) -> Passes:
    return math.fsum(ahead for ahead, _ in several), math.fsum(back for _, back in several)


def _waiting(stages: Sequence[Passes], ranks: int, micro_batches: int) -> Seconds:
    """By how much a step of such stages is longer pass by pass (`costmodels.timeline`) than it is counted, by how long
    each rank is busy."""
    chunks = [
        ChunkSeconds(forward=(PassSeconds(computation=ahead),), backward=(PassSeconds(computation=back),))
        for ahead, back in stages
    ]
    virtual = len(chunks) // ranks
    turns = [RankSeconds(chunks=tuple(chunks[rank::ranks])) for rank in range(ranks)]
    orders = schedule_orders(INTERLEAVED, ranks, micro_batches, virtual=virtual)
    busy = [math.fsum(_summed(stages[rank::ranks])) for rank in range(ranks)]
    counted = step_time(busy, [0.0] * ranks, micro_batches, virtual)
    return max(0.0, simulate(turns, orders, record=False).seconds - float(counted))


def _sizes(blocks: Sequence[int], ends: Sequence[float], seconds: float, first: Sequence[int]) -> list[int]:
    """Inner blocks of every stage, of ranks with so many that take so long each, beside what takes stages so long at
    the `ends`: each block goes to the quickest stage of its rank, of equals to the `first` one of that rank, or else to
    the one before."""
    sizes, virtual = [0] * len(ends), len(ends) // len(blocks)
    for rank, inner in enumerate(blocks):
        places = range(rank, len(ends), len(blocks))
        order = [places[(first[rank] - turn) % virtual] for turn in range(virtual)]
        for at in places:
            sizes[at] = int(0 < at < len(ends) - 1)
        for _ in range(inner - sum(sizes[at] for at in places)):
            sizes[min(order, key=lambda at: ends[at] + sizes[at] * seconds)] += 1
    return sizes


def _usual_seconds(ranks: Sequence[RankFilling]) -> dict[int, Passes]:
    """Seconds of a block of each kind in either pass, on average over those that were found."""
    found: dict[int, list[Passes]] = {}
    for column in (column for rank in ranks for column in rank.inner):
        found.setdefault(column.kind, []).append(_passes(column))
    sums = {kind: (*_summed(passes), len(passes)) for kind, passes in found.items()}
    return {kind: (ahead / count, back / count) for kind, (ahead, back, count) in sums.items()}


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
