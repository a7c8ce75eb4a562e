"""Layouts: how one tensor lies on the axes of a mesh.

A layout has one placement per mesh axis: `S<dim>` (split along a dim), `R` (a full copy), `P` (a term of a sum that
is still to be taken). Where several axes split the same dim, the earlier axis is the outer cut, as in torch's DTensor.
Shards of a tensor are equal; there are no uneven and no strided shards. Only parameters are padded with zeros to equal
shards where devices do not divide them (`PaddedShape`), as in FSDP2.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from planner.errors import LayoutError


class Placement(NamedTuple):
    """What one mesh axis does to a tensor. `dim` is -1 unless the kind is 'shard'. It is a tuple because a search looks
    layouts up millions of times, and a tuple is hashed without a call in Python."""

    kind: str
    dim: int = -1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.kind == "shard" else self.kind[0].upper()

    @property
    def is_shard(self) -> bool:
        return self.kind == "shard"


REPLICATE = Placement("replicate")
PARTIAL = Placement("partial")

Layout = tuple[Placement, ...]


@lru_cache(maxsize=64)
def shard(dim: int) -> Placement:
    """The placement that splits `dim` (>= 0)."""
    assert dim >= 0, dim
    return Placement("shard", dim)


def replicated(axes: int) -> Layout:
    """A full copy on every device of a mesh with that many axes."""
    return (REPLICATE,) * axes


def format_layout(layout: Layout) -> str:
    """`S0,R,P`; the inverse of `parse_layout`."""
    return ",".join(map(str, layout))


def parse_layout(text: str) -> Layout:
    """The layout written as `S0,R,P`. Raises LayoutError where the text is not one."""
    return tuple(_parse_placement(word.strip(), text) for word in text.split(",")) if text else ()


def _parse_placement(word: str, text: str) -> Placement:
    if word == "R":
        return REPLICATE
    if word == "P":
        return PARTIAL
    if word[:1] == "S" and word[1:].isascii() and word[1:].isdigit():
        return shard(int(word[1:]))
    raise LayoutError(
        f"'{word}' in layout '{text}' is not a placement; write R, P or S followed by a dim, as in 'S0,R'"
    )


def cuts(rank: int, layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The number of pieces into which the layout cuts each of `rank` dims."""
    counts = [1] * rank
    for placement, size in zip(layout, sizes, strict=True):
        if placement.dim >= 0:
            counts[placement.dim] *= size
    return tuple(counts)


class PaddedShape(tuple[int, ...]):
    """The shape of a parameter. Devices that do not divide a dim hold equal shards of it all the same: zeros are added
    at its end (as in FSDP2), at most `PADDING` of its length.

        1600 rows over 24      23 shards of 67 rows, and one of 59 with 8 rows of zeros

    Where several axes cut a dim, only the outer one may pad; the others divide its shards. The shards of all devices
    are equally long, and follow each other. An operator gets a parameter without its padding.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PaddedShape) and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((PaddedShape, tuple(self)))


PADDING = 1 / 16
"""The share of a dim of a parameter that may be added to it, at most."""


def _lengths(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> list[int] | None:
    """Length of the shards on each dim; None where the layout does not fit."""
    lengths, rank, padded = list(shape), len(shape), isinstance(shape, PaddedShape)
    for placement, size in zip(layout, sizes, strict=True):
        dim = placement.dim
        if dim >= rank:
            return None
        if dim < 0 or size == 1:
            continue
        whole = lengths[dim]
        missing = -whole % size
        if missing and (not padded or whole != shape[dim] or missing > PADDING * whole):
            return None
        lengths[dim] = (whole + missing) // size
    return lengths


def shard_length(extent: int, sizes: Sequence[int]) -> int | None:
    """Length of the shards of a dim of a parameter on axes of these sizes, the outer one first; None where they cannot
    cut it."""
    lengths = _lengths(PaddedShape((extent,)), (shard(0),) * len(sizes), sizes)
    return None if lengths is None else lengths[0]


def divides(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a tensor of this shape can have the layout: the dims exist and divide evenly. A parameter may be padded
    instead."""
    return _lengths(shape, layout, sizes) is not None


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of the shard that one device holds, with its padding. Raises LayoutError where a dim does not exist or does
    not divide."""
    lengths = _lengths(shape, layout, sizes)
    if lengths is None:
        raise _unfit(shape, layout, sizes)
    return tuple(lengths)


def _unfit(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> LayoutError:
    """The error of a layout that does not fit: names the first dim that does not exist, or does not divide."""
    for placement in layout:
        if placement.dim >= len(shape):
            return LayoutError(
                f"layout {format_layout(layout)} splits dim {placement.dim} of a tensor of shape {tuple(shape)}"
            )
    alone = [tuple(one if one.dim == dim else REPLICATE for one in layout) for dim in range(len(shape))]
    wrong = next(dim for dim, own in enumerate(alone) if _lengths(shape, own, sizes) is None)
    count = cuts(len(shape), layout, sizes)[wrong]
    hint = f", not even with {PADDING:.0%} of it as padding" if isinstance(shape, PaddedShape) else ""
    return LayoutError(
        f"layout {format_layout(layout)} cuts dim {wrong} of shape {tuple(shape)} into {count} pieces,"
        f" and {count} does not divide {shape[wrong]}{hint}"
    )


def whole_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of all shards together: `shape`, and for a parameter also the padding that it has in this layout."""
    if not isinstance(shape, PaddedShape):
        return tuple(shape)
    counts = cuts(len(shape), layout, sizes)
    return tuple([length * count for length, count in zip(local_shape(shape, layout, sizes), counts, strict=True)])


def local_share(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> float:
    """Elements that one device holds, with its padding, divided by those of the tensor."""
    if not isinstance(shape, PaddedShape):
        return local_fraction(layout, sizes)
    lengths = _lengths(shape, layout, sizes)
    if lengths is None:
        raise _unfit(shape, layout, sizes)
    pieces = 1
    for placement, size in zip(layout, sizes, strict=True):
        pieces *= size if placement.dim >= 0 else 1
    own, whole = math.prod(lengths), math.prod(shape)
    return 1.0 / pieces if own * pieces == whole else own / whole


def local_fraction(layout: Layout, sizes: Sequence[int]) -> float:
    """Share of the tensor's elements that one device holds."""
    return 1.0 / math.prod([size for placement, size in zip(layout, sizes, strict=True) if placement.dim >= 0])
