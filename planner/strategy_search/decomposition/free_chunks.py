"""Virtual stages of a rank that run unlike each other, each as its micro-batches in flight require.

    chunk              0     1     2     3        of rank 0 of 4, on average over the moments at which it holds most
    in flight        7.8   5.8   3.8   1.8        micro-batches

The first chunk of a rank holds several times as much of a block as the last one, so a lean block saves most there. How
to run each block within a memory limit is a knapsack problem: seconds against bytes. The blocks of a chunk have equal
costs, so only ways on the lower hull of (bytes, seconds) of the chunk matter. A block moves down that hull in steps.
The steps of all chunks are taken in ascending order of seconds per byte until everything fits. No choice is faster by
more than a fraction of the last step (Dantzig, "Discrete-variable extremum problems", 1957), as far as bytes are sums.

Memory is counted at every moment, with transient bytes and with values that blocks hand over. Not good for: blocks of
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
    """The blocks of a chunk that change from one way to the next, one by one."""

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
    """A nearly fastest way to run `blocks` blocks of one kind in each chunk of a rank, with the known `columns`, that
    fits; None if none is found. `moments` has the micro-batches in flight of every chunk at each moment at which the
    rank may hold most. The result has the columns of all chunks, one chunk after the other.
    """
    counted = np.array(moments, dtype=np.float64)
    chunks, limit = _Chunks(rank, columns, blocks, counted, micro_batches), capacity * (1 + FITS)
    found = chunks.within(limit, counted.mean(axis=0))
    if found is None:
        return None
    fullest = chunks.within(limit, (counted.mean(axis=0) + counted[chunks.held(found).moment]) / 2)
    every = [chunks.mixture(one) for one in (found, fullest) if one is not None and chunks.hosted(one) <= rank.host]
    return min(every, key=lambda mixture: mixture.busy, default=None)


class _Held(NamedTuple):
    """Bytes at the peak; as part of them, those held of values that others hand over; and the number of the fullest
    moment."""

    peak: float
    beside: float
    moment: int


class _Chunks:
    """The chunks of a rank, and the cost of any numbers of blocks per way, (chunks, ways)."""

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
        chunk_of_ends = [*([0] if rank.first else []), last]  # operators before and behind the blocks
        ends = [(amounts, chunk) for (amounts, _), chunk in zip(rank.ends, chunk_of_ends, strict=False)]
        self.hosts: Array = sum(
            (a.hosted + a.hosted_live * moments[:, chunk] for a, chunk in ends), np.zeros(len(moments))
        )
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
        """Blocks of every chunk in every way, (chunks, ways), after the fewest steps that make them fit; None if they
        never fit. `flights` has the micro-batches in flight of each chunk with which seconds per byte are computed."""
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
        """The same, with blocks that go a step back where memory is left: the last step may have freed more than
        needed, and moments other than the fullest have some left."""
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
        """The memory that these numbers of blocks per way hold."""
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

    def hosted(self, counts: Array) -> float:
        """Bytes on the host under these numbers of blocks per way."""
        fixed, live = (counts @ self.amounts[:, FIELDS.index(name)] for name in ("hosted", "hosted_live"))
        return float(fixed.sum() + (self.moments @ live + self.hosts).max())

    def mixture(self, counts: Array) -> Mixture:
        """The cost of these numbers of blocks per way."""
        number = len(counts)  # the cost of a rank is counted for chunks that are alike
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
        """The columns of a chunk, with recomputed blocks first."""
        ways = [(0, column) for column in self.columns]
        return in_order(ways, [0] * self.blocks, own.tolist(), recomputed_first=True)


def _lower_hull(nbytes: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """The ways from the fastest to the leanest for which no mixture of two other ways takes less time for the same
    bytes."""
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
