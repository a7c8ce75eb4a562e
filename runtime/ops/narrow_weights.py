"""Weights that are cast to 8 bits where they are stored, and gathered so.

    piece of W ──> amax, cast ──> [gather] ──> q(W) ──> product ──> ... ──> gradient of W, wide
                                                 └─ stand-in of 8 bits for autograd ─┘

Autograd casts a gradient to the dtype of what it is of. So the gradient of a weight in 8 bits does not come through it:
the layer leaves it in `Narrow` and hands autograd a stand-in without memory; who gathered the weight takes it from
there. One layer reads such a weight, once in each pass (`planner.graph.fp8.reads_fp8`).
"""

from dataclasses import dataclass

import torch

from planner.fp8_recipes import RECIPES
from runtime.ops.delayed_scales import WEIGHT, LayerScales

DTYPE: torch.dtype = getattr(torch, RECIPES["delayed"].forward)
_BYTES = torch.uint8
"""What messages are made of: no backend sends numbers of 8 bits."""
_PLACE = "narrow_gradient"


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
def cast(piece: torch.Tensor, scales: LayerScales, *, trains: bool) -> torch.Tensor:
    """A piece of a weight as it travels; where a backward pass follows (`trains`), its largest element is taken notice
    of."""
    if trains:
        scales.see(WEIGHT, piece)
    return in_8_bits(piece, scales.scale(WEIGHT), DTYPE).view(_BYTES)


def in_8_bits(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values over their scale, rounded to a dtype of 8 bits; those beyond its range are its largest."""
    most = torch.finfo(dtype).max
    return (wide(values) / scale).clamp_(-most, most).to(dtype)


def wide(values: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return values if values.dtype == torch.float64 else values.float()


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
