"""Virtual stages of a rank that run unlike each other, each as its micro-batches in flight ask for.

    chunk              0     1     2     3        of rank 0 of 4, on average over the moments at which it is fullest
    in flight        7.8   5.8   3.8   1.8        micro-batches

The first chunk of a rank holds several times as much of a block as the last one, so a lean block saves most there.
Which way to run each block within a limit of memory is a knapsack: seconds against bytes. As blocks of a chunk cost the
same, the ways of interest are those on the lower hull of (bytes, seconds) of the chunk; going down it block after block
takes a step. Steps of all chunks are taken in the order of what a byte costs, until all fits: no choice takes less than
a fraction of the last step would (Dantzig, "Discrete-variable extremum problems", 1957), as far as bytes are sums.

What is held is counted at every moment, with what lives for a moment and what blocks hand over. Not good for: blocks of
several kinds, which run alike in all chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.mixture import FIELDS, Mixture, in_order, seconds_of
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.decomposition.stage_filling import FITS, Rank

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Step:
    """The blocks of a chunk that go from one way to the next, one after the other."""

    price: float
    chunk: int
    before: int
    behind: int


def free_chunks(
    rank: Rank,
    columns: Sequence[Column],
    blocks: int,
    moments: Sequence[Sequence[float]],
    micro_batches: int,
    capacity: float,
) -> Mixture | None:
    """About the quickest way to run `blocks` blocks of one kind in each chunk of a rank that fits, in some of the known
    `columns`; `moments` has the micro-batches in flight of every chunk whenever the rank may hold most. None where none
    is found. What is found has the columns of all chunks, one chunk after the other.
    """
    counted = np.array(moments, dtype=np.float64)
    chunks, limit = _Chunks(rank, columns, blocks, counted, micro_batches), capacity * (1 + FITS)
    found = chunks.within(limit, counted.mean(axis=0))
    if found is None:
        return None
    fullest = chunks.within(limit, (counted.mean(axis=0) + counted[chunks.held(found).moment]) / 2)
    every = [chunks.mixture(one) for one in (found, fullest) if one is not None]
    return min(every, key=lambda mixture: mixture.busy)


class _Held(NamedTuple):
    """Bytes at the peak and, of them, what blocks hold of what others hand over; the number of the fullest moment."""

    peak: float
    beside: float
    moment: int


class _Chunks:
    """The chunks of a rank, and what numbers of blocks in every way, (chunks, ways), come to."""

    def __init__(self, rank: Rank, columns: Sequence[Column], blocks: int, moments: Array, micro_batches: int) -> None:
        self.rank, self.columns, self.blocks, self.moments = rank, columns, blocks, moments
        self.micro_batches = micro_batches
        self.amounts = np.array([[getattr(column.amounts, name) for name in FIELDS] for column in columns])
        part, step, self.fixed, self.live = (
            self.amounts[:, FIELDS.index(name)] for name in ("part", "step", "fixed", "live")
        )
        self.seconds = micro_batches * part + step
        self.replay, self.transient = (
            np.array([getattr(column.amounts, name) for column in columns]) for name in ("replay", "transient")
        )
        self.recompute = np.array([column.recompute for column in columns], dtype=np.float64)
        last = moments.shape[1] - 1
        chunk_of_ends = [*([0] if rank.first else []), last]  # what stands before, and behind
        ends = [(amounts, chunk) for (amounts, _), chunk in zip(rank.ends, chunk_of_ends, strict=False)]
        self.ends: Array = sum((a.fixed + a.live * moments[:, chunk] for a, chunk in ends), np.zeros(len(moments)))
        self.replayed = max((amounts.replay for amounts, _ in rank.ends), default=0.0)
        self.moved = max((amounts.transient for amounts, _ in rank.ends), default=0.0)
        assert rank.handed is not None, "chunks differ in what they hold of others"
        self.handed = np.array(  # (chunks, blocks that are recomputed)
            [
                [
                    rank.handed.of(blocks, again, first=rank.first and not chunk, last=chunk == last)
                    for again in range(blocks + 1)
                ]
                for chunk in range(last + 1)
            ]
        )

    def within(self, limit: float, flights: Array) -> Array | None:
        """Blocks of every chunk in every way, (chunks, ways), after as few steps as make it fit; None where it does
        not. What a byte costs is counted with so many micro-batches in flight of each chunk."""
        begun, steps = np.zeros((len(flights), len(self.columns))), list[_Step]()
        for chunk, number in enumerate(flights.tolist()):
            nbytes = self.fixed + number * self.live
            hull = _lower_hull(nbytes.tolist(), self.seconds.tolist())
            begun[chunk, hull[0]] = self.blocks
            for before, behind in pairwise(hull):
                costs = self.seconds[behind] - self.seconds[before]
                steps.append(_Step(float(costs / (nbytes[before] - nbytes[behind])), chunk, before, behind))
        steps.sort(key=lambda step: step.price)

        def taken(number: int) -> Array:
            counts = begun.copy()
            for place, step in enumerate(steps[: -(-number // self.blocks)]):
                moved = min(self.blocks, number - place * self.blocks)
                counts[step.chunk, step.before] -= moved
                counts[step.chunk, step.behind] += moved
            return counts

        few, enough = -1, len(steps) * self.blocks
        if self.held(taken(enough)).peak > limit:
            return None
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (middle, enough) if self.held(taken(middle)).peak > limit else (few, middle)
        return self._back(taken(enough), steps[: -(-enough // self.blocks)], limit)

    def _back(self, counts: Array, steps: Sequence[_Step], limit: float) -> Array:
        """The same with blocks that go a step back where there is room: the last step may have freed more than was
        wanted, and other moments than the fullest have some."""
        for step in sorted(steps, key=lambda step: self.seconds[step.before] - self.seconds[step.behind]):
            while counts[step.chunk, step.behind] > 0:
                tried = counts.copy()
                tried[step.chunk, step.behind] -= 1
                tried[step.chunk, step.before] += 1
                if self.held(tried).peak > limit:
                    break
                counts = tried
        return counts

    def held(self, counts: Array) -> _Held:
        """What so many blocks in every way hold."""
        used = counts.any(axis=0)
        at_once = max(self.replayed, float(self.replay[used].max())) + max(
            self.moved, float(self.transient[used].max())
        )
        again = np.rint(counts @ self.recompute).astype(np.intp)
        kept = self.moments @ (counts @ self.live) + self.ends
        whole = kept + self.moments @ self.handed[np.arange(len(counts)), again]
        moment = int(whole.argmax())
        peak = float(whole[moment])
        return _Held(
            peak=peak + float(counts.sum(axis=0) @ self.fixed) + at_once,
            beside=peak - float(kept.max()),
            moment=moment,
        )

    def mixture(self, counts: Array) -> Mixture:
        """What they come to."""
        number = len(counts)  # what ranks come to is counted for chunks that are alike
        mean = counts.sum(axis=0, keepdims=True) / number
        sums = dict(zip(FIELDS, number * (mean @ self.amounts).T, strict=True))
        part, step = seconds_of(self.rank, self.columns, mean, sums)
        held = self.held(counts)
        return Mixture(
            part=float(part[0]),
            step=float(step[0]),
            busy=float(self.micro_batches * part[0] + step[0]),
            peak=held.peak,
            beside=held.beside,
            inner=tuple(column for own in counts for column in self._in_order(own)),
        )

    def _in_order(self, own: Array) -> tuple[Column, ...]:
        """The columns of a chunk, those that are recomputed first."""
        ways = [(0, column) for column in self.columns]
        return in_order(ways, [0] * self.blocks, own.tolist(), recomputed_first=True)


def _lower_hull(nbytes: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """Ways from the quickest to the leanest of which no mixture of two others takes less for the same bytes."""
    found = list[int]()
    for at in sorted(range(len(nbytes)), key=lambda at: (seconds[at], nbytes[at])):
        if found and nbytes[at] >= nbytes[found[-1]]:
            continue
        while len(found) > 1:
            one, other = found[-2:]
            above = (seconds[other] - seconds[one]) * (nbytes[one] - nbytes[at])
            if above < (seconds[at] - seconds[one]) * (nbytes[one] - nbytes[other]):
                break
            found.pop()
        found.append(at)
    return found
