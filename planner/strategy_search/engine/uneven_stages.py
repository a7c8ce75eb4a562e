"""Virtual stages with unequal numbers of blocks, from the plan that the search found for one range of blocks on each
rank.

    found, rank by rank     b B b b b | b B b b b     B: a lean block, the recomputed one of five
    virtual stages          0 1 0 1, rank r holds stages r, p + r, 2p + r, ...: of 2 and 3 blocks, 3 and 2

A rank keeps the number of blocks, and of lean ones, that the search found: with blocks of one kind it takes as long and
holds as much as the search counted. The sizes of its stages differ by at most one block. Lean blocks are dealt to the
stages of a rank one by one, and come first in each.

With blocks of several kinds a rank holds other blocks than in the search. Then blocks are moved from one stage to
another as long as more ranks have the memory for theirs, the busiest rank gets less busy, or stages more equal.

Ranks that are equally busy still wait for each other if their stages take unequally long, for a tenth of the step and
more. They wait least if the larger stages follow each other, from one rank to the next and back to the first:

    larger stages last      1 1 1 1 2 2 2 2     waits for 9% (four ranks of two stages, 32 micro-batches)
    one after the other     1 1 2 2 2 2 1 1     2.6%

So a few choices of the larger stages are simulated: the same stage of every rank, or the next one for the first half of
the ranks. The waiting time that remains is not part of any objective, so it is added to it.

A rank may lack memory all the same; the prediction notices, and the search leaves more memory."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodels import schedule_orders, step_of_passes, step_time
from hardware_profiles import Seconds
from planner.limits import checked
from planner.plan.plan import INTERLEAVED
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.engine.outcome import RankFilling

Passes: TypeAlias = tuple[Seconds, Seconds]
"""Seconds of a micro-batch, forward and backward."""

_ROUNDS = 4
"""Micro-batches per rank with which ways to cut ranks into stages are compared."""

_ROUNDS_OF_MANY = 2
_MANY = 16
"""With more ranks than this, fewer micro-batches (`_ROUNDS_OF_MANY`) are used, as a step has many passes then."""

_DIGITS = 2
"""Digits to which the time of stages, in blocks, is rounded for the comparison."""

_SHARE_DIGITS = 4
"""Digits to which shares of a device's memory are rounded."""

_OVERFULL = 1e3
"""A rank that lacks as much memory as it has counts as so many times busier."""

_MOVES = 64
"""Maximum number of blocks that are moved from one stage to another."""

