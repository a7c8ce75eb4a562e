"""Redistribution of a local tensor, forward and (dually) backward.

A value's producer promises one pair of layouts, and its consumer wants another:

    value      producer.forward  ──steps──>  consumer.forward
    gradient   producer.gradient <──steps──  consumer.gradient

Both directions are short lists of collectives and local cuts that `planner.sharding.redistribute` found; this file only
executes them. Tensors are local pieces; their layouts are known from the plan and are never sent with them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from planner.sharding.layout import Layout, PaddedShape, replicated
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import COLLECTIVES, Step, is_view, redistribution
from planner.sharding.rule import Duplex
from planner.sharding.zigzag import zigzag_runs
from runtime.comm import collectives
from runtime.comm.device_mesh import RankMesh


def _all_gather(piece: torch.Tensor, step: Step, place: RankMesh) -> torch.Tensor:
    whole = collectives.all_gather(piece, step.dim, place.group(step.axis), step.extent)
    return natural(whole, step.dim, place.mesh.sizes[step.axis]) if step.zigzag else whole


def _reduce_scatter(piece: torch.Tensor, step: Step, place: RankMesh) -> torch.Tensor:
    if step.zigzag:
        piece = by_device(piece, step.dim, place.mesh.sizes[step.axis])
    return collectives.reduce_scatter(piece, step.dim, place.group(step.axis))


def _all_reduce(piece: torch.Tensor, step: Step, place: RankMesh) -> torch.Tensor:
    return collectives.all_reduce(piece, place.group(step.axis))


def _all_to_all(piece: torch.Tensor, step: Step, place: RankMesh) -> torch.Tensor:
    if step.to_dim in step.zigzag:
        piece = by_device(piece, step.to_dim, place.mesh.sizes[step.axis])
    moved = collectives.all_to_all(piece, step.dim, step.to_dim, place.group(step.axis), step.extent)
    return natural(moved, step.dim, place.mesh.sizes[step.axis]) if step.dim in step.zigzag else moved


def _slice(piece: torch.Tensor, step: Step, place: RankMesh) -> torch.Tensor:
    if step.zigzag:
        return torch.cat(_chunks(piece, step, place), dim=step.dim)
    whole, size = piece.shape[step.dim], place.mesh.sizes[step.axis]
    length = -(-whole // size)
    start = min(place.coordinate[step.axis] * length, whole)
    own = piece.narrow(step.dim, start, min(length, whole - start))
    return collectives.extended(own, step.dim, length)


def _zero(piece: torch.Tensor, step: Step, place: RankMesh) -> torch.Tensor:
    return piece if place.coordinate[step.axis] == 0 else torch.zeros_like(piece)


def _pad(piece: torch.Tensor, step: Step, place: RankMesh) -> torch.Tensor:
    extent = piece.shape[step.dim]
    shape = list(piece.shape)
    shape[step.dim] = extent * place.mesh.sizes[step.axis]
    padded = piece.new_zeros(shape)
    if step.zigzag:
        for chunk, part in zip(_chunks(padded, step, place), piece.chunk(2, step.dim), strict=True):
            chunk.copy_(part)
        return padded
    padded.narrow(step.dim, place.coordinate[step.axis] * extent, extent).copy_(piece)
    return padded if step.extent < 0 else padded.narrow(step.dim, 0, step.extent)


def _chunks(whole: torch.Tensor, step: Step, place: RankMesh) -> tuple[torch.Tensor, ...]:
    """This rank's two chunks of a tensor that is whole on the axis of a step; views of it."""
    extent, size = whole.shape[step.dim], place.mesh.sizes[step.axis]
    runs = zigzag_runs(extent, size, place.coordinate[step.axis], f"dim {step.dim} of shape {tuple(whole.shape)}")
    return tuple(whole.narrow(step.dim, start, length) for start, length in runs)


def by_device(whole: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A tensor in natural order, reordered into the pieces of `size` devices end to end: chunks 0, 2n-1, 1, 2n-2,
    ..."""
    runs = [run for place in range(size) for run in zigzag_runs(whole.shape[dim], size, place)]
    return torch.cat([whole.narrow(dim, start, length) for start, length in runs], dim=dim)


def natural(pieces: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The inverse of `by_device`."""
    chunks = pieces.chunk(2 * size, dim)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim=dim)


STEPS: Mapping[str, Callable[[torch.Tensor, Step, RankMesh], torch.Tensor]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "zero": _zero,
    "pad": _pad,
}


def apply_steps(piece: torch.Tensor, steps: Sequence[Step], place: RankMesh) -> torch.Tensor:
    """The local tensor after the steps. The result may be a view of `piece`; call it with autograd off."""
    for step in steps:
        if place.mesh.sizes[step.axis] > 1:
            piece = STEPS[step.kind](piece, step, place)
    return piece


def convert(
    piece: torch.Tensor,
    shape: Sequence[int],
    source: Layout,
    target: Layout,
    place: RankMesh,
    sequences: Collection[int] = (),
) -> torch.Tensor:
    """The local piece in layout `target` of a tensor of global `shape`, from its piece in layout `source`; no gradient.
    `sequences` are the dims that axes with their own order (zigzag) cut in that order."""
    steps = (
        redistribution(shape, place.mesh, source, target, sequences)
        if sequences
        else _known_steps(shape if isinstance(shape, PaddedShape) else tuple(shape), place.mesh, source, target)
    )
    if not steps:
        return piece.detach()
    with torch.no_grad():
        return apply_steps(piece.detach(), steps, place)


