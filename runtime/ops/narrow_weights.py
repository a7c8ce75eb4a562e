"""Weights that are cast to 8 bits where they are stored, and gathered so.

    piece of W ──> cast by the scales of the whole ──> [gather] ──> q(W) ──> product ──> ... ──> gradient of W, wide
                                                                      └─ stand-in of 8 bits for autograd ─┘

The largest elements of a weight are looked for once a step, as it begins: it is the same throughout. They are those of
the step's own scales (`runtime.ops.weight_scales`) or of those to come (`runtime.ops.delayed_scales`).

Autograd casts a gradient to the dtype of what it is of. So the gradient of a weight in 8 bits does not come through it:
the layer leaves it in `Narrow` and hands autograd a stand-in without memory; who gathered the weight takes it from
there. One layer reads such a weight, once in each pass (`planner.graph.fp8.reads_fp8`).
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from planner.fp8_recipes import BLOCK, FORWARD
from planner.models.fp8_experts import in_bytes
from runtime.ops.narrow_casts import has_narrow_cast, narrow_cast

DTYPE: torch.dtype = getattr(torch, FORWARD)
_BYTES = torch.uint8
"""What messages are made of: no backend sends numbers of 8 bits."""
_PLACE = "narrow_gradient"
_AT_ONCE = 2**22
"""Elements of a piece that are cast at a time, so that their copies in 32 bits take no memory worth a word."""


class Casts(Protocol):
    """Knows by which scales a piece of a weight is cast."""

    def in_8_bits(self, piece: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True, eq=False)
class Narrow:
    """Where the gradient of a weight in 8 bits is brought."""

    gradient: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """The gradient, once."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None, "its layer has been there"
        return gradient


@torch.no_grad()
def cast(piece: torch.Tensor, scales: Casts) -> torch.Tensor:
    """A piece of a weight as it travels."""
    return scales.in_8_bits(piece.detach()).view(_BYTES)


@torch.no_grad()
def largest_of(piece: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """The largest magnitude among the elements of a piece, (), or along some dims, which keep an extent of 1; without a
    copy of it."""
    found: torch.Tensor = torch.linalg.vector_norm(piece.detach(), math.inf, dim=dim, keepdim=dim is not None)
    return found


@torch.library.custom_op("planner::piece_in_8_bits", mutates_args=())
def piece_in_8_bits(piece: torch.Tensor, scales: torch.Tensor, start: list[int]) -> torch.Tensor:
    """A piece of a weight in e4m3, over `scales`: one, (), or one for each 128 x 128 of the weight, in which the piece
    has a `start`."""
    made = torch.empty_like(piece, dtype=DTYPE, memory_format=torch.contiguous_format)
    count = max(1, _AT_ONCE // max(1, piece[:1].numel()))
    for first in range(0, len(piece), count):
        part, own = piece[first : first + count], scales
        if scales.ndim:
            for dim, begin in enumerate((start[0] + first, start[1])):
                own = own.index_select(dim, blocks_from(begin, part.shape[dim], piece.device))
        made[first : first + count] = in_8_bits(part, own, DTYPE)
    return made


def blocks_from(start: int, extent: int, device: torch.device) -> torch.Tensor:
    """The block of 128 of each of some indices."""
    return torch.arange(start, start + extent, device=device) // BLOCK


@piece_in_8_bits.register_fake
def _(piece: torch.Tensor, *_others: object) -> torch.Tensor:
    return torch.empty_like(piece, dtype=DTYPE, memory_format=torch.contiguous_format)


def in_8_bits(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values over their scale, rounded to a dtype of 8 bits; those beyond its range are its largest."""
    return narrow_cast(values, scale, dtype) if has_narrow_cast(values) else in_bytes(values, scale, dtype)


def received(weight: torch.Tensor) -> torch.Tensor:
    """A weight as it has arrived."""
    return weight.view(DTYPE)


def belongs(weight: torch.Tensor, gradient: Narrow) -> None:
    """Say of a weight where its gradient is brought."""
    setattr(weight, _PLACE, gradient)


def place_of(weight: torch.Tensor) -> Narrow:
    """Where the gradient of a weight is brought."""
    found = getattr(weight, _PLACE)
    assert isinstance(found, Narrow)
    return found


def stand_in(weight: torch.Tensor) -> torch.Tensor:
    """For autograd, in the place of a gradient."""
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
