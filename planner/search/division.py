"""From ways to run a block to whole stages, and from stages to a pipeline.

A stage of n blocks runs some of them one way (fast) and the rest another (lean), just as many lean ones as its memory
asks for. So every number of blocks has a price on every stage, and the blocks are divided by dynamic programming:

    blocks      0 ..... j-n ... j ..... N         done_s(j) = min over n of done_{s-1}(j-n) + part_s(n)
    stages      |  s-1  |   s   |                 over the n that keep stage s busy no longer than a given time

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

Array = NDArray[np.float64]


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
    """Inner blocks of one chunk: `lean` of them run as column `second` of the pool, the rest as column `first`;
    `variant` is the choice for what the rank holds beside them."""

    variant: int
    first: int
    second: int
    lean: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Filled:
    """The best fillings of a rank for 0 ... N inner blocks a chunk.

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

    def filling(self, blocks: int) -> Filling:
        first, second = self.pairs[int(self.pair[blocks])]
        return Filling(variant=int(self.variant[blocks]), first=first, second=second, lean=int(self.lean[blocks]))

    def or_else(self, other: "Filled", variant: int) -> "Filled":
        """For every number of blocks the faster of the two."""
        better = other.busy < self.busy
        fields = ("part", "step", "busy", "peak", "beside", "pair", "lean")
        taken = {name: np.where(better, getattr(other, name), getattr(self, name)) for name in fields}
        return replace(
            self, **taken, least=np.minimum(self.least, other.least), variant=np.where(better, variant, self.variant)
        )


def fill_best(variants: Sequence[Rank], pool: Sequence[Column], blocks: int, weight: float, capacity: float) -> Filled:
    """`fill` with the best of several choices for what the rank holds beside its inner blocks."""
    found = fill(variants[0], pool, blocks, weight, capacity)
    for place, rank in enumerate(variants[1:], start=1):
        found = found.or_else(fill(rank, pool, blocks, weight, capacity), place)
    return found


def fill(rank: Rank, pool: Sequence[Column], blocks: int, weight: float, capacity: float) -> Filled:
    """Price every number of inner blocks up to `blocks`, with the columns of the pool, at most two at a time.

    A rank is busy for `weight` (the number of micro-batches) times its seconds for one, and once those per step.

    The lean ones come first in a stage: where they are recomputed, nothing received needs to be kept. An empty pool
    stands for a model without inner blocks.
    """
    pool = pool or [_NOTHING]
    counts = np.arange(blocks + 1, dtype=np.float64)[None, :]
    outer = _Cost.of_ends(rank, weight)
    costs = [_Cost.of_block(rank, column, weight) for column in pool]
    pairs = [(a, b) for a, x in enumerate(costs) for b, y in enumerate(costs) if a == b or y.leaner(x)]
    one, two = ([costs[pair[side]] for pair in pairs] for side in (0, 1))

    def rows(side: list[_Cost], field: str) -> Array:
        return np.array([getattr(cost, field) for cost in side])[:, None]

    same = np.array([a == b for a, b in pairs])[:, None]
    some = np.array([rank.handing_over([pool[b].recompute, pool[a].recompute]) for a, b in pairs])[:, None]
    beside = np.where(counts > 0, some, rank.handing_over([]))
    at_once = np.maximum(np.maximum(rows(one, "replay"), rows(two, "replay")), outer.replay)
    at_once = at_once + np.maximum(np.maximum(rows(one, "transient"), rows(two, "transient")), outer.transient)
    held = outer.memory + beside + np.where(counts > 0, at_once, outer.replay + outer.transient)
    over = held + counts * rows(one, "memory") - capacity
    saved = rows(one, "memory") - rows(two, "memory")
    lean = np.where(same, 0.0, np.maximum(1.0, np.ceil(over / np.where(same, 1.0, saved) - 1e-9)))
    fits = np.where(same, over <= FITS * capacity, lean <= counts - 1)
    lean = np.where(fits, lean, 0.0)
    busy = outer.busy + counts * rows(one, "busy") + lean * (rows(two, "busy") - rows(one, "busy"))
    busy = np.where(fits, busy, math.inf)
    best = busy.argmin(axis=0)
    chosen = lean[best, np.arange(blocks + 1)]
    fitting = np.isfinite(busy.min(axis=0))

    def total(field: str, base: float) -> Array:
        first, second = rows(one, field)[best, 0], rows(two, field)[best, 0]
        return np.where(fitting, base + counts[0] * first + chosen * (second - first), math.inf)

    return Filled(
        part=total("part", outer.part),
        step=total("step", outer.step),
        busy=total("busy", outer.busy),
        peak=total("memory", 0.0) + held[best, np.arange(blocks + 1)],
        beside=beside[best, np.arange(blocks + 1)],
        least=np.where(same, held + counts * rows(one, "memory"), math.inf).min(axis=0),
        variant=np.zeros(blocks + 1, dtype=np.intp),
        pair=best,
        lean=chosen.astype(np.intp),
        pairs=tuple(pairs),
    )


PACES = 64
"""Paces of the slowest rank that are tried, quickest first; the first or second is nearly always best."""

FITS = 1e-9
"""A peak this much above the capacity, relatively, still fits: sums in another order differ by less."""

