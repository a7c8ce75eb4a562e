"""How one device computes its part of an operator: the call on local tensors.

Most operators are themselves on shards: the operator that was traced, with local tensors for its tensor arguments.
The exceptions follow from the rule (`local_form`, `mean_over`) or stand in `LOCAL_OPS`, by name: operators whose
pieces need to know where they lie, or that spell out an extent.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from planner.errors import ModelError
from planner.graph.bags import BAG
from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import Argument, OperatorGraph, TorchConstant, ValueRef
from planner.graph.trace import resolve
from planner.graph.updates import UPDATE
from planner.plan.binding.bind import BoundOperator
from planner.sharding.layout import local_shape
from planner.sharding.rule import FactorKind, ring_axis
from planner.sharding.rules.einsum import FEW
from planner.sharding.zigzag import Sequences
from runtime.comm.device_mesh import RankMesh
from runtime.ops import local_channels, local_lookups
from runtime.ops.attention import attention_with_dropout
from runtime.ops.attention_pieces import attend_to_all
from runtime.ops.biased_attention import biased_attention
from runtime.ops.cross_entropy import SplitLoss, split_cross_entropy
from runtime.ops.experts import Cut, SplitExperts, split_experts
from runtime.ops.index_check import expect_within
from runtime.ops.randomness import FIRST, Draw, Region, drop, drop_probability, keep_mask, operator_code, region_of
from runtime.ops.ring_attention import Ring, ring_attention
from runtime.ops.rms_norm import fused_rms_norm
from runtime.ops.slice_pass import SlicePass
from runtime.ops.sliced_attention import sliced_attention
from runtime.tables.placed import PlacedTables

_ALL = slice(None)


class LocalCall(Protocol):
    """From the local operands, in the order of `Operator.operands`, to the local results, in the order of
    `Operator.results`. `draw` says which random numbers an operator that drops elements takes."""

    def __call__(self, operands: Sequence[torch.Tensor], draw: Draw = FIRST) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCall:
    """A form with the operator's own arguments, in which references stand for tensors. The results are multiplied by
    `scale`; `code` is that of an operator that drops elements, `sliced` the form in a slice of the sequence, where that
    is another."""

    form: Callable[..., Any]
    code: int | None
    sliced: Callable[..., Any] | None
    arguments: Any
    keywords: Mapping[str, Any]
    scale: float

    def __call__(self, operands: Sequence[torch.Tensor], draw: Draw = FIRST) -> Sequence[Any]:
        rest, key = iter(operands), () if self.code is None else (draw.key(self.code),)
        form = self.form if draw.slice is None or self.sliced is None else functools.partial(self.sliced, draw.slice)
        made = form(*key, *filled(self.arguments, rest), **{name: filled(v, rest) for name, v in self.keywords.items()})
        results = made if isinstance(made, tuple | list) else (made,)
        return results if self.scale == 1.0 else [result * self.scale for result in results]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What a local form may know: the operator under its strategy, this rank, the local shapes of the results, and
    which piece of the first result that is. What attention asks for every time is found once."""

    bound: BoundOperator
    place: RankMesh
    shapes: tuple[tuple[int, ...], ...]
    region: Region

    def axes(self, factor: str) -> tuple[int, ...]:
        """Axes of size 2 or more that split a factor, outer cut first."""
        if factor not in self.bound.rule.index:
            return ()
        index, sizes = self.bound.rule.index[factor], self.place.mesh.sizes
        return tuple(a for a, choice in enumerate(self.bound.strategy) if choice == index and sizes[a] > 1)

    def cutting(self, factor: str) -> tuple[int, ...]:
        """Axes of size 2 or more on which a factor is in pieces, alone or in an exchange, outer cut first."""
        if factor not in self.bound.rule.index:
            return ()
        rule, sizes = self.bound.rule, self.place.mesh.sizes
        cut = {index for index, parts in enumerate(rule.splits) if rule.index[factor] in parts}
        return tuple(a for a, choice in enumerate(self.bound.strategy) if choice in cut and sizes[a] > 1)

    def exchanges(self, axis: int) -> bool:
        """Whether rows are exchanged on an axis."""
        choice = self.bound.strategy[axis]
        return choice is not None and self.bound.rule.factors[choice].kind is FactorKind.EXCHANGE

    @cached_property
    def ring(self) -> int | None:
        """The axis of size 2 or more along which operands come round; None where none do."""
        return ring_axis(self.bound.rule, self.bound.strategy, self.place.mesh.sizes)

    @cached_property
    def heads(self) -> slice:
        """Of the local heads of keys those that the local heads of queries share: all, but where an axis splits heads
        of queries alone."""
        if not self.axes("r") or FEW not in self.bound.rule.index:
            return _ALL
        group = self.extent("r") // self.extent(FEW)
        first = self._first("r") // group - self._first(FEW)
        return slice(first, first + 1)

    def shared(self, key_BGKD: torch.Tensor) -> torch.Tensor:
        """Keys, or values, of the heads that the local heads of queries share."""
        return key_BGKD if self.heads == _ALL else key_BGKD[:, self.heads]

    def _first(self, factor: str) -> int:
        """First index of a factor that this rank has, by whatever splits it."""
        rule, start, extent = self.bound.rule, 0, self.extent(factor)
        for axis, choice in enumerate(self.bound.strategy):
            if choice is not None and rule.index[factor] in rule.splits[choice]:
                extent //= self.place.mesh.sizes[axis]
                start += self.place.coordinate[axis] * extent
        return start

    def extent(self, factor: str) -> int:
        """Extent of a factor over all ranks."""
        return self.bound.rule.factors[self.bound.rule.index[factor]].extent

    def offset(self, factor: str) -> int:
        """First index of a factor that this rank has."""
        axes = self.axes(factor)
        if not axes:
            return 0
        start, extent = 0, self.extent(factor)
        for axis in axes:
            extent //= self.place.mesh.sizes[axis]
            start += self.place.coordinate[axis] * extent
        return start


