"""Weights that are cast to 8 bits where they are stored, and gathered in 8 bits.

    piece of W ──> cast by the scales of the whole ──> [gather] ──> q(W) ──> product ──> ... ──> gradient of W, wide
                                                                      └─ stand-in of 8 bits for autograd ─┘

The largest elements of a weight are found once per step, at its beginning, because the weight does not change within a
step. They give this step's own scales (`runtime.ops.fp8.weight_scales`) or those of later steps
(`runtime.ops.fp8.delayed_scales`).

Autograd casts a gradient to the dtype of its tensor. So the gradient of an 8-bit weight bypasses autograd: the layer
stores it in `Narrow` and gives autograd a stand-in without memory; the code that gathered the weight takes it from
`Narrow`. One layer reads such a weight, once in each pass (`planner.graph.fp8.reads_fp8`).
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from planner.fp8_recipes import BLOCK, FORWARD
from planner.models.experts.fp8 import in_bytes
from runtime.ops.fp8.narrow_casts import has_narrow_cast, narrow_cast

DTYPE: torch.dtype = getattr(torch, FORWARD)
_BYTES = torch.uint8
"""The dtype of messages: no backend sends 8-bit floats."""
_PLACE = "narrow_gradient"
_AT_ONCE = 2**22
"""Elements of a piece that are cast at a time, so that their 32-bit copies take little memory."""


class Casts(Protocol):
    """Gives the scales for casting a piece of a weight."""

    def in_8_bits(self, piece: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True, eq=False)
class Narrow:
    """Holds the gradient of an 8-bit weight."""

    gradient: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the gradient, and release it."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None, "its layer has been there"
        return gradient


@torch.no_grad()
def cast(piece: torch.Tensor, scales: Casts) -> torch.Tensor:
    """A piece of a weight in 8 bits, as it is gathered."""
    return scales.in_8_bits(piece.detach()).view(_BYTES)


@torch.no_grad()
def largest_of(piece: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """The largest magnitude in a piece, (), or along some dims, which keep an extent of 1; without a copy of it."""
    found: torch.Tensor = torch.linalg.vector_norm(piece.detach(), math.inf, dim=dim, keepdim=dim is not None)
    return found


@torch.library.custom_op("planner::piece_in_8_bits", mutates_args=())
def piece_in_8_bits(piece: torch.Tensor, scales: torch.Tensor, start: list[int]) -> torch.Tensor:
    """A piece of a weight in e4m3, divided by `scales`: one, (), or one per 128 x 128 of the weight, in which the piece
    begins at `start`."""
    made = torch.empty_like(piece, dtype=DTYPE, memory_format=torch.contiguous_format)
    count = max(1, _AT_ONCE // max(1, piece[:1].numel()))
    for first in range(0, len(piece), count):
        part, own = piece[first : first + count], scales
        if scales.ndim:
            for dim, begin in enumerate((start[0] + first, start[1])):
                own = own.index_select(dim, blocks_from(begin, part.shape[dim], scales.shape[dim], piece.device))
        made[first : first + count] = in_8_bits(part, own, DTYPE)
    return made


def blocks_from(start: int, extent: int, blocks: int, device: torch.device) -> torch.Tensor:
    """The block of 128 that each index is in, of `blocks` blocks; zeros that fill up a piece count to the last one."""
    return (torch.arange(start, start + extent, device=device) // BLOCK).clamp_(max=blocks - 1)


@piece_in_8_bits.register_fake
def _(piece: torch.Tensor, *_others: object) -> torch.Tensor:
    return torch.empty_like(piece, dtype=DTYPE, memory_format=torch.contiguous_format)


def in_8_bits(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values divided by their scale, rounded to an 8-bit dtype; values beyond its range saturate."""
    return narrow_cast(values, scale, dtype) if has_narrow_cast(values) else in_bytes(values, scale, dtype)


def received(weight: torch.Tensor) -> torch.Tensor:
    """A gathered weight after it has arrived."""
    return weight.view(DTYPE)


def belongs(weight: torch.Tensor, gradient: Narrow) -> None:
    """Attach to a weight the object that receives its gradient."""
    setattr(weight, _PLACE, gradient)


def place_of(weight: torch.Tensor) -> Narrow:
    """The object that receives the gradient of a weight."""
    found = getattr(weight, _PLACE)
    assert isinstance(found, Narrow)
    return found


def stand_in(weight: torch.Tensor) -> torch.Tensor:
    """A stand-in for a gradient, for autograd."""
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