@lru_cache(maxsize=2**16)
def _known_steps(shape: tuple[int, ...], mesh: Mesh, source: Layout, target: Layout) -> tuple[Step, ...]:
    """Steps of parameters and gradients, which are the same in every training step."""
    return redistribution(shape, mesh, source, target)


def local_piece(whole: torch.Tensor, layout: Layout, place: RankMesh, sequences: Collection[int] = ()) -> torch.Tensor:
    """This rank's piece of a tensor that every rank has: a view unless something has to be zeroed or reordered."""
    return convert(whole, whole.shape, replicated(len(layout)), layout, place, sequences)


def whole_tensor(piece: torch.Tensor, shape: Sequence[int], layout: Layout, place: RankMesh) -> torch.Tensor:
    """The full tensor on every rank: gathered, and summed where it is partial."""
    return convert(piece, shape, layout, replicated(len(layout)), place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Steps of one operand from its producer to its consumer, and of its gradient back.

    A slice of an activation is copied (`copies`): autograd may keep it, and a view would keep the whole tensor alive.
    Slices of weights stay views, because the whole weight is kept anyway. The gradient of a weight may be reduced in a
    separate dtype (`reduced_in`).
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    copies: bool
    reduced_in: torch.dtype | None = None

    @property
    def gathers(self) -> bool:
        """Whether the consumer gets memory that its producer does not already hold."""
        return any(step.kind in COLLECTIVES for step in self.forward)

    @property
    def departs(self) -> bool:
        """Whether it can run asynchronously: it sends something, forward or backward, and reorders nothing."""
        steps = (*self.forward, *self.backward)
        return any(step.kind in COLLECTIVES for step in steps) and not any(step.zigzag for step in steps)

    @property
    def sums(self) -> bool:
        """Whether it adds up terms of several ranks."""
        return any(step.kind in ("all_reduce", "reduce_scatter") for step in self.forward)

    def back(self, gradient: torch.Tensor, place: RankMesh) -> torch.Tensor:
        """The gradient in the layout that the producer wants."""
        return apply_steps(gradient.to(self.reduced_in or gradient.dtype), self.backward, place)

    def __call__(
        self, piece: torch.Tensor, place: RankMesh, stub: torch.Tensor | None = None, reader: object = None
    ) -> torch.Tensor:
        """The tensor in the layout that the consumer wants. With a `stub`, the gradient goes to the stub and not to
        `piece`. `reader` is the instruction of the consumer, for the diagnosis of waiting ranks
        (`runtime.processes.wait_diagnosis`)."""
        if stub is not None and stub.requires_grad:
            return _FromStub.apply(stub, piece, self, place, reader)  # type: ignore[no-any-return, no-untyped-call]
        if piece.requires_grad:
            return _Redistribute.apply(piece, self, place, reader)  # type: ignore[no-any-return, no-untyped-call]
        return apply_steps(piece, self.forward, place)


def transfer(
    shape: Sequence[int],
    mesh: Mesh,
    producer: Duplex,
    consumer: Duplex,
    differentiable: bool,
    weight: bool = False,
    sequences: Collection[int] = (),
) -> Transfer | None:
    """The steps from the producer's promised layouts to the consumer's wanted ones, for a tensor of global `shape`;
    None if there are none. `sequences` are the dims that axes with their own order (zigzag) cut in that order."""
    forward = redistribution(shape, mesh, producer.forward, consumer.forward, sequences)
    back = (consumer.gradient, producer.gradient)
    backward = redistribution(shape, mesh, *back, sequences) if differentiable else ()
    if not forward and not backward:
        return None
    copies = bool(forward) and is_view(forward[-1]) and not weight
    return Transfer(forward=forward, backward=backward, copies=copies)


class _Redistribute(torch.autograd.Function):
    """Steps forward, and the steps of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, steps: Transfer, place: RankMesh, reader: object) -> torch.Tensor:
        ctx.steps, ctx.place, ctx.reader = steps, place, reader
        moved = apply_steps(piece, steps.forward, place)
        if steps.copies:
            return moved.clone(memory_format=torch.contiguous_format)
        return moved.view_as(moved) if moved is piece else moved

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.steps.back(gradients[0], ctx.place), None, None, None


class _FromStub(torch.autograd.Function):
    """Forward steps of a weight that is no autograd leaf, and backward the steps of its gradient, to a leaf of another
    shape."""

    @staticmethod
    def forward(
        ctx: Any, stub: torch.Tensor, piece: torch.Tensor, steps: Transfer, place: RankMesh, reader: object
    ) -> torch.Tensor:
        ctx.steps, ctx.place, ctx.reader = steps, place, reader
        moved = apply_steps(piece, steps.forward, place)
        return moved.view_as(moved) if moved is piece else moved

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.steps.back(gradients[0], ctx.place), None, None, None, None
