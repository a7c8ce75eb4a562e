"""How one device computes its part of an operator: the call on local tensors.

Most operators are themselves on shards: the operator that was traced, with local tensors for its tensor arguments.
The exceptions follow from the rule (`local_form`, `mean_over`) or stand in `LOCAL_OPS`, by name: operators whose
pieces need to know where they lie, or that spell out an extent.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from planner.errors import ModelError
from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TorchConstant, ValueRef
from planner.graph.trace import resolve
from planner.plan.bind import BoundOperator
from planner.sharding.layout import local_shape
from planner.sharding.rule import FactorKind
from runtime.cross_entropy import SplitLoss, split_cross_entropy
from runtime.device_mesh import RankMesh

LocalCall = Callable[[Sequence[torch.Tensor]], Sequence[Any]]
"""From the local operands, in the order of `Operator.operands`, to the local results, in the order of
`Operator.results`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a local form may know: the operator under its strategy, this rank, and the local shapes of the results."""

    bound: BoundOperator
    place: RankMesh
    shapes: tuple[tuple[int, ...], ...]

    def axes(self, factor: str) -> tuple[int, ...]:
        """Axes of size 2 or more that split a factor, outer cut first."""
        if factor not in self.bound.rule.index:
            return ()
        index, sizes = self.bound.rule.index[factor], self.place.mesh.sizes
        return tuple(a for a, choice in enumerate(self.bound.strategy) if choice == index and sizes[a] > 1)

    def offset(self, factor: str) -> int:
        """First index of a factor that this rank has."""
        axes = self.axes(factor)
        if not axes:
            return 0
        rule, start = self.bound.rule, 0
        extent = rule.factors[rule.index[factor]].extent
        for axis in axes:
            extent //= self.place.mesh.sizes[axis]
            start += self.place.coordinate[axis] * extent
        return start


Form = Callable[..., Any]
"""A local form: called with a `Shard` and with the operator's own arguments."""


def local_call(graph: OperatorGraph, bound: BoundOperator, place: RankMesh) -> LocalCall:
    """The call of one operator on this rank. Raises ModelError for what cannot be executed yet."""
    op = bound.operator
    _refuse_randomness(graph, op)
    _refuse_exchanges(bound, place)
    types = [graph.types[name] for name in op.results if name is not None]
    layouts = [duplex.forward for duplex in bound.layouts.results]
    sizes = place.mesh.sizes
    shapes = tuple(local_shape(t.shape, layout, sizes) for t, layout in zip(types, layouts, strict=True))
    form = _form(Shard(bound=bound, place=place, shapes=shapes))
    arguments = _template(op.arguments, place.device)
    keywords = {key: _template(value, place.device) for key, value in op.keywords}
    scale = 1.0 / math.prod(
        size for choice, size in zip(bound.strategy, sizes, strict=True) if choice in bound.rule.mean_over
    )

    def call(operands: Sequence[torch.Tensor]) -> Sequence[Any]:
        rest = iter(operands)
        made = form(*_filled(arguments, rest), **{key: _filled(value, rest) for key, value in keywords.items()})
        results = made if isinstance(made, tuple | list) else (made,)
        return results if scale == 1.0 else [result * scale for result in results]

    return call


def _form(shard: Shard) -> Form:
    op = shard.bound.operator.op
    if shard.bound.rule.local_form is not None:
        return functools.partial(SHAPED[shard.bound.rule.local_form], shard)
    if op in LOCAL_OPS:
        return functools.partial(LOCAL_OPS[op], shard)
    return resolve(op)


