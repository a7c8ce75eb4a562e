"""Layouts: how one tensor lies on the axes of a mesh.

A layout has one placement per mesh axis: `S<dim>` (split along a dim), `R` (a full copy), `P` (a term of a sum that
is still to be taken). Where several axes split the same dim, the earlier axis is the outer cut, as in torch's
DTensor. A tensor that is split must divide evenly; there are no uneven and no strided shards, but of what an engine has
in a flat buffer (`FlatShape`), as no plan of ours has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Placement:
    """What one mesh axis does to a tensor. `dim` is -1 unless the kind is 'shard'."""

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
    """Into how many pieces the layout cuts each of `rank` dims."""
    counts = [1] * rank
    for placement, size in zip(layout, sizes, strict=True):
        if placement.dim >= 0:
            counts[placement.dim] *= size
    return tuple(counts)


class FlatShape(tuple[int, ...]):
    """The shape of a weight that an engine cuts out of a flat buffer, whatever its dims (FlatParameter of FSDP, the
    partitions of DeepSpeed, the buffers of Megatron-LM), or pads to equal pieces (FSDP2): any number of devices divides
    it, and each has an equal share. It is no shape that our runtime cuts; `planner.validation` prices engines with it.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatShape) and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((FlatShape, tuple(self)))


def divides(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a tensor of this shape can have the layout: the dims exist and divide evenly."""
    if isinstance(shape, FlatShape):
        return all(placement.dim < len(shape) for placement in layout)
    counts = [1] * len(shape)
    for placement, size in zip(layout, sizes, strict=True):
        if placement.dim >= len(shape):
            return False
        if placement.dim >= 0:
            counts[placement.dim] *= size
            if shape[placement.dim] % counts[placement.dim]:
                return False
    return True


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of the piece that one device holds, of a flat one that of the largest. Raises LayoutError where a dim does
    not exist or does not divide."""
    for placement in layout:
        if placement.is_shard and placement.dim >= len(shape):
            raise LayoutError(
                f"layout {format_layout(layout)} splits dim {placement.dim} of a tensor of shape {tuple(shape)}"
            )
    counts = cuts(len(shape), layout, sizes)
    if isinstance(shape, FlatShape):
        return tuple(-(-extent // count) for extent, count in zip(shape, counts, strict=True))
    for dim, (extent, count) in enumerate(zip(shape, counts, strict=True)):
        if extent % count:
            raise LayoutError(
                f"layout {format_layout(layout)} cuts dim {dim} of shape {tuple(shape)} into {count} pieces,"
                f" and {count} does not divide {extent}"
            )
    return tuple(extent // count for extent, count in zip(shape, counts, strict=True))


def local_fraction(layout: Layout, sizes: Sequence[int]) -> float:
    """Share of the tensor's elements that one device holds."""
    return 1.0 / math.prod([size for placement, size in zip(layout, sizes, strict=True) if placement.dim >= 0])
