"""Collectives along a dim of a tensor, for the processes of one group.

Plain c10d calls into fresh contiguous outputs: they exist alike in gloo, nccl, hccl and the fake backend, are
exact, and never record anything for autograd. Inputs may be strided views; outputs never share memory with them.
`group` has n processes.
"""

import torch
import torch.distributed as dist

from runtime.waiting import waiting_for


def all_gather(piece: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The pieces of all processes joined along `dim` in the order of the group: dim extent d becomes n d."""
    first = piece.movedim(dim, 0).contiguous()
    whole = first.new_empty((first.shape[0] * group.size(), *first.shape[1:]))
    waiting_for(dist.all_gather_single, whole, first, group)
    return whole.movedim(0, dim).contiguous()


def reduce_scatter(term: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This process's piece, cut along `dim`, of the sum of all terms: dim extent d becomes d / n."""
    first = term.movedim(dim, 0).contiguous()
    piece = first.new_empty((first.shape[0] // group.size(), *first.shape[1:]))
    waiting_for(dist.reduce_scatter_single, piece, first, group=group)
    return piece.movedim(0, dim).contiguous()


def all_reduce(term: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the terms of all processes, of the same shape."""
    return _reduced(term, dist.ReduceOp.SUM, group)


def all_reduce_max(term: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The elementwise largest of the terms of all processes, of the same shape."""
    return _reduced(term, dist.ReduceOp.MAX, group)


def _reduced(term: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> torch.Tensor:
    total = term.detach().clone(memory_format=torch.contiguous_format)
    waiting_for(dist.all_reduce, total, operation, group)
    return total


def all_to_all(piece: torch.Tensor, dim: int, to_dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """From pieces cut along `dim` to pieces cut along `to_dim`: extents d, e become n d, e / n.

    Dims lie in memory in the order in which they did: attention hands on the order of its queries, and what flattens
    its heads afterwards is a view only where these lie beside each other.
    """
    strides = piece.stride()
    order = sorted(range(piece.dim()), key=lambda axis: -strides[axis])
    dim, to_dim, inner = order.index(dim), order.index(to_dim), piece.permute(order)
    outgoing = torch.stack(inner.chunk(group.size(), to_dim)).contiguous()  # stacks of strided views may be strided
    incoming = torch.empty_like(outgoing)
    waiting_for(dist.all_to_all_single, incoming, outgoing, group=group)
    moved = incoming.movedim(0, dim).flatten(dim, dim + 1)
    return moved.permute([order.index(axis) for axis in range(piece.dim())])
