"""Linear layers and the collective of their operand, or of their result, as one call that does both at once.

    operand     forward     gather chunk k + 1 | rows of chunk k with every weight; where a block that is computed again
                            has kept all results, nothing
                backward    what was not gathered is | gradients of the rows of chunk k + 1 | chunk k is summed over
                            ranks; the products of weight gradients run while the last chunks are on their way
    result      forward     rows of chunk k + 1 by the weight | chunk k is summed over ranks
                backward    gather chunk k + 1 of the gradient | its rows of chunk k with the weight; then the products
                            of weight gradients

What is sent and what is waited for is told in `runtime.comm.chunked_collectives`, which collectives these are in
`planner.plan.layout.overlapped_products`. Weight gradients are one product over all rows, as without chunks: numbers
are those of products of fewer rows, and nothing else is rounded otherwise.

Of a result autograd keeps what the product reads in a node that comes before the one that computes (`_Begin`, `_End`):
where a block is computed again only until all is there that its backward pass needs, it ends before the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from planner.plan.layout.overlapped_products import Overlap
from planner.sharding.redistribute import Step
from runtime.comm.chunked_collectives import Arriving, Chunks, Leaving, chunks_of, rows_of
from runtime.comm.device_mesh import RankMesh
from runtime.ops.kept_results import whole_call
from runtime.ops.randomness import FIRST, Draw

Weights = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
"""Of each product the weight (o, i) and the bias (o), if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of a value: its chunks, what they are sent by, and with whom; no group where nothing is sent."""

    chunks: Chunks
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, step: Step | None, dim: int, chunks: int, place: RankMesh) -> "Way":
        """The way of a step, in so many chunks along a dim."""
        group = None if step is None else place.groups[step.axis]
        return cls(chunks=chunks_of(step, dim, chunks, group), group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandCall:
    """Products of one operand, which comes and whose gradient goes. Operands: the piece, then the weight and, where it
    is `biased`, the bias of each product. Results: the operand, where others read it too (`shared`), and those of the
    products. `kept` says of which products a recomputed block keeps the results: computed again are the others. Of
    those that are computed so many, the `first`, run while the operand arrives, or all where that is 0."""

    forward: Way
    backward: Way
    biased: tuple[bool, ...]
    kept: tuple[bool, ...]
    through: bool
    shared: bool
    first: int = 0

    def __call__(self, operands: Sequence[torch.Tensor], draw: Draw = FIRST) -> Sequence[Any]:
        piece, *tensors = operands
        made: tuple[torch.Tensor, ...] = _Operand.apply(self, piece, *tensors)  # type: ignore[no-untyped-call]
        return made if self.shared or not self.through else (None, *made)

    @property
    def gathers_later(self) -> bool:
        """Whether the backward pass gathers the operand for itself: a recomputed block has no other use for it."""
        return self.forward.group is not None and bool(self.kept) and all(self.kept) and not self.shared

    def weights(self, tensors: Sequence[torch.Tensor]) -> Weights:
        """The weights and biases among the operands behind the first."""
        rest = iter(tensors)
        return [(next(rest), next(rest) if biased else None) for biased in self.biased]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCall:
    """A product whose result goes, and whose gradient comes. Operands: rows, weight, perhaps a bias."""

    forward: Way
    backward: Way

    def __call__(self, operands: Sequence[torch.Tensor], draw: Draw = FIRST) -> Sequence[Any]:
        rows, weight, *rest = operands
        bias = rest[0] if rest else None
        if not (torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)):
            return (_result(self, rows, weight, bias),)
        run = _Run(self)
        token = _Begin.apply(run, rows, weight, bias)  # type: ignore[no-untyped-call]
        return (_End.apply(token, run, rows.detach(), weight.detach(), None if bias is None else bias.detach()),)  # type: ignore[no-untyped-call]


def overlapped_call(
    overlap: Overlap, place: RankMesh, biased: Sequence[bool], *, kept: Sequence[bool] = (), shared: bool
) -> Any:
    """The call of an overlap on this rank, of products with a bias or without, whose results are kept or not."""
    ways = zip(overlap.steps, overlap.dims, overlap.chunks, strict=True)
    forward, backward = (Way.of(step, dim, chunks, place) for step, dim, chunks in ways)
    if overlap.kind == "result":
        return ResultCall(forward=forward, backward=backward)
    through = overlap.at not in overlap.products
    return OperandCall(
        forward=forward, backward=backward, biased=tuple(biased), kept=tuple(kept), through=through, shared=shared,
        first=overlap.first,
    )  # fmt: skip


class _Operand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: OperandCall, piece: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        weights = call.weights(tensors)
        whole, made = _made(call, piece, weights)
        # the same where a block is computed again and all is there already
        ctx.save_for_backward(piece if call.gathers_later else whole, *(weight for weight, _ in weights))
        if not call.shared:
            return tuple(made)
        assert whole is not None, "others read it"
        return (whole.view_as(whole) if whole is piece else whole, *made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        call, (whole, *weights) = ctx.call, ctx.saved_tensors
        arriving = None
        if call.gathers_later and any(ctx.needs_input_grad[2:]):
            assert call.forward.group is not None
            arriving = Arriving(whole, call.forward.chunks.together, call.forward.group).begun()
        direct, given = (gradients[0], gradients[1:]) if call.shared else (None, gradients)
        pairs = [(gradient, weight) for gradient, weight in zip(given, weights, strict=True) if gradient is not None]
        needed = iter(ctx.needs_input_grad[2:])
        piece, landing = None, None
        if ctx.needs_input_grad[1]:
            size = whole.shape if call.gathers_later else call.backward.chunks.shape_of_piece(whole.shape)
            piece, landing = _sent_back(call.backward, size, whole, pairs, direct)
        if arriving is not None:
            whole = arriving.all()
        found: list[torch.Tensor | None] = []
        for gradient, biased in zip(given, call.biased, strict=True):
            found.append(_weight_gradient(gradient, whole) if next(needed) and gradient is not None else None)
            if biased:
                found.append(rows_of(gradient).sum(0) if next(needed) and gradient is not None else None)
        if landing is not None:
            landing.land()
        return None, piece, *found


def _made(call: OperandCall, piece: torch.Tensor, weights: Weights) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The operand and what the products make of it, some of which may be there already. Where all of it is, the operand
    is None: it comes in the backward pass."""
    found: dict[int, torch.Tensor] = {}
    whole: list[torch.Tensor] = []

    def run(numbers: Sequence[int]) -> None:
        own = [weights[number] for number in numbers]
        if call.forward.group is None:
            arrived, made = piece, [F.linear(piece, weight, bias) for weight, bias in own]
        else:
            arrived, made = _gathered(call.forward, piece, own, call.first or len(own))
        whole.append(arrived)
        found.update(zip(numbers, made, strict=True))

    def run_all() -> tuple[torch.Tensor, ...]:
        run(range(len(weights)))
        return tuple(found[number] for number in kept)

    kept = [number for number, stays in enumerate(call.kept) if stays]
    found.update(zip(kept, whole_call(run_all), strict=True) if kept else ())
    left = [number for number in range(len(weights)) if number not in found]
    if not whole and not call.gathers_later:
        run(left)
    return whole[0] if whole else None, [found[number] for number in range(len(weights))]


