"""How many blocks a rank can hold within a time, and the least time in which all ranks hold all of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NEVER = 1e15
"""A number of blocks that is larger than any model has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines:
    """Bounds for `ranks` equal ranks. Arrays are per state of the boundary.

    A rank with n units of inner blocks is busy for at least a + n b, for every pair (a, b) of `ends` and `slopes`
    (prices, states). Each pair holds up to n = `most` units. A rank cannot hold more than `room` units. `wholes`
    (prices, states) is the value of all inner blocks of the model together. With blocks of one kind every block is one
    unit, and ranks hold `whole_blocks`; with several kinds they do not."""

    ends: Array
    slopes: Array
    wholes: Array
    most: Array
    room: Array
    ranks: int
    whole_blocks: bool

    def within(self, time: Array) -> Array:
        """The number of units that a rank can hold within a time, by all prices: (states), or (times, states) for times
        of shape (times, 1, states). `NEVER` where the number exceeds what the price holds for."""
        units = (time - self.ends) / self.slopes
        least: Array = np.where(units >= self.most, NEVER, units).min(axis=-1 - self.room.ndim)
        return least

    def rounded(self, units: Array) -> Array:
        """Rounds down to whole blocks if every block is one unit."""
        return np.floor(units + 1e-9) if self.whole_blocks else units + 1e-9

    def among(self, some: NDArray[np.bool_]) -> "Lines":
        """The same bounds for a subset of the states."""
        picked = {name: getattr(self, name)[..., some] for name in ("ends", "slopes", "wholes", "most", "room")}
        return replace(self, **picked)

    def busy(self, share: float) -> Array:
        """Least busy seconds of a rank that holds this share of the blocks of every kind."""
        best: Array = (self.ends + share * self.wholes).max(axis=0)
        return best


def pace(lines: Sequence[Lines], high: Array, total: Array, halvings: int, limit: Array | None = None) -> Array:
    """The least time, for every state, within which the ranks can hold all units; `limit` where that time is too short.
    Found by bisection from below, in so many `halvings`.

    `high` is the time of the slowest rank if all hold equally many.
    """
    together = _Together(lines)
    if limit is not None:
        found: Array = np.maximum(limit, 0.0)
        less = together.room(found) >= total
        if less.any():
            found[less] = pace([line.among(less) for line in lines], high[less], total[less], halvings)
        return found
    low = np.zeros(high.shape)
    high = (high + np.maximum.reduce(together.slopes)) * 2
    for _ in range(halvings):
        middle = (low + high) / 2
        enough = together.room(middle) >= total
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return low


class _Together:
    """The lines of all ranks, one price after the other."""

    def __init__(self, lines: Sequence[Lines]) -> None:
        counts = [len(line.ends) for line in lines]
        self.starts = np.cumsum([0, *counts[:-1]])
        self.ends = np.concatenate([line.ends for line in lines])
        self.slopes = np.concatenate([line.slopes for line in lines])
        self.most = np.repeat(np.array([line.most for line in lines]), counts, axis=0)
        self.held = np.array([line.room for line in lines])
        self.ranks = np.array([float(line.ranks) for line in lines]).reshape(-1, *(1 for _ in lines[0].room.shape))
        self.rounded = lines[0].rounded

    def room(self, time: Array) -> Array:
        """Units that all ranks together can hold within a time, for every state; minus infinity if the time is too
        short for the ends of some rank."""
        units = (time - self.ends) / self.slopes
        most = np.minimum.reduceat(np.where(units >= self.most, NEVER, units), self.starts)
        room = np.where(most < 0, -math.inf, np.minimum(self.rounded(most), self.held) * self.ranks)
        found: Array = np.add.reduce(room)
        return found