_LESS = 1e-9
"""Relative amount by which the busiest rank, or the unevenness of stages, has to improve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """Memory in shares of that of a device: of a block of each kind on each stage (stages, kinds), and of everything
    else on each rank; `kinds` of the blocks."""

    each: tuple[tuple[float, ...], ...]
    beside: tuple[float, ...]
    kinds: tuple[int, ...]

    @property
    def upto(self) -> NDArray[np.float64]:
        """What a stage would hold with all blocks before a border, (stages, borders)."""
        return np.array(self.each) @ self._blocks.T

    @property
    def _blocks(self) -> NDArray[np.float64]:
        """Blocks of each kind before a border, (borders, kinds)."""
        every = np.arange(len(self.each[0]))
        return np.concatenate((np.zeros((1, len(every))), np.cumsum(np.array(self.kinds)[:, None] == every, axis=0)))

    def lacking(self, borders: NDArray[np.intp]) -> NDArray[np.float64]:
        """What all ranks lack together, for stages between these blocks, (tries, stages + 1)."""
        along = self._blocks
        held = along[borders[:, 1:]] - along[borders[:, :-1]]  # (tries, stages, kinds)
        stages = (held * np.array(self.each)).sum(axis=2)
        ranks = stages.reshape(len(borders), -1, len(self.beside)).sum(axis=1) + np.array(self.beside)
        lacking: NDArray[np.float64] = np.maximum(ranks - 1, 0.0).sum(axis=1)
        return lacking


def uneven_stages(chain: Chain, ranks: Sequence[RankFilling], setting: Setting) -> list[tuple[Column, ...]]:
    """Inner blocks of the virtual stages of every rank, stage by stage in the order of the model. A stage holds at
    least one block; the first and the last stage, which also hold what comes before and after the blocks, may hold
    none."""
    virtual = setting.chunks
    names = list(dict.fromkeys(piece.kind for piece in chain.inner))
    kinds = [names[kind] for kind in chain.block_ranges.kinds]
    usual = _usual_seconds(ranks)
    ends = [(0.0, 0.0)] * (len(ranks) * virtual)
    for at, column in ((0, ranks[0].head), (-1, ranks[-1].tail)):
        ends[at] = (0.0, 0.0) if column is None else _passes(column)
    mean = math.fsum(math.fsum(usual[kind]) for kind in kinds) / len(kinds)
    blocks = tuple([_to(usual[kind], mean) for kind in kinds])
    counts = tuple([len(rank.inner) for rank in ranks])
    memory = _memory(ranks, setting, names, chain.block_ranges.kinds)
    sizes = _best_sizes(counts, blocks, tuple([_to(end, mean) for end in ends]), len(names), memory)
    borders = [0, *itertools.accumulate(sizes)]
    stages = [kinds[start:stop] for start, stop in itertools.pairwise(borders)]
    every = [column for rank in ranks for column in rank.inner]
    found: list[tuple[Column, ...]] = [()] * len(stages)
    for number, rank in enumerate(ranks):
        places = range(number, len(stages), len(ranks))
        for place, columns in zip(places, _dealt(rank.inner, every, [stages[at] for at in places]), strict=True):
            found[place] = columns
    return found


def _memory(
    ranks: Sequence[RankFilling], setting: Setting, names: Sequence[int], kinds: tuple[int, ...]
) -> _Memory | None:
    """Memory of ranks that run blocks as they were found; None if it is not limited. `kinds` are those of the blocks,
    by their places in `names`."""
    if math.isinf(setting.capacity):
        return None
    every = [column for rank in ranks for column in rank.inner]
    each = [[0.0] * len(names) for _ in range(len(ranks) * setting.chunks)]
    beside = []
    for number, rank in enumerate(ranks):
        flights = setting.flights(number)
        inner = math.fsum(column.amounts.fixed + flights * column.amounts.live for column in rank.inner)
        beside.append(_share(rank.peak - inner, setting))
        for kind, name in enumerate(names):
            ways = [column for column in rank.inner if column.kind == name]
            ways = ways or [column for column in every if column.kind == name]
            fixed, live = (
                math.fsum(getattr(column.amounts, field) for column in ways) / max(1, len(ways))
                for field in ("fixed", "live")
            )
            for chunk, number_of in enumerate(setting.in_flight[number]):
                each[chunk * len(ranks) + number][kind] = _share(fixed + number_of * live, setting)
    return _Memory(each=tuple(map(tuple, each)), beside=tuple(beside), kinds=kinds)


def _share(nbytes: float, setting: Setting) -> float:
    return round(nbytes / setting.capacity, _SHARE_DIGITS)


def waiting_of_uneven(chain: Chain, ranks: Sequence[RankFilling], setting: Setting) -> Seconds:
    """Seconds of a step that ranks wait for each other because their stages take unequally long, without communication
    and without the work that is done once per step."""
    stages = [list(inner) for inner in uneven_stages(chain, ranks, setting)]
    stages[0] += [one for one in (ranks[0].head,) if one is not None]
    stages[-1] += [one for one in (ranks[-1].tail,) if one is not None]
    passes = [_summed([_passes(column) for column in own]) for own in stages]
    return _waiting(passes, setting.ranks, setting.micro_batches)


@lru_cache(maxsize=64)
def _best_sizes(
    ranks: tuple[int, ...], blocks: tuple[Passes, ...], ends: tuple[Passes, ...], kinds: int, memory: _Memory | None
) -> tuple[int, ...]:
    """Inner blocks of every stage, for ranks with these numbers of blocks: of the ways to choose the stages with one
    block more, the one with which ranks lack the least memory and wait least for each other."""
    p, virtual = len(ranks), len(ends) // len(ranks)
    total, beside = [math.fsum(one) for one in blocks], [math.fsum(one) for one in ends]
    ways = [[virtual - 1] * (p - 1) + [0]]
    for first in range(virtual):
        behind, half = (first + 1) % virtual, p // 2
        ways += [[first] * p, [behind] * half + [first] * (p - half)]
    found = dict[tuple[int, ...], tuple[float, Seconds]]()
    for way in ways:
        sizes = _sizes(ranks, beside, math.fsum(total) / len(total), way)
        if kinds > 1:
            sizes = _levelled(sizes, total, beside, p, memory)
        if tuple(sizes) not in found:
            borders = [0, *itertools.accumulate(sizes)]
            lacking = 0.0 if memory is None else float(memory.lacking(np.array([borders]))[0])
            own = [_summed(blocks[start:stop]) for start, stop in itertools.pairwise(borders)]
            passes = [_summed(pair) for pair in zip(own, ends, strict=True)]
            found[tuple(sizes)] = lacking, _waiting(passes, p, p * (_ROUNDS if p <= _MANY else _ROUNDS_OF_MANY))
    return min(found, key=lambda sizes: found[sizes])


def _to(passes: Passes, mean: Seconds) -> Passes:
    """Shares of the average time of a block, rounded so that equal cases are simulated once."""
    ahead, back = passes
    return (round(ahead / mean, _DIGITS), round(back / mean, _DIGITS)) if mean else (0.0, 0.0)


def _passes(column: Column) -> Passes:
    return column.amounts.part - column.amounts.backward, column.amounts.backward


def _summed(several: Sequence[Passes]) -> Passes:
    return math.fsum(ahead for ahead, _ in several), math.fsum(back for _, back in several)


def _waiting(stages: Sequence[Passes], ranks: int, micro_batches: int) -> Seconds:
    """By how much a step of these stages, pass by pass (`costmodels.step_of_passes`), is longer than the sum by the
    busy time of each rank."""
    virtual = len(stages) // ranks
    busy = [math.fsum(_summed(stages[rank::ranks])) for rank in range(ranks)]
    counted = step_time(busy, [0.0] * ranks, micro_batches, virtual)
    taken = step_of_passes(stages, schedule_orders(INTERLEAVED, ranks, micro_batches, virtual=virtual))
    return max(0.0, taken - float(counted))


def _sizes(blocks: Sequence[int], ends: Sequence[float], seconds: float, first: Sequence[int]) -> list[int]:
    """Inner blocks of every stage, for ranks with these numbers of blocks that take `seconds` each; `ends` has the
    other seconds of stages. Each block goes to the quickest stage of its rank; of equal stages to the `first` of that
    rank, or else to the one before."""
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
    """Average seconds of a block of each kind in either pass, over the blocks that were found."""
    found: dict[int, list[Passes]] = {}
    for column in (column for rank in ranks for column in rank.inner):
        found.setdefault(column.kind, []).append(_passes(column))
    sums = {kind: (*_summed(passes), len(passes)) for kind, passes in found.items()}
    return {kind: (ahead / count, back / count) for kind, (ahead, back, count) in sums.items()}


def _levelled(
    sizes: Sequence[int], seconds: Sequence[float], ends: Sequence[float], ranks: int, memory: _Memory | None
) -> list[int]:
    """Sizes of stages for blocks that take `seconds` each: blocks are moved, one after the other, to the stage where
    ranks lack the least memory, the busiest is least busy, and stages are most equal."""
    sums, stages = np.concatenate(([0.0], np.cumsum(seconds))), len(sizes)
    upto = np.broadcast_to(sums, (stages, len(sums)))
    beside = np.reshape(ends, (-1, ranks)).sum(axis=0)

    def unevenness(counts: NDArray[np.intp]) -> NDArray[np.float64]:  # (tries, stages)
        borders = np.concatenate((np.zeros((len(counts), 1), dtype=np.intp), counts.cumsum(axis=1)), axis=1)
        own = sums[borders[:, 1:]] - sums[borders[:, :-1]] + ends
        squares: NDArray[np.float64] = ((own / (float(sums[-1]) / len(seconds))) ** 2).sum(axis=1)
        return squares

    best = np.array(sizes, dtype=np.intp)
    (uneven,) = unevenness(best[None])
    fewest = np.ones(stages, dtype=np.intp)
    fewest[[0, -1]] = 0
    for _ in checked(range(_MOVES)):
        sources = np.flatnonzero(best > fewest)
        if not len(sources):
            break
        borders = np.concatenate(([0], best.cumsum()))
        slowest = (_after_moves(upto, borders, sources, ranks) + beside).max(axis=2)  # (sources, stages)
        if memory is not None:
            held = _after_moves(memory.upto, borders, sources, ranks) + np.array(memory.beside)
            slowest = slowest * (1 + _OVERFULL * np.maximum(held - 1, 0.0).sum(axis=2))
        places, targets = np.nonzero(slowest <= slowest.min() * (1 + _LESS))
        tried, rows = np.repeat(best[None], len(places), axis=0), np.arange(len(places))
        tried[rows, sources[places]] -= 1
        tried[rows, targets] += 1
        others = unevenness(tried)
        found, unmoved = int(others.argmin()), slowest[0, sources[0]]
        busiest = slowest[places[found], targets[found]]
        if busiest >= unmoved * (1 - _LESS) and others[found] >= uneven * (1 - _LESS):
            break
        best, uneven = tried[found], others[found]
    return [int(count) for count in best]


def _after_moves(
    upto: NDArray[np.float64], borders: NDArray[np.intp], sources: NDArray[np.intp], ranks: int
) -> NDArray[np.float64]:
    """Sums of every rank after a block has moved from each of some `sources` to each stage, (sources, stages, ranks).
    `upto` has the sum of a stage that would hold all blocks before a border, (stages, borders): a move to a later stage
    shifts all borders between the two by one block to the front, and a move to an earlier one to the back."""
    stages, targets = np.arange(len(upto)), np.arange(len(upto))[None, :, None]
    sums = (upto[stages, borders[1:]] - upto[stages, borders[:-1]]).reshape(-1, ranks).sum(axis=0)
    shifted = list[NDArray[np.float64]]()  # by which all borders up to one change sums if they are shifted
    inner, before, behind = borders[1:-1], stages[:-1], stages[1:]
    for by in (-1, 1):
        ends, change = np.clip(inner + by, 0, upto.shape[1] - 1), np.zeros((len(upto), ranks))
        change[behind, before % ranks] += upto[before, ends] - upto[before, inner]
        change[behind, behind % ranks] -= upto[behind, ends] - upto[behind, inner]
        shifted.append(change.cumsum(axis=0))
    front, back = shifted
    later = front[None] - front[sources][:, None]
    earlier = back[sources][:, None] - back[None]
    moved: NDArray[np.float64] = sums + np.where(targets > sources[:, None, None], later, earlier)
    return moved


def _dealt(own: Sequence[Column], every: Sequence[Column], stages: Sequence[Sequence[int]]) -> list[tuple[Column, ...]]:
    """The columns of the blocks in the stages of a rank, which have blocks of these kinds. They are those found for the
    rank, in the same shares, and those of `every` rank for a kind of which it had none."""
    found: list[list[Column | None]] = [[None] * len(stage) for stage in stages]
    for kind in sorted({kind for stage in stages for kind in stage}):
        left = [[at for at, one in enumerate(stage) if one == kind] for stage in stages]
        needed = sum(map(len, left))
        ways = [column for column in own if column.kind == kind]
        ways = ways or [column for column in every if column.kind == kind]
        for column, number in _numbers(ways, needed):
            for _ in range(number):  # to the stage with the fewest of them
                dealt = [sum(one is column for one in stage) for stage in found]
                stage = min((at for at, places in enumerate(left) if places), key=lambda at: (dealt[at], at))
                found[stage][left[stage].pop(0)] = column
    return [tuple(column for column in stage if column is not None) for stage in found]


def _numbers(ways: Sequence[Column], needed: int) -> list[tuple[Column, int]]:
    """How many of `needed` blocks run in each of some ways, in the same shares, the leaner ones rounded up."""
    distinct = {id(column): column for column in ways}
    counts = {key: sum(id(column) == key for column in ways) for key in distinct}
    found, left, of = list[tuple[Column, int]](), needed, len(ways)
    for key, column in distinct.items():  # lean ones come first
        number = min(left, math.ceil(left * counts[key] / of)) if of else left
        found.append((column, number))
        left, of = left - number, of - counts[key]
    return found
