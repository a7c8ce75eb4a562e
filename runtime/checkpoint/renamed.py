"""Reads a checkpoint under other names: ours under the names of transformers, or theirs under the names of a plan.

A requested tensor is assembled from boxes of other tensors. Their dims may be in another order, have a stride, or have
length 1 and be left out; `naming` has the mapping. Only the boxes of the request are read, with two exceptions: where
rows have a stride of two, the rows between are read too; and the rows of a transposed weight are columns of the other,
so more of the file is touched than kept. Rows that are longer than the part read from them are read a few at a time,
and the files are released in between.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from runtime.checkpoint.manifest import Manifest, SavedFile, SavedTensor
from runtime.checkpoint.regions import Region, whole
from runtime.checkpoint.source import Readable
from runtime.checkpoint.tensor_files import dtype_of

TOUCHED = 64 * 2**20
"""Bytes of a file that are touched before it is released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of a tensor: elements `step[d]` apart on every dim d, from `at` on."""

    name: str
    at: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A box of a requested tensor and the box of an existing tensor from which it is copied. `dims` maps each dim of
    the first to a dim of the second, None where there is none; `count` is the extent of the first."""

    to: Box
    source: Box
    count: tuple[int, ...]
    dims: tuple[int | None, ...]
    value: Callable[[torch.Tensor], torch.Tensor] | None


@dataclass(kw_only=True)
class Renamed:
    """Tensors of a source under other names. Tensors in `fresh` are zeros. Those in `initial`, of a head that the
    source lacks, are not among `tensors`: the model keeps its initial values. At most `touched` bytes of the source (or
    one row of a tensor) are touched before its files are released."""

    source: Readable
    tensors: Mapping[str, SavedTensor]
    copies: Mapping[str, Sequence[Copy]]
    fresh: frozenset[str] = frozenset()
    initial: tuple[str, ...] = ()
    touched: int = TOUCHED
    tied: Mapping[str, str] = field(default_factory=dict)
    _since: int = 0

    @property
    def path(self) -> Path:
        """The path of the source."""
        return self.source.path

    @property
    def files(self) -> tuple[SavedFile, ...]:
        """The files of the source."""
        return self.source.files

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of the source, with the tensors that are read."""
        found = self.source.manifest
        return None if found is None else replace(found, tensors=dict(self.tensors), tied=dict(self.tied), names="own")

    def check(
        self, share: Callable[[int], bool] = lambda number: True, on_block: Callable[[], None] = lambda: None
    ) -> None:
        """As `Source.check`."""
        self.source.check(share, on_block)

    def release(self) -> None:
        """As `Source.release`."""
        self._since = 0
        self.source.release()

    def read(self, name: str, region: Region | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        """As `Source.read`."""
        tensor = self.tensors[name]
        wanted = whole(tensor.shape) if region is None else region
        found = torch.empty(wanted.extent, dtype=dtype_of(tensor.dtype)) if into is None else into
        if name in self.fresh:
            return found.zero_()
        for copy in self.copies[name]:
            inside = _inside(copy, wanted)
            for part in () if inside is None else self._few_rows(copy, inside):
                _copy(self.source, copy, part, wanted, found)
        return found

    def boxes(self, name: str, wanted: Region) -> Iterator[tuple[str, Region]]:
        """The boxes of tensors of the source of which a box of a tensor is assembled."""
        for copy in () if name in self.fresh else self.copies[name]:
            inside = _inside(copy, wanted)
            if inside is not None:
                yield copy.source.name, _source_region(copy, inside)

    def _few_rows(self, copy: Copy, inside: "Inside") -> Iterator["Inside"]:
        """The parts of a box that are read one at a time, so that each touches few enough bytes."""
        tensor = self.source.tensors[copy.source.name]
        across = next((at for at, dim in enumerate(copy.dims) if dim == 0), None)
        if across is None:
            yield inside
            return
        row = tensor.elements // tensor.shape[0] * dtype_of(tensor.dtype).itemsize * copy.source.step[0]
        most, (low, count) = max(1, self.touched // max(1, row)), inside[across]
        for start in range(low, low + count, most):
            rows = min(most, low + count - start)
            if self._since and self._since + rows * row > self.touched:
                self.release()
            self._since += rows * row
            yield [*inside[:across], (start, rows), *inside[across + 1 :]]


def initial_in(source: Readable) -> tuple[str, ...]:
    """Names of a head that a source lacks."""
    return source.initial if isinstance(source, Renamed) else ()


Inside = list[tuple[int, int]]
"""On every dim the first element of a box that is read, and the number of elements."""


def boxes_in(source: Readable, name: str, wanted: Region) -> Iterator[tuple[str, Region]]:
    """The boxes of saved tensors that are read for a box of a tensor, below all renaming."""
    if not isinstance(source, Renamed):
        yield name, wanted
        return
    for theirs, region in source.boxes(name, wanted):
        yield from boxes_in(source.source, theirs, region)


def _source_region(copy: Copy, inside: Inside) -> Region:
    """The box of the source of which a part of a box is copied."""
    start, extent = list(copy.source.at), [1] * len(copy.source.at)
    for (low, count), dim in zip(inside, copy.dims, strict=True):
        if dim is not None:
            start[dim] += low * copy.source.step[dim]
            extent[dim] = (count - 1) * copy.source.step[dim] + 1
    return Region(offset=tuple(start), extent=tuple(extent))


def _copy(source: Readable, copy: Copy, inside: Inside, wanted: Region, found: torch.Tensor) -> None:
    """Copy a part of a box into `found`, the elements of a region."""
    piece = source.read(copy.source.name, _source_region(copy, inside))
    piece = piece[tuple(slice(None, None, step) for step in copy.source.step)]
    kept = [dim for dim in copy.dims if dim is not None]
    left = [dim for dim in range(len(copy.source.at)) if dim not in kept]
    piece = piece.permute((*kept, *left)).reshape([count for _, count in inside])
    places = []
    for (low, count), at, step, offset in zip(inside, copy.to.at, copy.to.step, wanted.offset, strict=True):
        first = at + low * step - offset
        places.append(slice(first, first + (count - 1) * step + 1, step))
    found[tuple(places)].copy_(piece if copy.value is None else copy.value(piece))


def _inside(copy: Copy, wanted: Region) -> Inside | None:
    """The part of a box that lies in a region; None where they do not meet."""
    found = []
    dims = zip(copy.to.at, copy.to.step, copy.count, wanted.offset, wanted.extent, strict=True)
    for at, step, count, offset, extent in dims:
        low = max(0, -((at - offset) // step))  # rounded up
        high = min(count, -((at - offset - extent) // step))
        if high <= low:
            return None
        found.append((low, high - low))
    return found
