"""A checkpoint read under other names: one of ours as transformers has it, or one of theirs as a plan has it.

A tensor that is asked for is put together from boxes of others, whose dims may stand in another order, lie some rows
apart, or be one long and left out; `naming` says which are which. Only the boxes of what is asked for are read. Where
rows lie two apart, those between are read too; and rows of a weight that is transposed are columns of the other, so
that more of a file is touched than is kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from runtime.checkpoint.manifest import Manifest, SavedFile, SavedTensor
from runtime.checkpoint.regions import Region, whole
from runtime.checkpoint.source import Readable
from runtime.checkpoint.tensor_files import dtype_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of a tensor: elements `step[d]` apart on every dim from `at`."""

    name: str
    at: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A box of a tensor that is asked for, from one of a tensor that there is. `dims` has for each dim of the first the
    one of the second, None where there is none; `count` is how long the first is."""

    to: Box
    source: Box
    count: tuple[int, ...]
    dims: tuple[int | None, ...]
    value: Callable[[torch.Tensor], torch.Tensor] | None


@dataclass(kw_only=True)
class Renamed:
    """Tensors of a source under other names. What is in `fresh` is zeros."""

    source: Readable
    tensors: Mapping[str, SavedTensor]
    copies: Mapping[str, Sequence[Copy]]
    fresh: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the source is."""
        return self.source.path

    @property
    def files(self) -> tuple[SavedFile, ...]:
        """Of the source."""
        return self.source.files

    @cached_property
    def manifest(self) -> Manifest | None:
        """That of the source, with what is read."""
        found = self.source.manifest
        return None if found is None else replace(found, tensors=dict(self.tensors), tied={}, names="own")

    def check(self, share: Callable[[int], bool] = lambda number: True) -> None:
        """As that of a `Source`."""
        self.source.check(share)

    def release(self) -> None:
        """As that of a `Source`."""
        self.source.release()

    def read(self, name: str, region: Region | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        """As that of a `Source`."""
        tensor = self.tensors[name]
        wanted = whole(tensor.shape) if region is None else region
        found = torch.empty(wanted.extent, dtype=dtype_of(tensor.dtype)) if into is None else into
        if name in self.fresh:
            return found.zero_()
        for copy in self.copies[name]:
            _copy(self.source, copy, wanted, found)
        return found


def _copy(source: Readable, copy: Copy, wanted: Region, found: torch.Tensor) -> None:
    """Write into `found`, the elements of a region, what one box has of it."""
    inside = _inside(copy, wanted)
    if inside is None:
        return
    start, extent = list(copy.source.at), [1] * len(copy.source.at)
    for (low, count), dim in zip(inside, copy.dims, strict=True):
        if dim is not None:
            start[dim] += low * copy.source.step[dim]
            extent[dim] = (count - 1) * copy.source.step[dim] + 1
    piece = source.read(copy.source.name, Region(offset=tuple(start), extent=tuple(extent)))
    piece = piece[tuple(slice(None, None, step) for step in copy.source.step)]
    kept = [dim for dim in copy.dims if dim is not None]
    left = [dim for dim in range(len(start)) if dim not in kept]
    piece = piece.permute((*kept, *left)).reshape([count for _, count in inside])
    places = []
    for (low, count), at, step, offset in zip(inside, copy.to.at, copy.to.step, wanted.offset, strict=True):
        first = at + low * step - offset
        places.append(slice(first, first + (count - 1) * step + 1, step))
    found[tuple(places)].copy_(piece if copy.value is None else copy.value(piece))


def _inside(copy: Copy, wanted: Region) -> list[tuple[int, int]] | None:
    """On every dim the first element of a box that lies in a region, and how many do; None where none does."""
    found = []
    dims = zip(copy.to.at, copy.to.step, copy.count, wanted.offset, wanted.extent, strict=True)
    for at, step, count, offset, extent in dims:
        low = max(0, -((at - offset) // step))  # rounded up
        high = min(count, -((at - offset - extent) // step))
        if high <= low:
            return None
        found.append((low, high - low))
    return found
