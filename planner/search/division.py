"""From ways to run a block to whole stages, and from stages to a pipeline.

A stage of n blocks runs some of them one way (fast) and the rest another (lean), just as many lean ones as its memory
asks for. So every stretch of blocks has a price on every stage, and the blocks are divided by dynamic programming:

    blocks      0 ..... j-n ... j ..... N         done_s(j) = min over n of done_{s-1}(j-n) + part_s(j-n ... j)
    stages      |  s-1  |   s   |                 over the n that keep stage s busy no longer than a given time

Blocks may be of several kinds: a way then says how to run a block of each, and stretches that hold the same kinds in
the same order cost the same (`planner.search.stretches`).

The step lasts (m - 1/v) max t + sum t / v + max u (costmodels.schedules), so the longest busy time that is allowed is
raised from the least possible until the sum can no longer make up for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.search.pieces import Amounts, Column
from planner.search.stretches import Stretches

Array = NDArray[np.float64]
Way = tuple[Column, ...]
"""How to run a block of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What one rank of the pipeline holds beside its inner blocks, and how it is run.

    Attributes:
        chunks: virtual stages on the rank; its inner blocks are as many and run alike in each.
        in_flight: micro-batches whose activations the chunks hold, all together.
        ends: what the first and the last chunk of the model have on top: amounts, and in how many flights.
        received: bytes that a chunk keeps of what it receives, times micro-batches in flight, if its first block is not
            recomputed.
        ending: bytes that the last block keeps on top, if it is not recomputed, times its flights.
        outliving: bytes that a recomputed block hands to one that is not, which keeps them, times flights.
        before, after: whether the block in the head, and the one in the tail, is recomputed; None where none is there.
        seconds: transfers from and to other ranks, per micro-batch.
    """

    chunks: int
    in_flight: float
    ends: tuple[tuple[Amounts, float], ...]
    received: float
    ending: float
    outliving: float
    before: bool | None
    after: bool | None
    seconds: float

    def handing_over(self, blocks: Sequence[bool]) -> float:
        """Bytes that inner blocks, recomputed or not, in the order of the model, hold of what others hand to them."""
        ways = [way for way in (self.before, *blocks, self.after) if way is not None]
        if not ways:
            return self.received + self.ending
        outliving = sum(first and not second for first, second in pairwise(ways)) * self.outliving
        return (0.0 if ways[0] else self.received) + (0.0 if ways[-1] else self.ending) + outliving


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Inner blocks of one chunk: `lean` of them run in the way `second` of the pool, the rest in the way `first`;
    `variant` is the choice for what the rank holds beside them."""

    variant: int
    first: int
    second: int
    lean: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Filled:
    """The best fillings of a rank for every stretch of inner blocks a chunk.

    Seconds per micro-batch, per step and busy in a whole step, bytes at the peak and, of them, `beside` the columns for
    what other blocks hand over; infinite where nothing fits.
    """

    part: Array
    step: Array
    busy: Array
    peak: Array
    beside: Array
    least: Array  # bytes without which no number of blocks fits
    variant: NDArray[np.intp]
    pair: NDArray[np.intp]
    lean: NDArray[np.intp]
    pairs: tuple[tuple[int, int], ...]

    def filling(self, stretch: int) -> Filling:
        first, second = self.pairs[int(self.pair[stretch])]
        return Filling(variant=int(self.variant[stretch]), first=first, second=second, lean=int(self.lean[stretch]))

    def or_else(self, other: "Filled", variant: int) -> "Filled":
        """For every stretch the faster of the two."""
        better = other.busy < self.busy
        fields = ("part", "step", "busy", "peak", "beside", "pair", "lean")
        taken = {name: np.where(better, getattr(other, name), getattr(self, name)) for name in fields}
        return replace(
            self, **taken, least=np.minimum(self.least, other.least), variant=np.where(better, variant, self.variant)
        )


def fill_best(
    variants: Sequence[Rank], pool: Sequence[Way], stretches: Stretches, weight: float, capacity: float
) -> Filled:
    """`fill` with the best of several choices for what the rank holds beside its inner blocks."""
    found = fill(variants[0], pool, stretches, weight, capacity)
    for place, rank in enumerate(variants[1:], start=1):
        found = found.or_else(fill(rank, pool, stretches, weight, capacity), place)
    return found