Form = Callable[..., Any]
"""A local form: called with a `Shard` and with the operator's own arguments; one that drops elements with the 64-bit
key of its random numbers between the two."""


def local_call(
    graph: OperatorGraph,
    bound: BoundOperator,
    place: RankMesh,
    sequences: Sequences | None = None,
    tables: PlacedTables | None = None,
) -> LocalCall:
    """The call of one operator on this rank. `sequences` are the dims that axes with an order of their own cut in it,
    `tables` those that are not on the devices. Raises ModelError for what cannot be executed yet."""
    op = bound.operator
    if bound.rule.outside is not None:
        assert tables is not None, op.name
        return _looked_up(graph, bound, place, tables)
    made = [name for name in op.results if name is not None]
    types = [graph.types[name] for name in made]
    layouts = [duplex.forward for duplex in bound.layouts.results]
    sizes = place.mesh.sizes
    shapes = tuple(local_shape(t.shape, layout, sizes) for t, layout in zip(types, layouts, strict=True))
    region = region_of(types[0].shape, layouts[0], place, (sequences or {}).get(made[0], ()))
    shard = Shard(bound=bound, place=place, shapes=shapes, region=region)
    sliced = SLICED.get(op.op)
    drops = drop_probability(op) > 0
    return FormCall(
        form=functools.partial(DROPPING[op.op], shard) if drops else _form(shard),
        code=operator_code(op.name) if drops else None,
        sliced=None if sliced is None else functools.partial(sliced, shard),
        arguments=template(op.arguments, place.device),
        keywords={key: template(value, place.device) for key, value in op.keywords},
        scale=1.0
        / math.prod(size for choice, size in zip(bound.strategy, sizes, strict=True) if choice in bound.rule.mean_over),
    )


def _looked_up(graph: OperatorGraph, bound: BoundOperator, place: RankMesh, tables: PlacedTables) -> LocalCall:
    """The call of an operator that gets rows of a table which is not on the devices."""
    dtype: torch.dtype = getattr(torch, next(graph.types[name].dtype for name in bound.operator.results if name))

    def call(operands: Sequence[torch.Tensor], draw: Draw = FIRST) -> Sequence[Any]:
        return [tables.look_up(bound, place, operands[0], dtype)]

    return call