def _identity(shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _reshape(shard: Shard, tensor: torch.Tensor, *spelled: Any, **keywords: Any) -> torch.Tensor:
    return tensor.reshape(shard.shapes[0])


def _expand(shard: Shard, tensor: torch.Tensor, *spelled: Any, **keywords: Any) -> torch.Tensor:
    return tensor.expand(shard.shapes[0])


def _counted(shard: Shard, *arguments: Any, **keywords: Any) -> Any:
    """arange: it spells out how many, and every rank counts all."""
    return resolve(shard.bound.operator.op)(*arguments, **keywords)


def _filled_piece(shard: Shard, *arguments: Any, **keywords: Any) -> Any:
    """zeros, full, new_ones and the like, in the local shape: the first list is the shape."""
    spelled = next(at for at, argument in enumerate(arguments) if isinstance(argument, list))
    own = (*arguments[:spelled], list(shard.shapes[0]), *arguments[spelled + 1 :])
    return resolve(shard.bound.operator.op)(*own, **keywords)


def _tiled(shard: Shard, tensor: torch.Tensor, times: Sequence[int]) -> torch.Tensor:
    """As many copies as fill the local shape."""
    extents = [1] * (len(times) - tensor.dim()) + list(tensor.shape)
    return tensor.repeat([whole // extent for whole, extent in zip(shard.shapes[0], extents, strict=True)])


def _copied(shard: Shard, tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What is written over a tensor: torch has no derivative of the operator itself."""
    return source.to(tensor.dtype).expand(tensor.shape)


def _narrow(shard: Shard, tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return tensor.narrow(dim, start, shard.shapes[0][dim])


def _split_with_sizes(shard: Shard, tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    return tensor.split_with_sizes([shape[dim] for shape in shard.shapes], dim)


def _embedding(
    shard: Shard,
    weight_VH: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows that this rank has, zeros for the others: a term of a sum over the axes that split the vocabulary."""
    rows = weight_VH.shape[0]
    if scale_grad_by_freq:
        raise ModelError(
            f"{shard.bound.operator.name}: scale_grad_by_freq counts over the whole batch; it is not supported"
        )
    if not shard.axes("v"):
        return F.embedding(indices, weight_VH, padding_idx if padding_idx >= 0 else None)
    offset = shard.offset("v")
    row = indices - offset
    elsewhere = (row < 0) | (row >= rows)
    padding = padding_idx - offset if padding_idx >= 0 and 0 <= padding_idx - offset < rows else None
    found = F.embedding(row.masked_fill(elsewhere, 0), weight_VH, padding)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


_NONE, _MEAN, _SUM = range(3)  # torch's numbers for the reductions of a loss


def _cross_entropy(
    shard: Shard,
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    weight: None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    vocabulary, samples = shard.axes("v"), shard.axes("n")
    if not vocabulary and not samples:
        return torch.ops.aten.cross_entropy_loss(  # type: ignore[no-any-return]
            logits_NV, targets_N, weight, reduction, ignore_index, label_smoothing
        )
    assert reduction != _NONE, "the rule of cross entropy covers a scalar result only"
    split = SplitLoss(
        vocabulary_groups=tuple(shard.place.group(axis) for axis in vocabulary),
        sample_groups=tuple(shard.place.group(axis) for axis in samples),
        offset=shard.offset("v"),
        classes=logits_NV.shape[1] * math.prod(shard.place.mesh.sizes[axis] for axis in vocabulary),
        mean=reduction == _MEAN,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return split_cross_entropy(logits_NV, targets_N, split)


SHAPED: Mapping[str, Form] = {
    "counted": _counted,
    "expand": _expand,
    "filled": _filled_piece,
    "reshape": _reshape,
    "tiled": _tiled,
}
"""Local forms of operators that spell out the shape of their result, by `Rule.local_form`."""

LOCAL_OPS: Mapping[str, Form] = {
    IDENTITY: _identity,
    "aten.copy.default": _copied,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.embedding.default": _embedding,
    "aten.narrow.default": _narrow,
    "aten.split_with_sizes.default": _split_with_sizes,
}
"""Local forms of single operators, by name."""

RANDOM: Mapping[str, tuple[int, str, int | None]] = {
    "aten.dropout.default": (1, "p", 2),
    "aten.scaled_dot_product_attention.default": (4, "dropout_p", None),
}
"""Operators that drop values: position and name of the probability, and position of the argument that switches them
on."""


def _refuse_randomness(graph: OperatorGraph, op: Operator) -> None:
    if op.op not in RANDOM:
        return
    position, name, switch = RANDOM[op.op]
    probability = op.arguments[position] if len(op.arguments) > position else dict(op.keywords).get(name, 0.0)
    if probability and (switch is None or len(op.arguments) <= switch or op.arguments[switch]):
        raise ModelError(
            f"operator '{op.name}' drops values at random ({name} = {probability}); dropout is not supported yet,"
            " set its probability to 0"
        )


def _refuse_exchanges(bound: BoundOperator, place: RankMesh) -> None:
    for axis, choice in zip(place.mesh.axes, bound.strategy, strict=True):
        kind = None if choice is None or axis.size == 1 else bound.rule.factors[choice].kind
        if kind is FactorKind.RING:
            raise ModelError(
                f"operator '{bound.operator.name}' sends keys and values round the {axis.size} devices of {axis.name}:"
                " ring attention can be priced, but not run yet; plan with --context-by heads"
            )
        if kind is FactorKind.EXCHANGE and choice is not None:
            raise ModelError(
                f"operator '{bound.operator.name}' exchanges rows between the {axis.size} devices of {axis.name}"
                f" ({bound.rule.factors[choice].name}): expert parallelism can be planned and priced, but not run yet;"
                " plan with --expert 1"
            )


def _template(argument: Argument, device: torch.device) -> Any:
    """The argument with torch's objects for their names; values stay references."""
    if isinstance(argument, TorchConstant):
        return device if argument.kind == "device" else getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return [_template(item, device) for item in argument]
    return argument


def _filled(template: Any, operands: Any) -> Any:
    """The argument with local tensors for its references, taken from the iterator `operands` in order."""
    if isinstance(template, ValueRef):
        return next(operands)
    if isinstance(template, list):
        return [_filled(item, operands) for item in template]
    return template
