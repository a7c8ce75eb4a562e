"""Boxes of a tensor: the cells into which a layout cuts it, the cells that a box meets, and iteration in small blocks.

Every dim is cut evenly (`planner.sharding.even_cut`), also where its size is not divisible, as for tables.

shape 8 x 6, cuts (4, 2)      cell (1, 0), number 2: rows 2-3, columns 0-2
0 1
2 3                           layout S0,S1,S0 on axes of 2: the first axis that cuts a dim cuts it coarsest
4 5
6 7
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from planner.sharding.even_cut import piece, piece_length
from planner.sharding.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The elements offset[d] ... offset[d] + extent[d] - 1 on every dim d of a tensor."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.extent)

    def common(self, other: "Region") -> "Region":
        """The intersection of both, which may be empty (an extent of 0)."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.extent, other.offset, other.extent, strict=True)
        stop = (min(a + e, b + f) for a, e, b, f in ends)
        return Region(offset=offset, extent=tuple(max(0, s - o) for s, o in zip(stop, offset, strict=True)))

    def within(self, other: "Region") -> tuple[slice, ...]:
        """The slices of this region in a tensor that has exactly the elements of `other`."""
        starts = (mine - theirs for mine, theirs in zip(self.offset, other.offset, strict=True))
        return tuple(slice(start, start + extent) for start, extent in zip(starts, self.extent, strict=True))


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region(offset=(0,) * len(shape), extent=tuple(shape))


def cell_region(shape: Sequence[int], cuts: Sequence[int], number: int, lengths: Sequence[int] | None = None) -> Region:
    """A cell of a tensor that is cut into `cuts` pieces on every dim; the pieces have these `lengths` where dims are
    not cut evenly. Cells are numbered row by row."""
    offset, extent = [], []
    lengths = list(map(piece_length, shape, cuts)) if lengths is None else lengths
    for count, size, length in zip(reversed(cuts), reversed(shape), reversed(lengths), strict=True):
        number, place = divmod(number, count)
        start, stop = piece(size, length, place)
        offset.append(start)
        extent.append(stop - start)
    return Region(offset=tuple(reversed(offset)), extent=tuple(reversed(extent)))


def covered(size: int, count: int, length: int) -> bool:
    """Whether `count` pieces of this length cover a dim."""
    return size <= count * length


def can_be_cut(size: int, count: int) -> bool:
    """Whether each of `count` cells gets a part of a dim."""
    return size % count == 0 or (count - 1) * piece_length(size, count) < size


def most_cells(size: int, count: int) -> int:
    """The number of cells into which a dim is cut for `count` holders: fewer than `count` where the last would be
    empty."""
    return -(-size // piece_length(size, count))


def cell_number(dims: int, layout: Layout, sizes: Sequence[int], coordinate: Sequence[int]) -> int:
    """The number of the cell that the device at `coordinate` holds, of a tensor with `dims` dims in this layout."""
    cuts, places = [1] * dims, [0] * dims
    for placement, size, place in zip(layout, sizes, coordinate, strict=True):
        if placement.is_shard:
            cuts[placement.dim] *= size
            places[placement.dim] = places[placement.dim] * size + place
    number = 0
    for count, place in zip(cuts, places, strict=True):
        number = number * count + place
    return number


def cells_meeting(
    shape: Sequence[int], cuts: Sequence[int], region: Region, lengths: Sequence[int] | None = None
) -> Iterator[tuple[int, Region]]:
    """Numbers and regions of the cells that have elements of a region."""
    if not region.elements:
        return
    ranges = []
    lengths = list(map(piece_length, shape, cuts)) if lengths is None else lengths
    for each, start, length in zip(lengths, region.offset, region.extent, strict=True):
        ranges.append(range(start // each, (start + length - 1) // each + 1))
    for places in product(*ranges):
        number = 0
        for count, place in zip(cuts, places, strict=True):
            number = number * count + place
        yield number, cell_region(shape, cuts, number, lengths)


def blocks(region: Region, most: int) -> Iterator[Region]:
    """A region in parts of at most `most` elements (at least one), in the order of its elements in memory."""
    dim = next((at for at, extent in enumerate(region.extent) if extent > 1), None)
    if dim is None or region.elements <= most:
        yield region
        return
    rows = max(1, most * region.extent[dim] // region.elements)
    for start in range(0, region.extent[dim], rows):
        offset, extent = list(region.offset), list(region.extent)
        offset[dim], extent[dim] = region.offset[dim] + start, min(rows, region.extent[dim] - start)
        part = replace(region, offset=tuple(offset), extent=tuple(extent))
        yield from blocks(part, most) if part.elements > most else (part,)