def _form(shard: Shard) -> Form:
    op = shard.bound.operator.op
    if shard.bound.operator.rule is not None:  # found by trying the operator itself on pieces
        return resolve(op)
    if shard.bound.rule.local_form is not None:
        return functools.partial(SHAPED[shard.bound.rule.local_form], shard)
    if op in LOCAL_OPS:
        return functools.partial(LOCAL_OPS[op], shard)
    return resolve(op)


def _identity(shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _update(shard: Shard, contents: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What buffers hold next; nothing is recorded for autograd."""
    return [content.detach() for content in contents]


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
    expect_within(indices, shard.extent("v"), f"indices of {shard.bound.operator.name}")
    offset = shard.offset("v")
    row = indices - offset
    elsewhere = (row < 0) | (row >= rows)
    padding = padding_idx - offset if padding_idx >= 0 and 0 <= padding_idx - offset < rows else None
    found = F.embedding(row.masked_fill(elsewhere, 0), weight_VH, padding)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def _fused_attention(
    shard: Shard,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused kernels want each head's vectors in one piece; of tensors that lie otherwise scores would be stored. So
    they would be of a bias that is trained, and where values are not as wide as keys, on CPUs (2.13)."""
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query_BHQD, key_BGKD, value_BGKE))
    if shard.ring is not None:
        return ring_attention(query, key, value, _ring(shard, shard.ring, is_causal), scale)
    key, value = shard.shared(key), shard.shared(value)
    if attn_mask is not None and attn_mask.requires_grad and attn_mask.device.type == "cpu" and not enable_gqa:
        return biased_attention(query, key, value, attn_mask, scale)
    if attn_mask is None and query.device.type == "cpu" and query.shape[-1] != value.shape[-1]:
        return attend_to_all(query, key, value, is_causal, scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _ring(shard: Shard, axis: int, causal: bool) -> Ring:
    place = shard.place
    zigzag = axis in place.mesh.zigzag
    return Ring(group=place.group(axis), place=place.coordinate[axis], causal=causal, zigzag=zigzag, heads=shard.heads)


def _rms_norm(
    shard: Shard,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    epsilon: float | None = None,
) -> torch.Tensor:
    """PyTorch has no kernel of it for CPUs (2.13)."""
    if x.device.type != "cpu" or (weight is not None and weight.dtype != x.dtype):
        return F.rms_norm(x, list(normalized_shape), weight, epsilon)
    return fused_rms_norm(x, normalized_shape, weight, epsilon)


def _experts(
    shard: Shard,
    x_BSH: torch.Tensor,
    weights_BSK: torch.Tensor,
    chosen_BSK: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    capacity: int = 0,
    imbalance: float = 1.0,
) -> torch.Tensor:
    cuts = [
        Cut(
            size=shard.place.mesh.sizes[axis],
            own=shard.place.coordinate[axis],
            group=shard.place.group(axis) if shard.exchanges(axis) else None,
        )
        for axis in shard.cutting("e")
    ]
    split = SplitExperts(
        experts=shard.extent("e") if cuts else gate.shape[0], cuts=cuts, capacity=capacity, imbalance=imbalance
    )
    return split_experts(x_BSH, weights_BSK, chosen_BSK, (gate, up, down), split)


def _attention_of_slice(
    shard: Shard,
    part: SlicePass,
    query_BHQD: torch.Tensor,
    key_BGQD: torch.Tensor,
    value_BGQE: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    key, value = shard.shared(key_BGQD), shard.shared(value_BGQE)
    return sliced_attention(query_BHQD, key, value, part, shard.bound.operator.name, scale)


_NONE, _MEAN, _SUM = range(3)  # torch's numbers for the reductions of a loss


def _cross_entropy_of_slice(
    shard: Shard, part: SlicePass, logits_NV: torch.Tensor, targets_N: torch.Tensor, *settings: Any, **named: Any
) -> torch.Tensor:
    return _cross_entropy(
        shard, logits_NV, targets_N, *settings, **named, counted=part.together.counted[shard.bound.operator.name]
    )


def _cross_entropy(
    shard: Shard,
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    weight: None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    vocabulary, samples = shard.axes("v"), shard.axes("n")
    assert reduction != _NONE, "the rule of cross entropy covers a scalar result only"
    split = SplitLoss(
        vocabulary_groups=tuple(shard.place.group(axis) for axis in vocabulary),
        sample_groups=tuple(shard.place.group(axis) for axis in samples),
        offset=shard.offset("v"),
        classes=logits_NV.shape[1] * math.prod(shard.place.mesh.sizes[axis] for axis in vocabulary),
        mean=reduction == _MEAN,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        counted=counted,
    )
    return split_cross_entropy(logits_NV, targets_N, split)


def _dropout(shard: Shard, key: int, tensor: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    return drop(tensor, keep_mask(key, shard.region, p, tensor.device), p)


def _native_dropout(
    shard: Shard, key: int, tensor: torch.Tensor, p: float, train: bool | None = True
) -> tuple[torch.Tensor, torch.Tensor]:
    keep = keep_mask(key, shard.region, p, tensor.device)
    return drop(tensor, keep, p), keep


def _feature_dropout(shard: Shard, key: int, tensor: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    return drop(tensor, keep_mask(key, features_of(shard.region), p, tensor.device), p)


def features_of(region: Region) -> Region:
    """The samples and channels of a region, all else being one element: what feature dropout drops as a whole."""
    ones = len(region.shape) - 2
    runs = tuple((dim, found) for dim, found in region.runs if dim < 2)
    return Region(start=(*region.start[:2], *(0,) * ones), shape=(*region.shape[:2], *(1,) * ones), runs=runs)


def _dropping_attention(
    shard: Shard,
    key: int,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Keys are whole on every rank, so the piece of the scores is that of the result, with all keys for its last
    dim."""
    key_BGKD, value_BGKE = shard.shared(key_BGKD), shard.shared(value_BGKE)
    start, shape = shard.region.start, shard.region.shape
    scores = Region(start=(*start[:-1], 0), shape=(*shape[:-1], key_BGKD.shape[-2]))
    return attention_with_dropout(
        query_BHQD,
        key_BGKD,
        value_BGKE,
        keep_mask(key, scores, dropout_p, query_BHQD.device),
        dropout_p,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        first_query=start[2],
    )


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
    UPDATE: _update,
    BAG: local_lookups.embedding_bag,
    **{
        f"aten.conv{spatial}d.{overload}": local_channels.convolution
        for spatial in (1, 2, 3)
        for overload in ("default", "padding")
    },
    "aten._native_batch_norm_legit.no_stats": local_channels.batch_norm_without_running,
    "aten._native_batch_norm_legit_functional.default": local_channels.functional_batch_norm,
    "aten.batch_norm.default": local_channels.plain_batch_norm,
    "aten.copy.default": _copied,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.embedding.default": _embedding,
    "aten.group_norm.default": local_channels.group_norm,
    "aten.narrow.default": _narrow,
    "aten.nll_loss_nd.default": local_lookups.nll_loss,
    "aten.rms_norm.default": _rms_norm,
    "aten.scaled_dot_product_attention.default": _fused_attention,
    "aten.split_with_sizes.default": _split_with_sizes,
    "planner.experts.default": _experts,
}
"""Local forms of single operators, by name."""

SLICED: Mapping[str, Form] = {
    "aten.cross_entropy_loss.default": _cross_entropy_of_slice,
    "aten.scaled_dot_product_attention.default": _attention_of_slice,
}
"""Local forms of operators that, in a slice of the sequence, know of the other slices (see
`planner.plan.binding.slices`)."""

DROPPING: Mapping[str, Form] = {
    "aten.dropout.default": _dropout,
    "aten.feature_dropout.default": _feature_dropout,
    "aten.native_dropout.default": _native_dropout,
    "aten.scaled_dot_product_attention.default": _dropping_attention,
}
"""Local forms of operators that drop elements, by name, where their probability is not 0."""


def template(argument: Argument, device: torch.device) -> Any:
    """An argument of an operator with torch's objects for their names; values stay references."""
    if isinstance(argument, TorchConstant):
        return device if argument.kind == "device" else getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return [template(item, device) for item in argument]
    return argument


def filled(argument: Any, operands: Any) -> Any:
    """The argument, from `template`, with tensors for its references, taken from the iterator `operands` in order."""
    if isinstance(argument, ValueRef):
        return next(operands)
    if isinstance(argument, list):
        return [filled(item, operands) for item in argument]
    return argument
