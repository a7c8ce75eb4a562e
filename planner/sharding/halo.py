"""Halos: what a stencil that slides over a dim reads of the neighbouring pieces, where that dim is cut.

    rows of 3 devices             0 1 2 3 │ 4 5 6 7 │ 8 9 . .      a stencil of 3, one step apart, one row of padding:
    read by the second one              3   4 5 6 7   8            `before` 1, `after` 1

Result o of a stencil of k elements, d apart, reads the elements o s - p + j d for j = 0 .. k - 1, where results are s
steps apart and p elements of padding come first. A device with P results and P s elements therefore reads

    before = p                        elements of the piece before its own
    after  = (k - 1) d - p - s + 1    of the piece behind it, none where that is negative

whichever piece it has; the first and the last device read padding there. Elements far apart may need more than one
neighbour's piece. Then each device hands on the pieces that it has received: all messages are between neighbours, and
as many bytes are sent as are read. This holds where a dim of n s elements has n results, as padding is mostly chosen.
Any other dim is not cut.

Dryden et al. 2019 (arXiv 1903.06681) cut convolutions so and call it spatial parallelism.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """Elements of a dim that a device reads of the piece before its own, and of the piece behind it."""

    before: int
    after: int

    @property
    def reach(self) -> int:
        """How far a device reads beyond its piece, on the side where that is more; 0 where it reads nothing."""
        return max(self.before, self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stencil:
    """What one result reads along one dim: `size` elements that are `dilation` apart, `stride` elements from one result
    to the next, with `padding` elements on both sides; None where the two sides differ."""

    size: int
    stride: int
    padding: int | None
    dilation: int

    def halo(self, extent: int, results: int) -> Halo | None:
        """The halo of each piece of a dim with `extent` elements and `results`; None where the dim cannot be cut."""
        reach = (self.size - 1) * self.dilation
        if self.padding is None or extent != results * self.stride or self.padding > reach:
            return None
        return Halo(before=self.padding, after=max(0, reach - self.padding - self.stride + 1))


def stencils(size: Sequence[int], stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> tuple[Stencil, ...]:
    """The stencils of a convolution or a pooling over trailing dims. Each argument is a number for all dims, or one for
    each. Padding may be "same" or "valid"; without a stride it is the size."""
    count = len(size)
    steps, apart = _each(stride, count) or tuple(size), _each(dilation, count)
    pads: Sequence[int | None]
    if padding == "same":
        total = [(one - 1) * wide for one, wide in zip(size, apart, strict=True)]
        pads = [one // 2 if one % 2 == 0 else None for one in total]
    else:
        pads = _each(0 if padding == "valid" else padding, count)
    return tuple(
        Stencil(size=one, stride=step, padding=pad, dilation=wide)
        for one, step, pad, wide in zip(size, steps, pads, apart, strict=True)
    )


def halos(over: Sequence[Stencil], extents: Sequence[int], results: Sequence[int]) -> tuple[Halo | None, ...]:
    """The halo of each dim; None where it cannot be cut. Padding that is not the same on both sides of any dim leaves
    none."""
    if any(stencil.padding is None for stencil in over):
        return (None,) * len(over)
    return tuple(one.halo(*counts) for one, *counts in zip(over, extents, results, strict=True))


def _each(value: Any, count: int) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * count if len(numbers) == 1 else numbers
