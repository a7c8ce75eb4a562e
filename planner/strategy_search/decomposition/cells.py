"""Amounts of all cells of a piece; most of them may be zero.

    tables of a piece     node | node | pair | pair | pair | ...      in one array
    held                  ████   ████          ████                   only tables with an amount, and where they begin

In a wide model (T5: 875,000 states of the boundary) most pairs of variables move no weights and keep no bytes. Without
their tables a piece takes about half the memory, and it is faster to weigh.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_WIDE = 2**14
"""From this number of cells on, tables of zeros are left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Amounts of `size` cells: `values` for the ranges from each of `starts` to `stops`, one range after the other, and
    zero for all other cells."""

    size: int
    starts: NDArray[np.intp]
    stops: NDArray[np.intp]
    values: Array

    @classmethod
    def of(cls, tables: Sequence[Array | int]) -> Self:
        """Tables, one after the other. For a table of zeros its size is enough."""
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
        """Bytes of memory of the values."""
        return self.values.nbytes

    def any(self) -> bool:
        """Whether any amount is not zero."""
        return bool(self.values.any())

    def add_to(self, total: Array, times: float) -> None:
        """Add `times` the amounts to an array of all cells, (size,), in place."""
        begin = 0
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            end = begin + stop - start
            total[start:stop] += times * self.values[begin:end]
            begin = end

    def all(self) -> Array:
        """The amounts of all cells, (size,)."""
        found = np.zeros(self.size)
        self.add_to(found, 1.0)
        return found

    def sum_of(self, cells: NDArray[np.intp]) -> float:
        """The sum of the amounts of some cells."""
        if self.values.size == self.size:  # none is left out
            return float(self.values[cells].sum())
        if not self.starts.size:
            return 0.0
        place = np.searchsorted(self.starts, cells, side="right") - 1
        held = (place >= 0) & (cells < self.stops[place])
        place = place[held]
        begins = np.cumsum(self.stops - self.starts) - (self.stops - self.starts)
        return float(self.values[begins[place] + cells[held] - self.starts[place]].sum())
