"""Amounts of all cells of a piece, of which most may be zero.

    tables of a piece     node | node | pair | pair | pair | ...      one behind the other
    held                  ████   ████          ████                   those that have any amount, and where they begin

Of the boundary of a wide model (T5: 875,000 states) most pairs of variables move no weights and keep no bytes: without
their tables a piece takes about half the memory, and is weighed in less time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_WIDE = 2**14
"""Cells of all tables from which on those without any amount are left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Amounts of `size` cells: `values` of those from each of `starts` to `stops`, one range behind the other, and
    zero of all others."""

    size: int
    starts: NDArray[np.intp]
    stops: NDArray[np.intp]
    values: Array

    @classmethod
    def of(cls, tables: Sequence[Array | int]) -> Self:
        """Tables one behind the other; of one that is zero its size is enough."""
        sizes = [one if isinstance(one, int) else one.size for one in tables]
        size, wide = sum(sizes), sum(sizes) >= _WIDE
        starts, stops, held, at = list[int](), list[int](), list[Array](), 0
        for table, cells in zip(tables, sizes, strict=True):
            if isinstance(table, int) and not wide:
                table = np.zeros(table)
            if not isinstance(table, int) and (not wide or table.any()):
                held.append(table.ravel())
                if stops and stops[-1] == at:
                    stops[-1] = at + cells
                else:
                    starts.append(at)
                    stops.append(at + cells)
            at += cells
        values = np.concatenate(held) if held else np.zeros(0)
        return cls(size, np.array(starts, dtype=np.intp), np.array(stops, dtype=np.intp), values)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes, but for where ranges begin and end."""
        return self.values.nbytes

    def any(self) -> bool:
        """Whether any amount is not zero."""
        return bool(self.values.any())

    def add_to(self, total: Array, times: float) -> None:
        """Add so many times the amounts to those of all cells, (size,), in place."""
        begin = 0
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            end = begin + stop - start
            total[start:stop] += times * self.values[begin:end]
            begin = end

    def all(self) -> Array:
        """Of all cells, (size,)."""
        found = np.zeros(self.size)
        self.add_to(found, 1.0)
        return found

    def sum_of(self, cells: NDArray[np.intp]) -> float:
        """What the amounts of some cells sum up to."""
        if self.values.size == self.size:  # none is left out
            return float(self.values[cells].sum())
        if not self.starts.size:
            return 0.0
        place = np.searchsorted(self.starts, cells, side="right") - 1
        held = (place >= 0) & (cells < self.stops[place])
        place = place[held]
        begins = np.cumsum(self.stops - self.starts) - (self.stops - self.starts)
        return float(self.values[begins[place] + cells[held] - self.starts[place]].sum())
