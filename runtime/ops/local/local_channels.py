"""Local forms of operators on channels: those with a number of groups in their arguments, and batch norm.

Each is called with a `Shard` and with the operator's own arguments, tensors being local (see
`runtime.ops.local.local_ops`).
"""

import math
from typing import TYPE_CHECKING

import torch

from planner.graph.torch_operators import resolve
from runtime.ops.batch_norm import batch_norm

if TYPE_CHECKING:
    from runtime.ops.shard import Shard


def group_norm(
    shard: "Shard",
    tensor: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """A group norm with this rank's number of groups."""
    return torch.nn.functional.group_norm(tensor, groups // _pieces(shard, "g"), weight, bias, epsilon)


def functional_batch_norm(
    shard: "Shard",
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_variance: torch.Tensor,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    """Result, mean and reciprocal deviation of the batch, and the new running mean and variance, float32 at least, as
    in graphs. In evaluation all of these are the running ones, unchanged."""
    if not training:
        result = torch.batch_norm(x, weight, bias, running_mean, running_variance, False, momentum, epsilon, False)
        return (
            result, running_mean, (running_variance + epsilon).rsqrt(), _wide(running_mean), _wide(running_variance)
        )  # fmt: skip
    groups = _groups(shard)
    if not groups:
        whole: tuple[torch.Tensor, ...] = resolve(shard.bound.operator.op)(
            x, weight, bias, running_mean, running_variance, training, momentum, epsilon
        )
        return (*whole[:3], _wide(whole[3]), _wide(whole[4]))
    result, mean, variance, count = batch_norm(x, weight, bias, epsilon, groups)
    unbiased = variance * (count / max(1, count - 1))
    return (
        result,
        mean,
        (variance + epsilon).rsqrt(),
        _wide(running_mean.lerp(mean.to(running_mean.dtype), momentum)),
        _wide(running_variance.lerp(unbiased.to(running_variance.dtype), momentum)),
    )


def _wide(statistic: torch.Tensor) -> torch.Tensor:
    """The dtype that the operator declares for tensors without data; kernels return the dtype of their input."""
    return statistic.to(torch.promote_types(statistic.dtype, torch.float32))


def batch_norm_without_running(
    shard: "Shard",
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    """Result, mean and reciprocal deviation of the batch."""
    groups = _groups(shard)
    if not groups:
        return torch.native_batch_norm(x, weight, bias, None, None, training, momentum, epsilon)
    result, mean, variance, _ = batch_norm(x, weight, bias, epsilon, groups)
    return result, mean, (variance + epsilon).rsqrt()


def plain_batch_norm(
    shard: "Shard",
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """The result alone: by the batch's statistics where none are kept, or by running statistics that stay unchanged."""
    assert running_mean is None or not training, "tracing has made an update of it"
    if training and (groups := _groups(shard)):
        return batch_norm(x, weight, bias, epsilon, groups)[0]
    return torch.batch_norm(x, weight, bias, running_mean, running_variance, training, momentum, epsilon, False)


def _groups(shard: "Shard") -> list[torch.distributed.ProcessGroup]:
    """The processes that have parts of the elements of the statistics."""
    axes = sorted(axis for factor in ("n", "d", "h", "w") for axis in shard.axes(factor))
    return [shard.place.group(axis) for axis in axes]


def _pieces(shard: "Shard", factor: str) -> int:
    return math.prod(shard.place.mesh.sizes[axis] for axis in shard.axes(factor))
