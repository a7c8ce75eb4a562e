"""Collectives along dims of tensors, for the processes of one group: of one tensor, or of several coalesced into one.

    all_reduce       [ a | b | c ]                     tensors as they are, end to end; also for reduce
    reduce_scatter   [ a0 b0 c0 | a1 b1 c1 | .. ]      one row per receiving process
    all_gather       [ a b c ]  ->  [ a0 b0 c0 | .. ]  rows arrive and are copied into the tensors
    all_to_all       as reduce_scatter, and back

Plain c10d calls into fresh contiguous outputs: they exist in gloo, nccl, hccl and the fake backend alike, are exact,
and never record anything for autograd. Inputs may be strided views. Coalesced sums add the same elements as separate
collectives would. The blocking forms take one tensor, and their outputs never share memory with it. `group` has n
processes. Where n does not divide a dim that is cut, zeros are appended up to a multiple of n. For a dim that is
joined, `extent` drops what lies behind it (-1: drops nothing).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from runtime.waiting import Pending, waiting_for

Pieces = list[torch.Tensor]


class Collective(NamedTuple):
    """A collective that is about to start: the call (blocking unless called with `async_op`), its send buffer, and the
    function that makes the new pieces after it. An all-gather can also write them into contiguous tensors (`fill`)."""

    call: Callable[..., Pending]
    sent: torch.Tensor
    landed: Callable[[], Pieces]
    fill: Callable[[Pieces], None] | None = None


def all_gather(piece: torch.Tensor, dim: int, group: dist.ProcessGroup, extent: int = -1) -> torch.Tensor:
    """The pieces of all processes joined along `dim` in the order of the group: dim extent d becomes n d."""
    return _blocking(coalesced_all_gather([piece], [dim], group, [extent]))


def reduce_scatter(term: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This process's piece, cut along `dim`, of the sum of all terms: dim extent d becomes d / n."""
    return _blocking(coalesced_reduce_scatter([term], [dim], group))


