"""Convolutions and pooling of sharded images: first the neighbours send the elements that the stencil reads.

    forward    receive edges ─> join them to the piece ─> kernel without padding on that dim ─> this device's results
    backward   join again ─> gradient of the joined tensor ─> edges are sent back to their owners, and added there

Autograd keeps the original piece, which others may keep too, and the received edges; not the joined copy.
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
    """An operator that slides a stencil. `compute` returns the result for the joined tensor and the weights, and what
    its backward pass needs beside them. `differentiate` returns the requested gradients of the joined tensor and the
    weights, from the gradient of the result, these tensors, and what was kept."""

    compute: Callable[[torch.Tensor, Sequence[torch.Tensor | None]], Tensors]
    differentiate: Callable[
        [torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None], Tensors, Sequence[bool]], Gradients
    ]


def over_pieces(
    piece: torch.Tensor, weights: Sequence[torch.Tensor | None], sliding: Sliding, neighbours: Neighbours
) -> torch.Tensor:
    """This device's results of an operator whose first operand is sharded; `piece` is this device's part. Collective,
    forward and backward."""
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
