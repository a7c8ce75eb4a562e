"""The RMS norm as one operator on devices for which PyTorch composes it of several.

    y = x r w,  r = 1 / sqrt(mean(x^2) + epsilon)        over the last dims D of x, in float32 (float64 for float64)

    gradient of x = r (g w - x r^2 mean(g w x))         gradient of w = sum of g x r over the other dims

Composed, autograd keeps the normalised input beside the input; fused, it keeps the input, the weight and r, as the
kernels of accelerators do (Zhang and Sennrich 2019, arXiv 1910.07467). Memory is then what a plan predicts everywhere.
"""

from collections.abc import Sequence
from typing import Any

import torch


def fused_rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, epsilon: float | None = None
) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` over the last dims, of the given shape; the weight has the dtype of x. Where no
    `epsilon` is given it is that of the dtype in which it is computed, as in PyTorch."""
    return _RMSNorm.apply(x, weight, len(shape), epsilon)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int, epsilon: float | None
    ) -> torch.Tensor:
        made: tuple[torch.Tensor, torch.Tensor] = _forward(
            x, weight, dims, torch.finfo(_wide_dtype(x)).eps if epsilon is None else epsilon
        )
        ctx.dims = dims
        ctx.save_for_backward(x, weight, made[1])
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight, reciprocal = ctx.saved_tensors
        of_x, of_weight = _backward(gradients[0], x, weight, reciprocal, ctx.dims)
        return of_x, None if weight is None else of_weight, None, None


@torch.library.custom_op("planner::rms_norm", mutates_args=())
def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, dims: int, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(x)
    reciprocal = torch.rsqrt(wide.square().mean(_last(dims), keepdim=True) + epsilon)
    y = wide * reciprocal
    return (y if weight is None else y * weight).to(x.dtype), reciprocal


@_forward.register_fake
def _forward_types(
    x: torch.Tensor, weight: torch.Tensor | None, dims: int, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    reciprocal = x.new_empty((*x.shape[:-dims], *(1 for _ in range(dims))), dtype=_wide_dtype(x))
    return torch.empty_like(x), reciprocal


@torch.library.custom_op("planner::rms_norm_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, reciprocal: torch.Tensor, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the weight; without a weight the second is empty."""
    wide, scaled = _wide(x), _wide(gradient)
    of_weight = x.new_empty(0)
    if weight is not None:
        others = tuple(range(x.dim() - dims))
        of_weight = scaled * wide * reciprocal
        of_weight = (of_weight.sum(others) if others else of_weight).to(weight.dtype)
        scaled = scaled * weight
    mean = (scaled * wide).mean(_last(dims), keepdim=True)
    return (reciprocal * (scaled - wide * reciprocal.square() * mean)).to(x.dtype), of_weight


@_backward.register_fake
def _backward_types(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, reciprocal: torch.Tensor, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _last(dims: int) -> tuple[int, ...]:
    return tuple(range(-dims, 0))


def _wide_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(_wide_dtype(x))