_NOTHING = Column(recompute=False, candidates={}, kept=frozenset(), amounts=Amounts())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """What one more inner block in every chunk costs a rank, or what it holds beside them."""

    part: float
    step: float
    busy: float
    memory: float
    replay: float
    transient: float

    @staticmethod
    def of_block(rank: Rank, column: Column, weight: float) -> "_Cost":
        a = column.amounts
        return _Cost(
            part=rank.chunks * a.part,
            step=rank.chunks * a.step,
            busy=rank.chunks * (weight * a.part + a.step),
            memory=rank.chunks * a.fixed + rank.in_flight * a.live,
            replay=a.replay,
            transient=a.transient,
        )

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

    def leaner(self, other: "_Cost") -> bool:
        """Whether taking this one in place of the other can make a stage fit, at a price."""
        return self.memory < other.memory and self.busy > other.busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Inner blocks of a chunk of every rank, and the seconds of a step."""

    blocks: tuple[int, ...]
    seconds: float


def divide(
    ranks: Sequence[Filled],
    least: Sequence[int],
    blocks: int,
    *,
    micro_batches: int,
    chunks: int,
    equal: bool,
    cutoff: float = math.inf,
) -> Division | None:
    """The fastest division of `blocks` inner blocks a virtual stage row over the ranks; None if none fits.

    Args:
        ranks: prices of every number of inner blocks, of each rank.
        least: the fewest inner blocks of each rank.
        equal: whether `blocks` is given already, the same for each rank, and only its price is asked for.
        cutoff: divisions that take longer are of no interest.
    """
    if equal:
        counts = tuple(blocks for _ in ranks)
        seconds = step_seconds(ranks, counts, micro_batches, chunks)
        return Division(blocks=counts, seconds=seconds) if seconds < math.inf else None
    if len(ranks) == 1:
        return divide(ranks, least, blocks, micro_batches=micro_batches, chunks=chunks, equal=True)
    slowest = np.unique(np.concatenate([rank.busy[np.isfinite(rank.busy)] for rank in ranks]))
    low = int(np.searchsorted(slowest, _least_pace(ranks, least, blocks, slowest)))
    best: Division | None = None
    floor = math.inf
    for pace in slowest[low : low + PACES].tolist():
        found = _within(ranks, least, blocks, pace)
        if found is None:
            continue
        seconds = step_seconds(ranks, found, micro_batches, chunks)
        if best is None or seconds < best.seconds:
            best = Division(blocks=found, seconds=seconds)
        if floor == math.inf:
            free = _within(ranks, least, blocks, math.inf)
            assert free is not None
            floor = math.fsum(rank.part[n] for rank, n in zip(ranks, free, strict=True)) / chunks
        if pace * (1 - 1 / (micro_batches * chunks)) + floor >= min(best.seconds, cutoff):
            break
    return best


def step_seconds(ranks: Sequence[Filled], blocks: Sequence[int], micro_batches: int, chunks: int) -> float:
    """Seconds of a step of a division (costmodels.schedules.step_time)."""
    parts = [float(rank.part[n]) for rank, n in zip(ranks, blocks, strict=True)]
    steps = [float(rank.step[n]) for rank, n in zip(ranks, blocks, strict=True)]
    return (micro_batches - 1 / chunks) * max(parts) + math.fsum(parts) / chunks + max(steps)


def most_blocks(rank: Filled, pace: float) -> int:
    """The most inner blocks with which a rank is busy no longer than `pace`; -1 if not even none."""
    fitting = np.flatnonzero(rank.busy <= pace)
    return int(fitting[-1]) if fitting.size else -1


def _least_pace(ranks: Sequence[Filled], least: Sequence[int], blocks: int, paces: Array) -> float:
    """The least busy time that leaves room for all blocks; infinite where none does."""
    low, high = 0, len(paces)
    while low < high:
        middle = (low + high) // 2
        most = [most_blocks(rank, paces[middle]) for rank in ranks]
        enough = sum(most) >= blocks and all(m >= n for m, n in zip(most, least, strict=True))
        low, high = (low, middle) if enough else (middle + 1, high)
    return float(paces[low]) if low < len(paces) else math.inf


def _within(ranks: Sequence[Filled], least: Sequence[int], blocks: int, pace: float) -> tuple[int, ...] | None:
    """The division of the least sum of seconds per micro-batch in which no rank is busy longer than `pace`."""
    done = np.full(blocks + 1, math.inf)
    done[0] = 0.0
    taken = []
    at = np.arange(blocks + 1)
    before = at[:, None] - at[None, :]  # blocks on earlier ranks, given blocks so far (rows) and here (columns)
    for rank, fewest in zip(ranks, least, strict=True):
        here = np.where((rank.busy[: blocks + 1] <= pace) & (at >= fewest), rank.part[: blocks + 1], math.inf)
        sums = np.where(before >= 0, done[np.maximum(before, 0)], math.inf) + here[None, :]
        taken.append(sums.argmin(axis=1))
        done = sums[at, taken[-1]]
    if not math.isfinite(done[blocks]):
        return None
    left, found = blocks, []
    for choice in reversed(taken):
        found.append(int(choice[left]))
        left -= found[-1]
    return tuple(reversed(found))
