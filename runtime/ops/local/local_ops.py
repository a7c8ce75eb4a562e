"""How one device computes its part of an operator: the call on local tensors.

Most operators run unchanged on shards: the traced operator, with local tensors as its tensor arguments. The exceptions
follow from the rule (`local_form`, `mean_over`) or are in `LOCAL_OPS`, by name: operators whose pieces depend on their
position, or that have an extent as an argument.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from planner.fp8_recipes import RECIPES
from planner.graph.blocks import IDENTITY
from planner.graph.fp8 import fp8_operator
from planner.graph.operator_graph import STARTING, Argument, OperatorGraph, TorchConstant, ValueRef
from planner.graph.rewriting.bags import BAG
from planner.graph.rewriting.contractions import EINSUM
from planner.graph.rewriting.masks import COMPOSED_ATTENTION, MASKED_ATTENTION
from planner.graph.rewriting.recurrent import GATES
from planner.graph.rewriting.updates import UPDATE
from planner.graph.torch_operators import resolve
from planner.plan.binding.bind import BoundOperator
from planner.sharding.layout import local_shape
from planner.sharding.rules.per_replica import FORM
from planner.sharding.zigzag import Sequences
from runtime.comm.device_mesh import RankMesh
from runtime.ops.fp8.fp8_linear import local_fp8_linear
from runtime.ops.fp8.fp8_scales import Fp8Scales
from runtime.ops.local import (
    local_attention,
    local_channels,
    local_dropout,
    local_images,
    local_language,
    local_lookups,
    local_recurrent,
    local_shapes,
)
from runtime.ops.per_replica import per_replica
from runtime.ops.randomness import FIRST, Draw, drop_probability, operator_code, region_of
from runtime.ops.shard import Form, Shard
from runtime.tables.placed import PlacedTables


class LocalCall(Protocol):
    """Takes the local operands, in the order of `Operator.operands`, and returns the local results, in the order of
    `Operator.results`. `draw` determines the random numbers of an operator that drops elements."""

    def __call__(self, operands: Sequence[torch.Tensor], draw: Draw = FIRST) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCall:
    """A form with the operator's own arguments, in which references stand for tensors. The results are multiplied by
    `scale`; `code` is the operator's random-number code, if it drops elements; `sliced` is the form for a slice of the
    sequence, where that differs."""

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


def local_call(
    graph: OperatorGraph,
    bound: BoundOperator,
    place: RankMesh,
    sequences: Sequences | None = None,
    tables: PlacedTables | None = None,
    scales: Fp8Scales | None = None,
) -> LocalCall:
    """The call of one operator on this rank. `sequences` are the dims that axes with their own order (zigzag) cut in
    that order, `tables` the tables off the devices, `scales` the fp8 scales that are known before layers run. Raises
    ModelError for an operator that cannot be executed yet."""
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
    own = None if scales is None else scales.of(op)
    shard = Shard(bound=bound, place=place, shapes=shapes, region=region, scales=own)
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
    """The call of an operator that looks up rows of a table off the devices."""
    dtype: torch.dtype = getattr(torch, next(graph.types[name].dtype for name in bound.operator.results if name))

    def call(operands: Sequence[torch.Tensor], draw: Draw = FIRST) -> Sequence[Any]:
        return [tables.look_up(bound, place, operands[0], dtype)]

    return call


def _form(shard: Shard) -> Form:
    op = shard.bound.operator.op
    if shard.bound.rule.local_form is not None:
        return functools.partial(SHAPED[shard.bound.rule.local_form], shard)
    if shard.bound.operator.rule is not None:  # a rule that was found by running the operator itself on pieces
        return resolve(op)
    if op in LOCAL_OPS:
        return functools.partial(LOCAL_OPS[op], shard)
    return resolve(op)


def _per_replica(shard: Shard, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
    """An operator that every data-parallel replica computes on its own samples."""
    return per_replica(_form(shard.one), shard, *arguments, **keywords)


SHAPED: Mapping[str, Form] = {
    "counted": local_shapes.counted,
    "expand": local_shapes.expand,
    "filled": local_shapes.filled_piece,
    FORM: _per_replica,
    "reshape": local_shapes.reshape,
    "tiled": local_shapes.tiled,
}
"""Local forms of operators that have the shape of their result as an argument, by `Rule.local_form`."""


LOCAL_OPS: Mapping[str, Form] = {
    IDENTITY: local_shapes.identity,
    STARTING: local_shapes.gradient_start,
    UPDATE: local_shapes.update,
    BAG: local_lookups.embedding_bag,
    **{
        f"aten.conv{spatial}d.{overload}": local_images.convolution
        for spatial in (1, 2, 3)
        for overload in ("default", "padding")
    },
    "aten.conv_transpose1d.default": local_images.transposed_convolution,
    "aten.conv_transpose2d.input": local_images.transposed_convolution,
    "aten.conv_transpose3d.input": local_images.transposed_convolution,
    "aten._native_batch_norm_legit.no_stats": local_channels.batch_norm_without_running,
    "aten._native_batch_norm_legit_functional.default": local_channels.functional_batch_norm,
    "aten.batch_norm.default": local_channels.plain_batch_norm,
    "aten.avg_pool2d.default": local_images.avg_pool2d,
    "aten.copy.default": local_shapes.copied,
    EINSUM: local_language.contraction,
    "aten.cross_entropy_loss.default": local_language.cross_entropy,
    "aten.embedding.default": local_language.embedding,
    "aten.group_norm.default": local_channels.group_norm,
    "aten.max_pool2d.default": local_images.max_pool2d,
    "aten.narrow.default": local_shapes.narrow,
    "aten.nll_loss_nd.default": local_lookups.nll_loss,
    "aten.rms_norm.default": local_language.rms_norm,
    "aten.scaled_dot_product_attention.default": local_attention.fused_attention,
    "aten.split_with_sizes.default": local_shapes.split_with_sizes,
    MASKED_ATTENTION: local_attention.windowed_attention,
    COMPOSED_ATTENTION: local_attention.composed,
    "planner.experts.default": local_language.experts,
    **dict.fromkeys(GATES, local_recurrent.recurrent),
    **{fp8_operator(recipe): local_fp8_linear for recipe in RECIPES},
}
"""Local forms of single operators, by name."""


SLICED: Mapping[str, Form] = {
    "aten.cross_entropy_loss.default": local_language.cross_entropy_of_slice,
    "aten.scaled_dot_product_attention.default": local_attention.attention_of_slice,
    MASKED_ATTENTION: local_attention.windowed_attention_of_slice,
}
"""Local forms of operators that depend on the other slices of the sequence, for slices (see
`planner.plan.binding.slices`)."""


DROPPING: Mapping[str, Form] = {
    "aten.dropout.default": local_dropout.dropout,
    "aten.feature_dropout.default": local_dropout.feature_dropout,
    "aten.native_dropout.default": local_dropout.native_dropout,
    "aten.scaled_dot_product_attention.default": local_attention.dropping_attention,
}
"""Local forms of operators with dropout, by name, where its probability is not 0."""


def template(argument: Argument, device: torch.device) -> Any:
    """An argument of an operator with torch's objects in the place of their names; values stay references."""
    if isinstance(argument, TorchConstant):
        return device if argument.kind == "device" else getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return [template(item, device) for item in argument]
    return argument


def filled(argument: Any, operands: Any) -> Any:
    """The argument, from `template`, with its references replaced by tensors from the iterator `operands`, in order."""
    if isinstance(argument, ValueRef):
        return next(operands)
    if isinstance(argument, list):
        return [filled(item, operands) for item in argument]
    return argument
