"""Blocks of several kinds in the order of the model: the least time in which all ranks can hold them.

    blocks      d d d e e e e e e e e e e          every rank takes as many as the time allows, from the first on
    rank        0 0 0 0 0 1 1 1 2 2 2 3 3

A price of memory proves that a rank with blocks i ... j - 1 is busy for at least a + P(j) - P(i), where P adds up the
values of the blocks at that price (`planner.strategy_search.decomposition.lagrangian`). The price holds up to some
number of blocks; a rank with more blocks is busy for at least as long as any that many of them in a row. So within a
time a rank reaches at most some block, and a later one if it starts later. If the ranks do not reach the last block
although each goes as far as it can, then no division of the blocks keeps all ranks within that time.

Once only blocks of the last kind are left, it is enough to count how many of them the remaining ranks can hold
together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]

_ROUNDING = 1e-9
"""Relative to a block or a capacity: sums in different orders differ by less."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reach:
    """Bounds for `ranks` consecutive equal ranks.

    A rank is busy for `ends` (prices, states) plus `inner` (prices, kinds, states) for each inner block, as long as it
    has no more than `most` of them. It has `left` (leanest, states) bytes for inner blocks; each takes at least
    `leanest` (leanest, kinds, states)."""

    ends: Array
    inner: Array
    most: int
    left: Array
    leanest: Array
    ranks: int

    def among(self, some: NDArray[np.bool_]) -> "Reach":
        """The same bounds for a subset of the states."""
        picked = {name: getattr(self, name)[..., some] for name in ("ends", "inner", "left", "leanest")}
        return replace(self, **picked)


class InOrder:
    """The ranks of a pipeline and the blocks of the model, both in their order. `along` says how many of the first 0,
    1, ... blocks are of each kind, (kinds, blocks + 1)."""

    def __init__(self, reaches: Sequence[Reach], along: Array) -> None:
        self.reaches, self.along = reaches, along
        self.blocks = along.shape[1] - 1
        steps = np.diff(along, axis=1)
        self.last = int(steps[:, -1].argmax())  # the kind of the last blocks
        others = np.flatnonzero(steps[self.last] == 0)
        self.alike = int(others[-1]) + 1 if others.size else 0  # from this block on all are of that kind
        self.sums = [(self._sums(one.inner), self._sums(one.leanest)) for one in reaches]

    def _sums(self, inner: Array) -> Array:
        """The sums of the values of the first blocks, (prices, blocks + 1, states)."""
        found: Array = np.moveaxis(np.tensordot(inner, self.along, axes=([1], [0])), -1, 1)
        return found

    def pace(self, halvings: int, limit: Array | None = None) -> Array:
        """The least time, for every state, in which the ranks can hold all blocks; `limit` where that time is too
        short, and infinity where they never can."""
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
        """Whether the ranks reach the last block within a time, for every state."""
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
        """The last block that a rank can reach from block `start`, for every state; before `start` if the time is too
        short for whatever else the rank holds."""
        end = _last(seconds, start, time - one.ends, one.most)
        return np.minimum(end, _last(nbytes, start, one.left, self.blocks)) if len(nbytes) else end

    def _alike(self, one: Reach, time: Array) -> Numbers:
        """How many blocks of the last kind a rank can hold, for every state; negative if the time is too short for
        whatever else the rank holds."""
        more = np.floor((time - one.ends) / one.inner[:, self.last] + _ROUNDING)
        more = np.where(more >= one.most, self.blocks, more).min(axis=0)
        if len(one.left):
            more = np.minimum(more, np.floor(one.left / one.leanest[:, self.last] + _ROUNDING).min(axis=0))
        found: Numbers = np.clip(more, -1, self.blocks).astype(np.intp)
        return found


def _last(sums: Array, start: Numbers, limits: Array, most: int) -> Numbers:
    """The last block that a rank starting at `start` can reach so that its sums (prices, blocks + 1, states) stay
    within their limits, (prices, states). With more than `most` blocks, every `most` of them in a row must stay within
    the limits."""
    before = np.take_along_axis(sums, np.broadcast_to(start, (len(sums), 1, *start.shape)), axis=1)
    at = np.maximum(np.arange(sums.shape[1]) - most, 0)
    tolerance = _ROUNDING * sums[:, -1:] / max(1, sums.shape[1] - 1)
    fits = (sums - np.maximum(sums[:, at], before) <= limits[:, None] + tolerance).all(axis=0)
    found: Numbers = np.where(fits.all(axis=0), sums.shape[1], fits.argmin(axis=0)) - 1
    return found