def _gathered(way: Way, piece: torch.Tensor, weights: Weights, first: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The operand, and what each product makes of it: the `first` of them while it arrives."""
    assert way.group is not None
    chunks = way.chunks if weights else way.chunks.together
    first = first if chunks.count > 1 else 0
    arriving = Arriving(piece, chunks, way.group)
    shape = arriving.whole.shape[:-1]
    made = [piece.new_empty((*shape, weight.shape[0])) for weight, _ in weights[:first]]
    for number, rows in enumerate(arriving):
        for result, (weight, bias) in zip(made, weights[:first], strict=True):
            chunks.whole(result, number).copy_(F.linear(rows, weight, bias))
    made += [F.linear(arriving.whole, weight, bias) for weight, bias in weights[first:]]
    return arriving.whole, made


def _sent_back(
    way: Way,
    size: torch.Size,
    like: torch.Tensor,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    direct: torch.Tensor | None,
) -> tuple[torch.Tensor | None, Leaving | None]:
    """The gradient of the operand, chunk by chunk on its way: where it will be, and what is to land there."""
    if not pairs and direct is None:
        return None, None
    chunks = way.chunks
    piece = like.new_empty(size)
    leaving = Leaving(chunks, way.group, piece) if way.group is not None else None
    for number in range(chunks.count):
        term = None if direct is None else chunks.whole(direct, number).clone(memory_format=torch.contiguous_format)
        for gradient, weight in pairs:
            rows = chunks.whole(gradient, number)
            shape = (*rows.shape[:-1], weight.shape[1])
            if term is None:
                term = torch.mm(rows_of(rows), weight).view(shape)
            else:
                rows_of(term).addmm_(rows_of(rows), weight)
        assert term is not None
        if leaving is None:
            chunks.piece(piece, number).copy_(term)
        else:
            leaving.send(term)
    return piece, leaving


def _weight_gradient(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight, (o, i), over all rows."""
    return torch.mm(rows_of(gradient).t(), rows_of(rows))


def _result(call: ResultCall, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product on its way while it is made."""
    way, chunks = call.forward, call.forward.chunks
    if way.group is None:
        return F.linear(rows, weight, bias)
    shape = torch.Size((*rows.shape[:-1], weight.shape[0]))
    leaving = Leaving(chunks, way.group, rows.new_empty(chunks.shape_of_piece(shape)))
    for number in range(chunks.count):
        leaving.send(F.linear(chunks.whole(rows, number).contiguous(), weight, bias))
    return leaving.land()


class _Run:
    """A product between its two nodes of autograd: the gradient of its result, on its way back."""

    def __init__(self, call: ResultCall) -> None:
        self.call = call
        self.gradient: torch.Tensor | None = None


class _Begin(torch.autograd.Function):
    """Keeps what the backward pass needs, and does all of it."""

    @staticmethod
    def forward(ctx: Any, run: _Run, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.run = run
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        gradient, ctx.run.gradient = ctx.run.gradient, None
        assert gradient is not None, "the node behind has been there"
        _, to_rows, to_weight, to_bias = ctx.needs_input_grad
        way = ctx.run.call.backward
        back = rows.new_empty(rows.shape) if to_rows else None
        if way.group is None:
            whole = gradient
            if back is not None:
                back = torch.mm(rows_of(gradient), weight).view(rows.shape)
        else:
            arriving = Arriving(gradient, way.chunks, way.group)
            for number, arrived in enumerate(arriving):
                if back is not None:
                    found = torch.mm(rows_of(arrived), weight).view(*arrived.shape[:-1], weight.shape[1])
                    way.chunks.whole(back, number).copy_(found)
            whole = arriving.whole
        return (
            None,
            back,
            _weight_gradient(whole, rows) if to_weight else None,
            rows_of(whole).sum(0) if to_bias else None,
        )


class _End(torch.autograd.Function):
    """Computes, and brings the gradient of the result to the node before."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        run: _Run,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.run = run
        return _result(run.call, rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.run.gradient = gradients[0]
        return gradients[0].new_empty(0), None, None, None, None
