"""The RMS norm as one operator on devices where PyTorch composes it of several.

    y = x r w,  r = 1 / sqrt(mean(x^2) + epsilon)        over the last dims D of x, in float32 (float64 for float64)

    gradient of x = r (g w - x r mean(g w x r))         gradient of w = sum of g x r over the other dims

Composed, autograd keeps the normalised input beside the input. Fused, it keeps the input, the weight and r, as
accelerator kernels do (Zhang and Sennrich 2019, arXiv 1910.07467). So memory is the same as the plan's prediction on
all devices.

A `TorchDispatchMode` sees one kernel. Without such a mode the dispatcher is skipped, because it takes longer than the
work on a small tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch


def fused_rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, epsilon: float | None = None
) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` over the last dims, of the given shape; a wider weight is not rounded. The default
    `epsilon` is that of the dtype of the computation, as in PyTorch."""
    return _RMSNorm.apply(x, weight, len(shape), epsilon)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int, epsilon: float | None
    ) -> torch.Tensor:
        kernel = _FORWARD if torch._C._len_torch_dispatch_stack() else _forward
        made = kernel(x, weight, dims, torch.finfo(_wide_dtype(x)).eps if epsilon is None else epsilon)
        ctx.dims = dims
        ctx.save_for_backward(x, weight, made[1])
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight, reciprocal = ctx.saved_tensors
        kernel = _BACKWARD if torch._C._len_torch_dispatch_stack() else _backward
        of_x, of_weight = kernel(gradients[0], x, weight, reciprocal, ctx.dims)
        return of_x, None if weight is None else of_weight, None, None


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, dims: int, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(x)
    reciprocal = (wide * wide).mean(_last(dims), keepdim=True).add_(epsilon).rsqrt_()
    y = wide * reciprocal
    return _narrow(y if weight is None else y.mul_(weight), x), reciprocal


def _forward_types(
    x: torch.Tensor, weight: torch.Tensor | None, dims: int, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    reciprocal = x.new_empty((*x.shape[:-dims], *(1 for _ in range(dims))), dtype=_wide_dtype(x))
    return torch.empty_like(x), reciprocal


def _backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, reciprocal: torch.Tensor, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the weight; without a weight the second is empty."""
    scaled, normalised = _wide(gradient), _wide(x) * reciprocal
    of_weight = x.new_empty(0)
    if weight is not None:
        others = tuple(range(x.dim() - dims))
        terms = scaled * normalised
        of_weight = _narrow(terms.sum(others) if others else terms, weight)
        scaled = scaled * weight
    mean = (scaled * normalised).mean(_last(dims), keepdim=True)
    return _narrow((scaled - normalised.mul_(mean)).mul_(reciprocal), x), of_weight


def _backward_types(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, reciprocal: torch.Tensor, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _last(dims: int) -> tuple[int, ...]:
    return tuple(range(-dims, 0))


def _wide_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float32 else x.to(_wide_dtype(x))


def _narrow(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return made if made.dtype is like.dtype else made.to(like.dtype)


_FORWARD = torch.library.custom_op("planner::rms_norm", _forward, mutates_args=())
_FORWARD.register_fake(_forward_types)
_BACKWARD = torch.library.custom_op("planner::rms_norm_backward", _backward, mutates_args=())
_BACKWARD.register_fake(_backward_types)
