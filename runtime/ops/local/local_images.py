"""Local forms of convolutions and pooling.

Each is called with a `Shard` and with the operator's own arguments, tensors being local (see
`runtime.ops.local.local_ops`). Where an axis cuts pixels and a stencil reads those of neighbours, they are received
first (`runtime.ops.halo`).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from planner.graph.torch_operators import resolve
from planner.sharding.halo import Stencil, stencils
from planner.sharding.rules.convolution import SPATIAL, halo_factor
from runtime.comm.halo import Neighbours
from runtime.ops.halo import Sliding, over_pieces

if TYPE_CHECKING:
    from runtime.ops.shard import Shard

_aten = torch.ops.aten

_SLIDES = (("stride", 1), ("padding", 0), ("dilation", 1))
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
"""Arguments of a convolution; and, of these, those that say how its stencil slides, with their defaults."""

_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
"""Arguments of a transposed convolution."""


def convolution(shard: "Shard", *arguments: Any, **keywords: Any) -> torch.Tensor:
    """A convolution with this rank's number of groups."""
    given = dict(zip(_CONVOLUTION, arguments, strict=False)) | keywords
    groups = given.pop("groups", 1) // math.prod(shard.place.mesh.sizes[axis] for axis in shard.axes("g"))
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    extents = weight.shape[2:]
    over = stencils(extents, *(given.get(name, default) for name, default in _SLIDES))
    found = neighbours(shard, over, x, 0.0)
    if found is None:
        made: torch.Tensor = resolve(shard.bound.operator.op)(**given, groups=groups)
        return made
    lone = x.dim() == len(extents) + 1
    pads, nothing = _pads(over, found, x.dim()), [0] * len(extents)
    slides = [one.stride for one in over], pads, [one.dilation for one in over], False, nothing, groups

    def compute(joined: torch.Tensor, weights: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        result = _aten.convolution(joined.unsqueeze(0) if lone else joined, *weights, *slides)
        return (result.squeeze(0) if lone else result,)

    def differentiate(
        gradient: torch.Tensor,
        joined: torch.Tensor,
        weights: Sequence[torch.Tensor | None],
        kept: tuple[torch.Tensor, ...],
        asked: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        given = (gradient.unsqueeze(0), joined.unsqueeze(0)) if lone else (gradient, joined)
        sizes = None if weights[1] is None else list(weights[1].shape)
        wide, *others = _aten.convolution_backward(*given, weights[0], sizes, *slides, list(asked))
        return [wide.squeeze(0) if lone and wide is not None else wide, *others]

    return over_pieces(x, (weight, bias), Sliding(compute=compute, differentiate=differentiate), found)


def transposed_convolution(shard: "Shard", *arguments: Any, **keywords: Any) -> torch.Tensor:
    """A transposed convolution with this rank's number of groups."""
    given = dict(zip(_TRANSPOSED, arguments, strict=False)) | keywords
    groups = given.pop("groups", 1) // math.prod(shard.place.mesh.sizes[axis] for axis in shard.axes("g"))
    made: torch.Tensor = resolve(shard.bound.operator.op)(**given, groups=groups)
    return made


def max_pool2d(
    shard: "Shard",
    x: torch.Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> torch.Tensor:
    """The maximum over each stencil; autograd keeps its position."""
    over = stencils(_both(kernel_size), stride, padding, dilation)
    found = neighbours(shard, over, x, -math.inf)
    if found is None:
        whole: torch.Tensor = resolve(shard.bound.operator.op)(x, kernel_size, stride, padding, dilation, ceil_mode)
        return whole
    slides = _slides(over, _pads(over, found, x.dim()))
    slides = (*slides, [one.dilation for one in over], False)
    return over_pieces(
        x,
        (),
        Sliding(
            compute=lambda joined, _: _aten.max_pool2d_with_indices(joined, *slides),
            differentiate=lambda gradient, joined, _, kept, asked: [
                _aten.max_pool2d_with_indices_backward(gradient, joined, *slides, kept[0])
            ],
        ),
        found,
    )


def avg_pool2d(
    shard: "Shard",
    x: torch.Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """The mean over each stencil."""
    over = stencils(_both(kernel_size), stride, padding)
    found = neighbours(shard, over, x, 0.0)
    if found is None:
        whole: torch.Tensor = resolve(shard.bound.operator.op)(
            x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        )
        return whole
    slides = (*_slides(over, _pads(over, found, x.dim())), False, True, divisor_override)
    return over_pieces(
        x,
        (),
        Sliding(
            compute=lambda joined, _: (_aten.avg_pool2d(joined, *slides),),
            differentiate=lambda gradient, joined, _, kept, asked: [
                _aten.avg_pool2d_backward(gradient, joined, *slides)
            ],
        ),
        found,
    )


def neighbours(shard: "Shard", over: Sequence[Stencil], x: torch.Tensor, outside: float) -> Neighbours | None:
    """The neighbours with which edges of a dim are exchanged; None where no stencil reads a neighbour's elements."""
    names = SPATIAL[len(SPATIAL) - len(over) :]
    for at, (name, stencil) in enumerate(zip(names, over, strict=True)):
        axes = shard.axes(halo_factor(name))
        if axes and shard.bound.rule.index[halo_factor(name)] in shard.bound.rule.halos:
            (axis,) = axes
            halo = stencil.halo(shard.extent(name), shard.extent(f"p{name}"))
            assert halo is not None, "the rule has a factor for it"
            dim = x.dim() - len(over) + at
            place = shard.place.coordinate[axis]
            return Neighbours(dim=dim, halo=halo, group=shard.place.group(axis), place=place, outside=outside)
    return None


def _pads(over: Sequence[Stencil], found: Neighbours, dims: int) -> list[int]:
    """Padding of each dim; none for the dim to which edges are joined."""
    own = found.dim - dims + len(over)
    return [0 if at == own else one.padding or 0 for at, one in enumerate(over)]


def _slides(over: Sequence[Stencil], pads: list[int]) -> tuple[Any, ...]:
    return [one.size for one in over], [one.stride for one in over], pads


def _both(size: Any) -> tuple[int, ...]:
    """The size of a stencil over two dims, from a number for both or one for each."""
    numbers = (size,) if isinstance(size, int) else tuple(size)
    return numbers if len(numbers) > 1 else 2 * numbers
