"""Local forms of the operators of language models, except products and attention."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from planner.errors import ModelError
from planner.fp8_recipes import RECIPES
from planner.models.experts.delayed import DelayedProducts
from planner.models.experts.fp8 import PLAIN, Agreement
from planner.models.experts.mixture import matrices_of, products_of
from planner.models.experts.rows import activation_of
from runtime.comm import collectives
from runtime.ops.contraction import product
from runtime.ops.cross_entropy import SplitLoss, split_cross_entropy
from runtime.ops.experts import Cut, SplitExperts, split_experts
from runtime.ops.fp8.delayed_scales import LayerScales
from runtime.ops.index_check import expect_within
from runtime.ops.rms_norm import fused_rms_norm
from runtime.ops.shard import Shard
from runtime.ops.slice_pass import SlicePass

_NONE, _MEAN, _SUM = range(3)  # torch's numbers for the reductions of a loss


def embedding(
    shard: Shard,
    weight_VH: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """The rows that this rank has, zeros for the others: a term of a sum over the axes that split the vocabulary."""
    rows = weight_VH.shape[0]
    if scale_grad_by_freq:
        raise ModelError(
            f"{shard.bound.operator.name}: scale_grad_by_freq counts over the whole batch; it is not supported"
        )
    if not shard.axes("v"):
        try:
            return F.embedding(indices, weight_VH, padding_idx if padding_idx >= 0 else None)
        except IndexError:  # its message has neither the index nor the number of rows
            expect_within(indices, rows, f"indices of {shard.bound.operator.name}")
            raise
    expect_within(indices, shard.extent("v"), f"indices of {shard.bound.operator.name}")
    offset = shard.offset("v")
    row = indices - offset
    elsewhere = (row < 0) | (row >= rows)
    padding = padding_idx - offset if padding_idx >= 0 and 0 <= padding_idx - offset < rows else None
    found = F.embedding(row.masked_fill(elsewhere, 0), weight_VH, padding)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def contraction(shard: Shard, equation: str, tensors: Sequence[torch.Tensor], path: Any = None) -> torch.Tensor:
    """Letters stand for the local extents of their dims; one or two tensors have only one contraction path."""
    return product(equation, tensors)


def rms_norm(
    shard: Shard,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    epsilon: float | None = None,
) -> torch.Tensor:
    """PyTorch has no such kernel for CPUs, nor for weights of another dtype than x (2.13)."""
    if x.device.type != "cpu" and (weight is None or weight.dtype == x.dtype):
        return F.rms_norm(x, list(normalized_shape), weight, epsilon)
    return fused_rms_norm(x, normalized_shape, weight, epsilon)


def experts(
    shard: Shard,
    x_BSH: torch.Tensor,
    weights_BSK: torch.Tensor,
    chosen_BSK: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    *settings: Any,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    **named: Any,
) -> torch.Tensor:
    split = splitting_experts(shard, *settings, gated=gate is not None, **named)
    matrices = matrices_of(gate, up, down, gate_bias, up_bias)
    tensors = (*matrices.first, matrices.down, *matrices.biases)
    return split_experts(x_BSH, weights_BSK, chosen_BSK, tensors, split)


def splitting_experts(
    shard: Shard,
    capacity: int = 0,
    imbalance: float = 1.0,
    once: bool = False,
    groups: int = 1,
    chosen_groups: int = 1,
    fp8: str = "",
    dispatch: bool = False,
    limit: float = 0.0,
    slope: float = 1.0,
    offset: float = 0.0,
    activation: str = "silu",
    *,
    gated: bool,
    **biases: object,
) -> SplitExperts:
    """The sharding of an operator's experts, and its settings, which follow its tensors, with `biases` among them;
    `gated` says whether it has a gate."""
    cuts = [
        Cut(
            size=shard.place.mesh.sizes[axis],
            own=shard.place.coordinate[axis],
            group=shard.place.group(axis) if shard.exchanges(axis) else None,
        )
        for axis in shard.cutting("e")
    ]
    split = SplitExperts(
        experts=shard.extent("e"),
        cuts=cuts,
        capacity=capacity,
        imbalance=imbalance,
        once=(groups, chosen_groups) if once else None,
        dispatch=dispatch,
        activation=activation_of(activation, gated=gated, limit=limit, slope=slope, offset=offset),
    )
    if isinstance(shard.scales, LayerScales):
        own = shard.scales.among(*split.held)
        return replace(split, products=DelayedProducts(recipe=RECIPES[fp8], scales=own, first=split.activation.first))
    return replace(split, products=products_of(fp8, _agreement(shard)) if fp8 else PLAIN)


def _agreement(shard: Shard) -> Agreement:
    """The groups with which a rank shares the rows of its experts, and parts of them."""

    def among(axes: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        groups = [shard.place.group(axis) for axis in axes]

        def agree(largest: torch.Tensor) -> torch.Tensor:
            for group in groups:
                largest = collectives.all_reduce_max(largest, group)
            return largest

        return agree

    width = shard.axes("f")
    return Agreement(
        tokens=among([axis for factor in ("b", "s") for axis in shard.axes(factor)]),
        width=among(width),
        first=shard.offset("f"),
        whole=shard.extent("f") if width else 0,
    )


def cross_entropy_of_slice(
    shard: Shard, part: SlicePass, logits_NV: torch.Tensor, targets_N: torch.Tensor, *settings: Any, **named: Any
) -> torch.Tensor:
    return cross_entropy(
        shard, logits_NV, targets_N, *settings, **named, counted=part.together.counted[shard.bound.operator.name]
    )


def cross_entropy(
    shard: Shard,
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    weight: None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    counted: torch.Tensor | None = None,
    classes: int | None = None,
) -> torch.Tensor:
    vocabulary, samples = shard.axes("v"), shard.axes("n")
    assert reduction != _NONE, "the rule of cross entropy covers a scalar result only"
    split = SplitLoss(
        vocabulary_groups=tuple(shard.place.group(axis) for axis in vocabulary),
        sample_groups=tuple(shard.place.group(axis) for axis in samples),
        offset=shard.offset("v"),
        classes=classes or logits_NV.shape[1] * math.prod(shard.place.mesh.sizes[axis] for axis in vocabulary),
        mean=reduction == _MEAN,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        counted=counted,
    )
    return split_cross_entropy(logits_NV, targets_N, split)
