"""Local forms of operators that have an extent as an argument, or whose pieces depend on their position."""

from collections.abc import Sequence
from typing import Any

import torch

from planner.graph.torch_operators import resolve
from runtime.ops.shard import Shard


def identity(shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def gradient_start(shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which requires a gradient from here on. It is no leaf of autograd: a leaf, and the gradient that is
    left with it, would live as long as the graph."""
    if not torch.is_grad_enabled():
        return tensor.detach()
    found: torch.Tensor = _Start.apply(tensor, torch.empty(0, device=tensor.device, requires_grad=True))  # type: ignore[no-untyped-call]
    return found


class _Start(torch.autograd.Function):
    """A view of a tensor without a gradient; nobody reads the one that arrives."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


def update(shard: Shard, contents: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The next contents of buffers; nothing is recorded for autograd."""
    return [content.detach() for content in contents]


def reshape(shard: Shard, tensor: torch.Tensor, *spelled: Any, **keywords: Any) -> torch.Tensor:
    return tensor.reshape(shard.shapes[0])


def expand(shard: Shard, tensor: torch.Tensor, *spelled: Any, **keywords: Any) -> torch.Tensor:
    return tensor.expand(shard.shapes[0])


def counted(shard: Shard, *arguments: Any, **keywords: Any) -> Any:
    """arange: its extent is an argument, and every rank computes all of it."""
    return resolve(shard.bound.operator.op)(*arguments, **keywords)


def filled_piece(shard: Shard, *arguments: Any, **keywords: Any) -> Any:
    """zeros, full, new_ones and so on, in the local shape: the first list argument is the shape."""
    spelled = next(at for at, argument in enumerate(arguments) if isinstance(argument, list))
    own = (*arguments[:spelled], list(shard.shapes[0]), *arguments[spelled + 1 :])
    return resolve(shard.bound.operator.op)(*own, **keywords)


def tiled(shard: Shard, tensor: torch.Tensor, times: Sequence[int]) -> torch.Tensor:
    """Repeated so often that it fills the local shape."""
    extents = [1] * (len(times) - tensor.dim()) + list(tensor.shape)
    return tensor.repeat([whole // extent for whole, extent in zip(shard.shapes[0], extents, strict=True)])


def copied(shard: Shard, tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The source of the copy: torch has no derivative of the operator itself."""
    return source.to(tensor.dtype).expand(tensor.shape)


def narrow(shard: Shard, tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return tensor.narrow(dim, start, shard.shapes[0][dim])


def split_with_sizes(shard: Shard, tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    return tensor.split_with_sizes([shape[dim] for shape in shard.shapes], dim)
