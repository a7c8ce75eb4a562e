"""Batch norm with sharded samples: statistics over all samples, forward and backward (synchronised batch norm).

With the elements x of one channel, N of them in all pieces together:

    mean = sum x / N                          all-reduce
    variance = sum (x - mean)^2 / N           all-reduce
    y = weight * z + bias,  z = (x - mean) / sqrt(variance + epsilon)
    gradients of bias and weight = sum g, sum g z         terms of a sum over the pieces, no communication
    gradient of x = weight / sqrt(variance + epsilon) * (g - sum g / N - z sum g z / N)       all-reduce of both sums

(Ioffe and Szegedy 2015, arXiv 1502.03167, algorithm 1 and its backward pass.) The squares are summed after the mean is
known, which costs a second collective and loses no digits. Running statistics take the unbiased variance.

Dims are N C ..., the channels second.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from runtime.comm.collectives import all_reduce

Groups = Sequence[dist.ProcessGroup]


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    groups: Groups,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The local piece of the result, mean and (biased) variance of every channel over all pieces, and the number of
    elements per channel. `groups` are the processes on the axes that split samples or spatial dims into pieces of one
    size."""
    given = weight if weight is not None else x.new_ones(x.shape[1])
    added = bias if bias is not None else x.new_zeros(x.shape[1])
    normal, mean, variance = _BatchNorm.apply(x, given, added, epsilon, groups)  # type: ignore[no-untyped-call]
    return normal, mean, variance, _count(x, groups)


class _BatchNorm(torch.autograd.Function):
    """Keeps input, weight and both statistics. Half precision is summed in float32, as in PyTorch's own kernel. Forward
    makes one float32 copy of the input, backward two, one of which becomes the result."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, groups: Groups
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, wide = _count(x, groups), torch.promote_types(x.dtype, torch.float32)
        mean = _over(x.sum(dim=_others(x), dtype=wide), groups) / count
        centred = x - _channels(mean, x)
        squares = torch.linalg.vector_norm(centred, dim=_others(x)).square()
        variance = _over(squares, groups) / count
        inverse = (variance + epsilon).rsqrt()
        result = centred.mul_(_channels(inverse * weight, x)).add_(_channels(bias, x))
        ctx.groups, ctx.types = groups, (weight.dtype, bias.dtype)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.mark_non_differentiable(mean, variance)
        return result.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        x, weight, mean, inverse = ctx.saved_tensors
        gradient = gradients[0]
        normal = (x - _channels(mean, x)).mul_(_channels(inverse, x))
        of_bias = gradient.sum(dim=_others(x), dtype=normal.dtype)
        of_weight = (gradient * normal).sum(dim=_others(x))
        shares = _over(torch.stack([of_bias, of_weight]), ctx.groups) / _count(x, ctx.groups)
        rest = normal.mul_(_channels(-shares[1], x)).add_(gradient).sub_(_channels(shares[0], x))
        back = rest.mul_(_channels(inverse * weight, x))
        return back.to(x.dtype), of_weight.to(ctx.types[0]), of_bias.to(ctx.types[1]), None, None


def _over(term: torch.Tensor, groups: Groups) -> torch.Tensor:
    for group in groups:
        term = all_reduce(term, group)
    return term


def _others(x: torch.Tensor) -> list[int]:
    """All dims but the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _channels(tensor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One number per channel, so that it broadcasts to `x`."""
    return tensor.view([-1 if dim == 1 else 1 for dim in range(x.dim())])


def _count(x: torch.Tensor, groups: Groups) -> int:
    """Elements of a channel in all pieces together."""
    count = x.numel() // x.shape[1]
    for group in groups:
        count *= group.size()
    return count