def all_reduce(term: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the terms of all processes, of the same shape."""
    return _blocking(coalesced_all_reduce([_copy(term)], group))


def all_reduce_max(term: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The elementwise largest of the terms of all processes, of the same shape."""
    return _blocking(coalesced_all_reduce([_copy(term)], group, dist.ReduceOp.MAX))


def all_to_all(piece: torch.Tensor, dim: int, to_dim: int, group: dist.ProcessGroup, extent: int = -1) -> torch.Tensor:
    """From pieces cut along `dim` to pieces cut along `to_dim`: extents d, e become n d, e / n.

    The memory order of the dims stays: attention returns the memory order of its queries, and the later flattening of
    its heads is a view only where the heads lie beside each other.
    """
    strides = piece.stride()
    order = sorted(range(piece.dim()), key=lambda axis: -strides[axis])
    inner = piece.permute(order)
    moved = _blocking(coalesced_all_to_all([inner], [order.index(dim)], [order.index(to_dim)], group, [extent]))
    return moved.permute([order.index(axis) for axis in range(piece.dim())])


def coalesced_all_gather(
    pieces: Pieces, dims: Sequence[int], group: dist.ProcessGroup, extents: Sequence[int]
) -> Collective:
    """`all_gather` of several pieces, from a copy of them. A single piece is copied only where it is not contiguous in
    the order in which it is sent."""
    first = [piece.movedim(dim, 0) for piece, dim in zip(pieces, dims, strict=True)]
    flat = first[0].contiguous() if len(first) == 1 else torch.cat([one.reshape(-1) for one in first])
    return _gathered(flat, [one.shape for one in first], dims, group, extents)


def coalesced_reduce_scatter(pieces: Pieces, dims: Sequence[int], group: dist.ProcessGroup) -> Collective:
    """`reduce_scatter` of several terms."""
    rows = group.size()
    first = [piece.movedim(dim, 0) for piece, dim in zip(pieces, dims, strict=True)]
    shapes = [torch.Size((-(-one.shape[0] // rows), *one.shape[1:])) for one in first]
    lone = len(first) == 1
    flat = extended(first[0], 0, rows * shapes[0][0]).contiguous() if lone else _cut(first, rows, shapes).view(-1)
    own = flat.new_empty((flat.shape[0] // rows, *flat.shape[1:]))

    def landed() -> Pieces:
        return [part.movedim(0, dim).contiguous() for part, dim in zip(_parts(own, shapes), dims, strict=True)]

    return Collective(partial(dist.reduce_scatter_single, own, flat, group=group), flat, landed)


def coalesced_all_reduce(
    pieces: Pieces, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Collective:
    """`all_reduce` of several terms. A single term is not read again, so its own memory may take the sum."""
    lone = len(pieces) == 1
    flat = pieces[0].contiguous() if lone else torch.cat([piece.reshape(-1) for piece in pieces])
    shapes = [piece.shape for piece in pieces]

    def landed() -> Pieces:
        return [flat] if lone else [part.view(shape) for part, shape in zip(_split(flat, shapes), shapes, strict=True)]

    return Collective(partial(dist.all_reduce, flat, operation, group), flat, landed)


def coalesced_reduce(pieces: Pieces, root: int, group: dist.ProcessGroup) -> Collective:
    """Sums of several terms for the process `root` of the group alone; the results of the others are meaningless. A
    single term is not read again, so its own memory may take the sum."""
    lone = len(pieces) == 1
    flat = pieces[0].contiguous() if lone else torch.cat([piece.reshape(-1) for piece in pieces])
    shapes = [piece.shape for piece in pieces]

    def landed() -> Pieces:
        return [flat] if lone else [part.view(shape) for part, shape in zip(_split(flat, shapes), shapes, strict=True)]

    return Collective(partial(dist.reduce, flat, group=group, group_dst=root), flat, landed)


def coalesced_all_to_all(
    pieces: Pieces, dims: Sequence[int], to_dims: Sequence[int], group: dist.ProcessGroup, extents: Sequence[int]
) -> Collective:
    """`all_to_all` of several pieces; the results lie in memory in the order of their dims."""
    rows = group.size()
    even = [extended(one, dim, -(-one.shape[dim] // rows) * rows) for one, dim in zip(pieces, to_dims, strict=True)]
    cut = [torch.stack(piece.chunk(rows, to_dim)) for piece, to_dim in zip(even, to_dims, strict=True)]
    flat, shapes = _in_rows(cut), [one.shape[1:] for one in cut]
    del even, cut
    incoming = torch.empty_like(flat)

    def landed() -> Pieces:
        parts = zip(_parts(incoming, shapes), dims, extents, strict=True)
        joined = ((part.movedim(0, dim).flatten(dim, dim + 1), dim, extent) for part, dim, extent in parts)
        return [one if extent < 0 else one.narrow(dim, 0, extent) for one, dim, extent in joined]

    return Collective(partial(dist.all_to_all_single, incoming, flat, group=group), flat, landed)


def _blocking(collective: Collective) -> torch.Tensor:
    """The new piece of a collective of one tensor."""
    waiting_for(collective.call)
    (piece,) = collective.landed()
    return piece


def _copy(term: torch.Tensor) -> torch.Tensor:
    return term.detach().clone(memory_format=torch.contiguous_format)


def _gathered(
    flat: torch.Tensor,
    shapes: Sequence[torch.Size],
    dims: Sequence[int],
    group: dist.ProcessGroup,
    extents: Sequence[int],
) -> Collective:
    """An all-gather of pieces end to end, or of a single one as it is; the gathered dim of each piece is the first
    one."""
    rows, lone = group.size(), len(shapes) == 1
    whole = flat.new_empty((rows * flat.shape[0], *flat.shape[1:]))

    def parts() -> Sequence[torch.Tensor]:
        return [torch.unflatten(whole, 0, (rows, -1))] if lone else _parts(whole.view(rows, -1), shapes)

    def fill(into: Pieces) -> None:
        _join([one.movedim(dim, 0) for one, dim in zip(into, dims, strict=True)], parts(), whole.view(rows, -1))

    def landed() -> Pieces:
        if lone:
            ((dim, extent),) = zip(dims, extents, strict=True)
            joined = whole if extent < 0 else whole.narrow(0, 0, extent)
            return [joined.movedim(0, dim).contiguous()]
        made = [_whole_of(*one) for one in zip(parts(), dims, extents, strict=True)]
        fill(made)
        return made

    return Collective(partial(dist.all_gather_single, whole, flat, group=group), flat, landed, fill)


def extended(piece: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """A tensor with zeros appended along a dim up to this extent; the tensor itself where it already has it."""
    missing = extent - piece.shape[dim]
    if missing == 0:
        return piece
    return torch.cat([piece, piece.new_zeros(*piece.shape[:dim], missing, *piece.shape[dim + 1 :])], dim)


def _aligned(rows: torch.Tensor, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views on the same elements, one of rows (n, d, ..) and one of a tensor of n d rows or fewer: a pair for
    the full rows, and one for the partial row."""
    length = rows.shape[1]
    full = len(whole) // length
    border = full * length
    found = [(rows[:full], torch.unflatten(whole[:border], 0, (full, length)))]
    if border < len(whole):
        found.append((rows[full, : len(whole) - border], whole[border:]))
    return found


def _cut(whole: Pieces, rows: int, shapes: Sequence[torch.Size]) -> torch.Tensor:
    """Tensors, each cut into rows of a shape, side by side; one kernel copies them where all are contiguous and cut
    evenly."""
    flat = whole[0].new_empty((rows, sum(shape.numel() for shape in shapes)))
    if all(one.is_contiguous() and len(one) == rows * shape[0] for one, shape in zip(whole, shapes, strict=True)):
        torch._chunk_cat(whole, 0, rows, out=flat)
        return flat
    for place, one, shape in zip(_split(flat, shapes), whole, shapes, strict=True):
        parts = torch.unflatten(place, 1, shape)
        parts[len(one) // shape[0] :].zero_()
        for row, part in _aligned(parts, one):
            row.copy_(part)
    return flat


def _whole_of(rows: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """Memory for rows (n, d, ..) concatenated along a dim: n d, or the first `extent` of these."""
    shape = list(rows.shape[2:])
    shape.insert(dim, rows.shape[0] * rows.shape[1] if extent < 0 else extent)
    return rows.new_empty(shape)


def _join(whole: Pieces, parts: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Fill tensors of at most n d rows each with parts of a buffer, (n, d, ..), concatenated; one kernel copies them
    where all are contiguous and full."""
    if all(
        one.is_contiguous() and len(one) == len(part) * part.shape[1] for one, part in zip(whole, parts, strict=True)
    ):
        sizes = [part[0].numel() for part in parts]
        torch.split_with_sizes_copy(flat, sizes, 1, out=[one.view(len(flat), -1) for one in whole])
        return
    for one, part in zip(whole, parts, strict=True):
        for row, into in _aligned(part, one):
            into.copy_(row)


def _parts(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
    """Tensors of these shapes in a buffer, or in each row of one; a single tensor takes the buffer as it is."""
    if len(shapes) == 1:
        return (flat,)
    return [torch.unflatten(part, -1, shape) for part, shape in zip(_split(flat, shapes), shapes, strict=True)]


def _split(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
    return torch.split(flat, [shape.numel() for shape in shapes], dim=-1)


def _in_rows(cut: Pieces) -> torch.Tensor:
    """Tensors, whose first dim is the receiving process, side by side: one row for each process. A single tensor stays
    as it is, and is copied only where it is not contiguous."""
    if len(cut) == 1:
        return cut[0].contiguous()
    sizes = [one[0].numel() for one in cut]
    flat = cut[0].new_empty((cut[0].shape[0], sum(sizes)))
    for place, one in zip(torch.split(flat, sizes, dim=1), cut, strict=True):
        torch.unflatten(place, 1, one.shape[1:]).copy_(one)
    return flat
