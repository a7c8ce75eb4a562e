"""What of the keys a query sees, by their positions, and how many pairs of both that makes.

back 2, ahead 0     x . . . .        prefix 3     x x x . .
                    x x . . .                     x x x . .
                    x x x . .                     x x x . .        queries down, keys across
                    . x x x .                     x x x x .
                    . . x x x                     x x x x x
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Query i sees key j where i - `back` <= j <= i + `ahead` (None: any), or j < `prefix`."""

    back: int | None = None
    ahead: int | None = None
    prefix: int = 0

    def keys(self, first: int, count: int, start: int, length: int) -> range:
        """Of `length` keys from `start` on those that some of `count` queries from `first` on sees: a run of them."""
        lowest = 0 if self.back is None else first - self.back
        highest = start + length if self.ahead is None else first + count + self.ahead
        begin = start if start < self.prefix else max(start, lowest)
        return range(begin, max(begin, min(start + length, max(highest, self.prefix))))

    def pairs(self, first: int, count: int, length: int) -> int:
        """Pairs of `count` queries from `first` on and of the `length` keys that they see."""
        return _pairs(self, first, count, length)


@lru_cache(maxsize=4096)
def _pairs(window: Window, first: int, count: int, length: int) -> int:
    at = np.arange(first, first + count)
    begin = np.zeros_like(at) if window.back is None else np.maximum(0, at - window.back)
    end = np.full_like(at, length) if window.ahead is None else np.minimum(length, at + window.ahead + 1)
    prefix = min(window.prefix, length)
    before, behind = np.minimum(prefix, begin), np.maximum(0, prefix - end)
    return int((end - begin + before + behind).sum())