def fill(rank: Rank, pool: Sequence[Way], stretches: Stretches, weight: float, capacity: float) -> Filled:
    """Price every stretch of inner blocks, with the ways of the pool, at most two at a time.

    A rank is busy for `weight` (the number of micro-batches) times its seconds for one, and once those per step.

    The lean ones come first in a stage: where they are recomputed, nothing received needs to be kept. An empty pool
    stands for a model without inner blocks.
    """
    mixed = _Mixed(rank, pool, stretches, weight)
    outer = _Cost.of_ends(rank, weight)
    at_once = np.maximum(mixed.largest("replay"), outer.replay) + np.maximum(
        mixed.largest("transient"), outer.transient
    )
    some = stretches.lengths[None, :] > 0
    beside = np.where(some, mixed.beside(), rank.handing_over([]))
    held = outer.memory + beside + np.where(some, at_once, outer.replay + outer.transient)
    all_fast = mixed.total("memory")
    over = held + all_fast - capacity
    same = (mixed.fast == mixed.lean)[:, None]
    lean = np.where(same, 0, mixed.saving(over))
    fits = np.where(same, over <= FITS * capacity, lean <= stretches.lengths[None, :] - 1)
    lean = np.where(fits, lean, 0)
    busy = outer.busy + mixed.total("busy") + mixed.change("busy", lean)
    busy = np.where(fits, busy, math.inf)
    best = busy.argmin(axis=0)
    at = np.arange(len(stretches.lengths))
    fitting = np.isfinite(busy.min(axis=0))
    chosen = lean[best, at]

    def total(field: str, base: float) -> Array:
        return np.where(fitting, base + mixed.mixture(field, best, chosen), math.inf)

    return Filled(
        part=total("part", outer.part),
        step=total("step", outer.step),
        busy=total("busy", outer.busy),
        peak=total("memory", 0.0) + held[best, at],
        beside=beside[best, at],
        least=np.where(same, held + all_fast, math.inf).min(axis=0),
        variant=np.zeros(len(at), dtype=np.intp),
        pair=best,
        lean=chosen,
        pairs=tuple(zip(mixed.fast.tolist(), mixed.lean.tolist(), strict=True)),
    )


