"""Convolutions and pooling of pieces: what their stencils read of the neighbours comes first.

    forward    edges come ─> joined to the piece ─> the kernel, without padding on that dim ─> this device's results
    backward   joined again ─> gradient of what was joined ─> edges go back to whose they are, and are added there

Autograd keeps the piece as it is, which others may keep too, and the edges that came; not the copy that both were
joined to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.comm.halo import Neighbours
from runtime.ops.kept_results import whole_call

Tensors = tuple[torch.Tensor, ...]
Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliding:
    """An operator that slides a stencil: `compute` makes the result of the joined tensor and weights, and what its
    backward pass needs beside them; `differentiate` makes gradients of the joined tensor and of the weights, as far as
    they are asked for, from the gradient of the result, these, and what was kept."""

    compute: Callable[[torch.Tensor, Sequence[torch.Tensor | None]], Tensors]
    differentiate: Callable[
        [torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None], Tensors, Sequence[bool]], Gradients
    ]


def over_pieces(
    piece: torch.Tensor, weights: Sequence[torch.Tensor | None], sliding: Sliding, neighbours: Neighbours
) -> torch.Tensor:
    """The results of this device of an operator whose first operand is cut, `piece` being its part. Collective, forward
    and backward."""
    return _OverPieces.apply(piece, sliding, neighbours, *weights)  # type: ignore[no-any-return, no-untyped-call]


class _OverPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, piece: torch.Tensor, sliding: Sliding, neighbours: Neighbours, *weights: torch.Tensor | None
    ) -> torch.Tensor:
        def compute() -> Tensors:
            sides = neighbours.edges(piece)
            made = sliding.compute(neighbours.joined(piece, sides), weights)
            return (*made, *(side for side in sides if side is not None))

        result, *kept = whole_call(compute)
        ctx.sliding, ctx.neighbours = sliding, neighbours
        ctx.sides = int(neighbours.halo.before > 0) + int(neighbours.halo.after > 0)
        ctx.save_for_backward(piece, *weights, *kept)
        ctx.weights = len(weights)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sliding, neighbours = ctx.sliding, ctx.neighbours
        piece, *rest = ctx.saved_tensors
        weights, kept = rest[: ctx.weights], rest[ctx.weights :]
        beside, come = kept[: len(kept) - ctx.sides], iter(kept[len(kept) - ctx.sides :])
        halo = neighbours.halo
        sides = (next(come) if halo.before else None, next(come) if halo.after else None)
        joined = neighbours.joined(piece, sides)
        asked = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        wide, *others = sliding.differentiate(gradients[0], joined, weights, tuple(beside), asked)
        del joined
        own = neighbours.own(wide) if wide is not None else None
        return own, None, None, *others
