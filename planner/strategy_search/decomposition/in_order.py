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

_AT_ONCE, _CELLS = 3, 2**15
"""Up to this many halvings are done at once, by trying all their times, as long as no more numbers are compared: calls
for few numbers take longer than the comparisons."""


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
        self.sums = [
            (self._sums(one.inner, one.most), self._sums(one.leanest, self.blocks) if len(one.leanest) else None)
            for one in reaches
        ]

    def _sums(self, inner: Array, most: int) -> "_Sums":
        values: Array = np.moveaxis(np.tensordot(inner, self.along, axes=([1], [0])), -1, 1)
        return _Sums.of(values, most)

    def pace(self, halvings: int, limit: Array | None = None) -> Array:
        """The least time, for every state, in which the ranks can hold all blocks; `limit` where that time is too
        short, and infinity where they never can."""
        shape = self.reaches[0].ends.shape[1:]
        never = ~self._enough(np.full((1, *shape), math.inf))[0]
        if limit is not None:
            found: Array = np.where(never, math.inf, np.maximum(limit, 0.0))
            less = ~never & self._enough(found[None])[0]
            if less.any():
                found[less] = InOrder([one.among(less) for one in self.reaches], self.along).pace(halvings)
            return found
        low = np.zeros(shape)
        whole = [
            (one.ends + seconds.values[:, -1]).max(axis=0)
            for one, (seconds, _) in zip(self.reaches, self.sums, strict=True)
        ]
        high = 2 * np.maximum(np.max(whole, axis=0), 0.0)
        cells = max(seconds.values.size for seconds, _ in self.sums)
        while halvings > 0:
            at_once = min(halvings, _AT_ONCE, max(1, (_CELLS // cells).bit_length() - 1))
            step, times = (high - low) / 2**at_once, np.arange(1, 2**at_once)
            enough = self._enough(low + times.reshape(-1, *[1] * low.ndim) * step)
            low = low + np.where(enough.any(axis=0), enough.argmax(axis=0), len(times)) * step
            high, halvings = low + step, halvings - at_once
        return np.where(never, math.inf, low)

    def _enough(self, time: Array) -> NDArray[np.bool_]:
        """Whether the ranks reach the last block within a time, for several times and every state, (times, states)."""
        start = np.zeros(time.shape, dtype=np.intp)
        possible = np.ones(time.shape, dtype=np.bool_)
        for one, (seconds, nbytes) in zip(self.reaches, self.sums, strict=True):
            for left in range(one.ranks, 0, -1):
                if (start >= self.alike).all():
                    more = self._alike(one, time)
                    possible &= more >= 0
                    start = np.minimum(start + left * np.maximum(more, 0), self.blocks)
                    break
                end = seconds.last(start, time - one.ends[:, None])
                if nbytes is not None:
                    end = np.minimum(end, nbytes.last(start, one.left[:, None]))
                possible &= end >= start  # else the time is too short for whatever else the rank holds
                start = np.maximum(end, start)
        found: NDArray[np.bool_] = possible & (start >= self.blocks)
        return found

    def _alike(self, one: Reach, time: Array) -> Numbers:
        """How many blocks of the last kind a rank can hold, (times, states); negative if the time is too short for
        whatever else the rank holds."""
        more = np.floor((time - one.ends[:, None]) / one.inner[:, None, self.last] + _ROUNDING)
        more = np.where(more >= one.most, self.blocks, more).min(axis=0)
        if len(one.left):
            more = np.minimum(more, np.floor(one.left / one.leanest[:, self.last] + _ROUNDING).min(axis=0))
        found: Numbers = np.clip(more, -1, self.blocks).astype(np.intp)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sums:
    """`values` of the first 0, 1, ... blocks, (prices, blocks + 1, states). From the first block of a rank on, they
    stay within a limit; with more than `most` blocks, every `most` of them in a row do. `before` has the values without
    the last `most` blocks."""

    values: Array
    before: Array
    tolerance: Array

    @classmethod
    def of(cls, values: Array, most: int) -> "_Sums":
        count = values.shape[1]
        before = values[:, np.maximum(np.arange(count) - most, 0)]
        return cls(values=values, before=before, tolerance=_ROUNDING * values[:, -1:] / max(1, count - 1))

    def last(self, start: Numbers, limits: Array) -> Numbers:
        """The last block that a rank can reach from block `start`, (times, states), within `limits`, (prices, times or
        1, states)."""
        started = np.take_along_axis(self.values, np.broadcast_to(start, (len(self.values), *start.shape)), axis=1)
        taken = self.values[:, :, None] - np.maximum(self.before[:, :, None], started[:, None])
        fits = (taken <= limits[:, None] + self.tolerance[:, :, None]).all(axis=0)
        found: Numbers = np.where(fits.all(axis=0), self.values.shape[1], fits.argmin(axis=0)) - 1
        return found