class _Mixed:
    """What every stretch comes to where the blocks at its beginning run in one way of the pool, `lean`, and the others
    in another, `fast`; arrays are of pairs of ways and of stretches."""

    def __init__(self, rank: Rank, pool: Sequence[Way], stretches: Stretches, weight: float) -> None:
        self.rank, self.stretches = rank, stretches
        kinds = len(stretches.counts)
        pool = pool or [()]
        amounts = np.array(
            [[[getattr(column.amounts, name) for name in _AMOUNTS] for column in way] for way in pool], dtype=np.float64
        ).reshape(len(pool), kinds, len(_AMOUNTS))
        part, step, fixed, live, replay, transient = np.moveaxis(amounts, -1, 0)
        self.costs = {
            "part": rank.chunks * part,
            "step": rank.chunks * step,
            "busy": rank.chunks * (weight * part + step),
            "memory": rank.chunks * fixed + rank.in_flight * live,
            "replay": replay,
            "transient": transient,
        }
        self.recompute = np.array([[column.recompute for column in way] for way in pool], dtype=np.bool_)
        self.recompute = self.recompute.reshape(len(pool), kinds)
        self.fast, self.lean = self._pairs()

    def _pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Every way with itself, and with each that can make a stage fit in its place, at a price: that takes no more
        memory for any kind of block, and less for one."""
        memory, busy = self.costs["memory"], self.costs["busy"]
        no_more = (memory[None, :, :] <= memory[:, None, :]).all(axis=-1)
        pays = ((memory[None, :, :] < memory[:, None, :]) & (busy[None, :, :] > busy[:, None, :])).any(axis=-1)
        fast, lean = np.nonzero((no_more & pays) | np.eye(len(memory), dtype=np.bool_))
        return fast, lean

    def total(self, field: str) -> Array:
        """Of stretches whose blocks all run in the first way."""
        found: Array = (self.costs[field] @ self.stretches.numbers)[self.fast]
        return found

    def change(self, field: str, lean: NDArray[np.intp]) -> Array:
        """What `lean` blocks in the second way add."""
        more = self.costs[field][self.lean] - self.costs[field][self.fast]
        found = np.zeros(lean.shape)
        for kind, (along, start) in enumerate(zip(self.stretches.along, self.stretches.before, strict=True)):
            found += more[:, kind, None] * (along[self.stretches.starts + lean] - start)
        return found

    def mixture(self, field: str, pair: NDArray[np.intp], lean: NDArray[np.intp]) -> Array:
        """Of every stretch in one of the pairs, with so many in the second way."""
        fast = self.costs[field][self.fast[pair]].T
        more = self.costs[field][self.lean[pair]].T - fast
        found: Array = (fast * self.stretches.numbers).sum(axis=0)
        changed = more * (self.stretches.along[:, self.stretches.starts + lean] - self.stretches.before)
        total: Array = found + changed.sum(axis=0)
        return total

    def saving(self, over: Array) -> NDArray[np.intp]:
        """The fewest blocks in the second way that save so many bytes, 1 at least; more than there are if none do."""
        saved = self.costs["memory"][self.fast] - self.costs["memory"][self.lean]
        sums, starts = saved @ self.stretches.along, self.stretches.starts
        wanted = sums[:, starts] + over - 1e-9 * saved.max(axis=1, initial=0.0)[:, None]
        found = np.ones(over.shape, dtype=np.intp)
        for row in np.flatnonzero(self.fast != self.lean):
            found[row] = sums[row].searchsorted(wanted[row]) - starts
        return np.maximum(found, 1)

    def largest(self, field: str) -> Array:
        """The most that a block of a kind in the stretch comes to, in either way."""
        rows = np.maximum(self.costs[field][self.fast], self.costs[field][self.lean])
        found = np.zeros((len(rows), len(self.stretches.lengths)))
        for kind, number in enumerate(self.stretches.numbers):
            np.maximum(found, np.where(number > 0, rows[:, kind, None], 0.0), out=found)
        return found

    def beside(self) -> Array:
        """Bytes that blocks hold of what others hand to them, at most, however many are run in the second way; with
        blocks of one kind it is just that."""
        ways, which = np.unique(
            np.concatenate([self.recompute[self.fast], self.recompute[self.lean]], axis=1), axis=0, return_inverse=True
        )
        kinds = len(self.stretches.counts)
        found = np.array([self._handed(flags[:kinds], flags[kinds:]) for flags in ways])
        spread: Array = found[which.reshape(-1)]
        return spread

    def _handed(self, fast: NDArray[np.bool_], lean: NDArray[np.bool_]) -> Array:
        """The same for one pair, whose ways recompute these kinds of blocks."""
        rank, held = self.rank, self.stretches
        some = np.flatnonzero(held.lengths)
        found = np.zeros(len(held.lengths))
        if not some.size:
            return found
        behind, ahead = fast[list(held.kinds)], lean[list(held.kinds)]
        first, last = held.starts[some], held.starts[some] + held.lengths[some] - 1
        changes = (ahead[:-1] & ~ahead[1:]) | (behind[:-1] & ~behind[1:])
        between = ahead[:-1] & ~behind[1:] & ~changes  # where the second way ends
        sums, once = (np.concatenate(([0], np.cumsum(each))) for each in (changes, between))
        number = sums[last] - sums[first] + (once[last] > once[first])
        number += bool(rank.before) & ~ahead[first]
        number += behind[last] & (rank.after is False)
        keeps_first = ~ahead[first] if rank.before is None else np.full(len(some), not rank.before)
        keeps_last = ~behind[last] if rank.after is None else np.full(len(some), not rank.after)
        found[some] = keeps_first * rank.received + keeps_last * rank.ending + number * rank.outliving
        return found


_AMOUNTS = ("part", "step", "fixed", "live", "replay", "transient")

PACES = 64
"""Paces of the slowest rank that are tried, quickest first; the first or second is nearly always best."""

FITS = 1e-9
"""A peak this much above the capacity, relatively, still fits: sums in another order differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """What a rank holds beside its inner blocks."""

    part: float
    step: float
    busy: float
    memory: float
    replay: float
    transient: float

    @staticmethod
    def of_ends(rank: Rank, weight: float) -> "_Cost":
        part = rank.seconds + math.fsum(a.part for a, _ in rank.ends)
        step = math.fsum(a.step for a, _ in rank.ends)
        return _Cost(
            part=part,
            step=step,
            busy=weight * part + step,
            memory=math.fsum(a.fixed + a.live * flights for a, flights in rank.ends),
            replay=max((a.replay for a, _ in rank.ends), default=0.0),
            transient=max((a.transient for a, _ in rank.ends), default=0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Inner blocks of a chunk of every rank, the stretches that they are, and the seconds of a step."""

    blocks: tuple[int, ...]
    stretches: tuple[int, ...]
    seconds: float


def divide(
    ranks: Sequence[Filled],
    least: Sequence[int],
    stretches: Stretches,
    *,
    micro_batches: int,
    chunks: int,
    equal: int | None = None,
    cutoff: float = math.inf,
) -> Division | None:
    """The fastest division of the inner blocks over the ranks; None if none fits.

    Args:
        ranks: prices of every stretch of inner blocks, of each rank.
        least: the fewest inner blocks of each rank.
        stretches: of the inner blocks.
        equal: blocks of a chunk, if that is given already, the same for each rank, and only its price is asked for.
        cutoff: divisions that take longer are of no interest.
    """
    if len(ranks) == 1 and equal is None:
        equal = stretches.blocks
    if equal is not None:
        return _priced(ranks, (equal,) * len(ranks), stretches, micro_batches, chunks)
    slowest = np.unique(np.concatenate([rank.busy[np.isfinite(rank.busy)] for rank in ranks]))
    low = int(np.searchsorted(slowest, _least_pace(ranks, least, stretches, slowest)))
    best: Division | None = None
    floor = math.inf
    for pace in slowest[low : low + PACES].tolist():
        blocks = _within(ranks, least, stretches, pace)
        found = None if blocks is None else _priced(ranks, blocks, stretches, micro_batches, chunks)
        if found is None:
            continue
        if best is None or found.seconds < best.seconds:
            best = found
        if floor == math.inf:
            free = _within(ranks, least, stretches, math.inf)
            assert free is not None
            held = _stretches(free, stretches)
            floor = math.fsum(rank.part[n] for rank, n in zip(ranks, held, strict=True)) / chunks
        if pace * (1 - 1 / (micro_batches * chunks)) + floor >= min(best.seconds, cutoff):
            break
    return best


def _priced(
    ranks: Sequence[Filled], blocks: tuple[int, ...], stretches: Stretches, micro_batches: int, chunks: int
) -> Division | None:
    held = _stretches(blocks, stretches)
    seconds = step_seconds(ranks, held, micro_batches, chunks)
    return Division(blocks=blocks, stretches=held, seconds=seconds) if seconds < math.inf else None


def _stretches(blocks: Sequence[int], stretches: Stretches) -> tuple[int, ...]:
    """Which stretches so many blocks for each rank are, one after the other."""
    start, found = 0, []
    for count in blocks:
        found.append(stretches.of(start, count))
        start += count
    return tuple(found)


def step_seconds(ranks: Sequence[Filled], held: Sequence[int], micro_batches: int, chunks: int) -> float:
    """Seconds of a step in which every rank holds a stretch of blocks (costmodels.schedules.step_time)."""
    parts = [float(rank.part[n]) for rank, n in zip(ranks, held, strict=True)]
    steps = [float(rank.step[n]) for rank, n in zip(ranks, held, strict=True)]
    return (micro_batches - 1 / chunks) * max(parts) + math.fsum(parts) / chunks + max(steps)


def _least_pace(ranks: Sequence[Filled], least: Sequence[int], stretches: Stretches, paces: Array) -> float:
    """The least busy time that leaves room for all blocks; infinite where none does."""
    low, high = 0, len(paces)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _room(ranks, least, stretches, paces[middle]) else (middle + 1, high)
    return float(paces[low]) if low < len(paces) else math.inf


def _room(ranks: Sequence[Filled], least: Sequence[int], stretches: Stretches, pace: float) -> bool:
    """Whether the ranks have room for all blocks where none is busy longer than `pace`: each takes as many as it can,
    but for those that later ones must have."""
    start, later = 0, sum(least)
    for rank, fewest in zip(ranks, least, strict=True):
        later -= fewest
        held = stretches.number[start, start : stretches.blocks - later + 1]
        fitting = np.flatnonzero(rank.busy[held] <= pace)
        if not fitting.size or fitting[-1] < fewest:
            return False
        start += int(fitting[-1])
    return start == stretches.blocks


def _within(ranks: Sequence[Filled], least: Sequence[int], stretches: Stretches, pace: float) -> tuple[int, ...] | None:
    """The division of the least sum of seconds per micro-batch in which no rank is busy longer than `pace`."""
    blocks = stretches.blocks
    done = np.full(blocks + 1, math.inf)
    done[0] = 0.0
    taken = []
    at = np.arange(blocks + 1)
    before = at[:, None] - at[None, :]  # blocks on earlier ranks, given blocks so far (rows) and here (columns)
    start = np.maximum(before, 0)
    held = stretches.number[start, np.minimum(start + at[None, :], blocks)]
    for rank, fewest in zip(ranks, least, strict=True):
        price = np.where((rank.busy <= pace) & (stretches.lengths >= fewest), rank.part, math.inf)
        sums = np.where(before >= 0, done[start], math.inf) + price[held]
        taken.append(sums.argmin(axis=1))
        done = sums[at, taken[-1]]
    if not math.isfinite(done[blocks]):
        return None
    left, found = blocks, []
    for choice in reversed(taken):
        found.append(int(choice[left]))
        left -= found[-1]
    return tuple(reversed(found))
