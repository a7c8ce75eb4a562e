"""Linear layers that overlap with the collective of their operand, or of their result, in one call.

    operand     forward     gather chunk k + 1 | rows of chunk k times every weight; nothing where the recomputation of
                            a block has all results kept
                backward    gather what was not gathered | gradients of the rows of chunk k + 1 | reduce chunk k over
                            ranks; the weight gradients overlap with the last chunks
    result      forward     rows of chunk k + 1 times the weight | reduce chunk k over ranks
                backward    gather chunk k + 1 of the gradient | its rows of chunk k times the weight; then the weight
                            gradients

`runtime.comm.chunked_collectives` has the chunked collectives, `planner.plan.layout.overlapped_products` chooses them.
Weight gradients are one product over all rows, as without chunks. The other results are those of products with fewer
rows; nothing else is rounded differently.

For a result, autograd keeps the inputs of the product in a node before the node that computes it (`_Begin`, `_End`): a
recomputation that stops once everything for the backward pass has been saved stops before the product.
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
"""For each product the weight (o, i) and the bias (o), if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One redistribution in chunks: its chunks, its step, and the group; no group where nothing is sent."""

    chunks: Chunks
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, step: Step | None, dim: int, chunks: int, place: RankMesh) -> "Way":
        """The redistribution of a step, in `chunks` chunks along a dim."""
        group = None if step is None else place.groups[step.axis]
        return cls(chunks=chunks_of(step, dim, chunks, group), group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandCall:
    """Products of one operand, overlapped with the gather of the operand and the reduction of its gradient. Operands:
    the piece, then the weight of each product and, where it is `biased`, its bias. Results: the operand, where others
    read it too (`shared`), and those of the products. `kept` says which products' results a recomputed block keeps; it
    recomputes the others. Of the computed products, the `first` ones run while the operand arrives, or all where that
    is 0."""

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
        """Whether the backward pass gathers the operand itself: the recomputed block has no other use for it."""
        return self.forward.group is not None and bool(self.kept) and all(self.kept) and not self.shared

    def weights(self, tensors: Sequence[Any]) -> Sequence[tuple[Any, Any]]:
        """The weights and biases among the operands after the first, or what there is of each of them."""
        rest = iter(tensors)
        return [(next(rest), next(rest) if biased else None) for biased in self.biased]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCall:
    """A product overlapped with the reduction of its result, and backward with the gather of the result's gradient.
    Operands: rows, weight, optional bias."""

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
    """The call of an overlap on this rank, for products with or without a bias, whose results are kept or not."""
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
        # no difference where a recomputation already has everything
        rows = piece if call.gathers_later else whole
        assert rows is not None, "it is gathered later, else"
        ctx.shape = rows.shape
        needed = ctx.needs_input_grad[2:]  # frozen weights keep no rows
        keeps = any(needed if call.gathers_later else (one for one, _ in call.weights(needed)))
        ctx.save_for_backward(rows if keeps else None, *(weight for weight, _ in weights))
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
            size = ctx.shape if call.gathers_later else call.backward.chunks.shape_of_piece(ctx.shape)
            piece, landing = _sent_back(call.backward, size, pairs, direct)
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
    """The operand and the results of its products, some of which may be kept. Where all are kept the operand is None:
    the backward pass gathers it."""
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
    """The operand, and the results of its products, the `first` of which are computed while it arrives."""
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
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    direct: torch.Tensor | None,
) -> tuple[torch.Tensor | None, Leaving | None]:
    """Compute the gradient of the operand and start its reduction, chunk by chunk; returns its final memory, and the
    reduction in flight."""
    if not pairs and direct is None:
        return None, None
    chunks = way.chunks
    piece = (pairs[0][0] if direct is None else direct).new_empty(size)
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
    """A product whose result is reduced while it is computed."""
    way, chunks = call.forward, call.forward.chunks
    if way.group is None:
        return F.linear(rows, weight, bias)
    shape = torch.Size((*rows.shape[:-1], weight.shape[0]))
    leaving = Leaving(chunks, way.group, rows.new_empty(chunks.shape_of_piece(shape)))
    for number in range(chunks.count):
        leaving.send(F.linear(chunks.whole(rows, number).contiguous(), weight, bias))
    return leaving.land()


class _Run:
    """A product between its two autograd nodes: the gradient of its result, while it is gathered."""

    def __init__(self, call: ResultCall) -> None:
        self.call = call
        self.gradient: torch.Tensor | None = None


class _Begin(torch.autograd.Function):
    """Keeps what the backward pass needs, and does all of its work."""

    @staticmethod
    def forward(ctx: Any, run: _Run, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.run, ctx.shape = run, rows.shape
        _, to_rows, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if to_weight else None, weight if to_rows else None)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        gradient, ctx.run.gradient = ctx.run.gradient, None
        assert gradient is not None, "the node behind has been there"
        _, to_rows, to_weight, to_bias = ctx.needs_input_grad
        way = ctx.run.call.backward
        back = gradient.new_empty(ctx.shape) if to_rows else None
        if way.group is None:
            whole = gradient
            if back is not None:
                back = torch.mm(rows_of(gradient), weight).view(ctx.shape)
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
    """Computes the product; backward it passes the gradient of the result to the node before."""

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
