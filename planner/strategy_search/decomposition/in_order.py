"""Blocks of several kinds in the order in which they stand: the least time in which all ranks have room for them.

    blocks      d d d e e e e e e e e e e          every rank takes as many as the time allows, from the first on
    rank        0 0 0 0 0 1 1 1 2 2 2 3 3

A price of memory proves that a rank with blocks i ... j - 1 is busy for a + P(j) - P(i) or more, where P adds up what
blocks take at the price (`planner.strategy_search.decomposition.lagrangian`); with more blocks than it speaks of, for
no less than any so many of them in a row. So in a time a rank comes no further than to some block, later from a later
one. Where ranks that come as far as they can do not come to the end, no division of the blocks keeps all of them within
that time.

With the last kind alone ahead all that counts is how many blocks the other ranks have room for, together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]

_ROUNDING = 1e-9
"""Of a block, or of a capacity: sums in another order differ by less."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reach:
    """What the prices prove of some ranks in a row that are alike, `ranks` in all: busy for `ends` (prices, states)
    beside inner blocks, of which each takes `inner` (prices, kinds, states), as long as there are no more than `most`;
    and `left` (leanest, states) bytes for these, of which each takes `leanest` (leanest, kinds, states)."""

    ends: Array
    inner: Array
    most: int
    left: Array
    leanest: Array
    ranks: int

    def among(self, some: NDArray[np.bool_]) -> "Reach":
        """The same of some states."""
        picked = {name: getattr(self, name)[..., some] for name in ("ends", "inner", "left", "leanest")}
        return replace(self, **picked)


class InOrder:
    """Ranks in their order before blocks in theirs; `along` says how many of the first 0, 1, ... blocks are of each
    kind, (kinds, blocks + 1)."""

    def __init__(self, reaches: Sequence[Reach], along: Array) -> None:
        self.reaches, self.along = reaches, along
        self.blocks = along.shape[1] - 1
        steps = np.diff(along, axis=1)
        self.last = int(steps[:, -1].argmax())  # kind of the last blocks
        others = np.flatnonzero(steps[self.last] == 0)
        self.alike = int(others[-1]) + 1 if others.size else 0  # from there on all are of that kind
        self.sums = [(self._sums(one.inner), self._sums(one.leanest)) for one in reaches]

    def _sums(self, inner: Array) -> Array:
        """What the first blocks take, (prices, blocks + 1, states)."""
        found: Array = np.moveaxis(np.tensordot(inner, self.along, axes=([1], [0])), -1, 1)
        return found

    def pace(self, halvings: int, limit: Array | None = None) -> Array:
        """The least time, for every state, in which the ranks have room for all blocks, or the limit where that is not
        enough; infinite where they never have."""
        shape = self.reaches[0].ends.shape[1:]
        never = ~self._enough(np.full(shape, math.inf))
        if limit is not None:
            found: Array = np.where(never, math.inf, np.maximum(limit, 0.0))
            less = ~never & self._enough(found)
            if less.any():
                found[less] = InOrder([one.among(less) for one in self.reaches], self.along).pace(halvings)
            return found
        low = np.zeros(shape)
        whole = [
            (one.ends + seconds[:, -1]).max(axis=0) for one, (seconds, _) in zip(self.reaches, self.sums, strict=True)
        ]
        high = 2 * np.maximum(np.max(whole, axis=0), 0.0)
        for _ in range(halvings):
            middle = (low + high) / 2
            enough = self._enough(middle)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return np.where(never, math.inf, low)

    def _enough(self, time: Array) -> NDArray[np.bool_]:
        """Whether all ranks come to the last block in a time, of every state."""
        start = np.zeros(time.shape, dtype=np.intp)
        possible = np.ones(time.shape, dtype=np.bool_)
        for one, (seconds, nbytes) in zip(self.reaches, self.sums, strict=True):
            for left in range(one.ranks, 0, -1):
                if (start >= self.alike).all():
                    more = self._alike(one, time)
                    possible &= more >= 0
                    start = np.minimum(start + left * np.maximum(more, 0), self.blocks)
                    break
                end = self._end(one, seconds, nbytes, start, time)
                possible &= end >= start
                start = np.maximum(end, start)
        found: NDArray[np.bool_] = possible & (start >= self.blocks)
        return found

    def _end(self, one: Reach, seconds: Array, nbytes: Array, start: Numbers, time: Array) -> Numbers:
        """Where a rank ends at the latest that begins at a block, of every state; before that where it has no time for
        what else it has."""
        end = _last(seconds, start, time - one.ends, one.most)
        return np.minimum(end, _last(nbytes, start, one.left, self.blocks)) if len(nbytes) else end

    def _alike(self, one: Reach, time: Array) -> Numbers:
        """How many blocks of the last kind a rank has room for, of every state; less than none where it has no time for
        what else it has."""
        more = np.floor((time - one.ends) / one.inner[:, self.last] + _ROUNDING)
        more = np.where(more >= one.most, self.blocks, more).min(axis=0)
        if len(one.left):
            more = np.minimum(more, np.floor(one.left / one.leanest[:, self.last] + _ROUNDING).min(axis=0))
        found: Numbers = np.clip(more, -1, self.blocks).astype(np.intp)
        return found


def _last(sums: Array, start: Numbers, limits: Array, most: int) -> Numbers:
    """Up to which block, from one on, sums (prices, blocks + 1, states) come to no more than their limits, (prices,
    states); of more than `most` blocks no so many in a row do."""
    before = np.take_along_axis(sums, np.broadcast_to(start, (len(sums), 1, *start.shape)), axis=1)
    at = np.maximum(np.arange(sums.shape[1]) - most, 0)
    tolerance = _ROUNDING * sums[:, -1:] / max(1, sums.shape[1] - 1)
    fits = (sums - np.maximum(sums[:, at], before) <= limits[:, None] + tolerance).all(axis=0)
    found: Numbers = np.where(fits.all(axis=0), sums.shape[1], fits.argmin(axis=0)) - 1
    return found
