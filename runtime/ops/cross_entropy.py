"""Cross entropy of logits that are sharded over the vocabulary, over the samples, or over both.

With the logits x of one sample, split over processes into pieces, and its target t:

    m = max x            all-reduce (max) over the vocabulary axes
    z = sum exp(x - m)   all-reduce (sum) over the vocabulary axes
    loss = m + log z - x_t                          x_t is known to one process: all-reduce (sum)
    gradient of x_j = (exp(x_j - m) / z - [j = t]) / count      no communication, in the place of exp(x_j - m) / z

(Shoeybi et al. 2019, Megatron-LM, section 3.) A mean is over all targets that are not ignored, so `count` is
all-reduced over the axes that split the samples; what a process returns is its term of the sum over these axes.
Label smoothing e adds the mean of -log p over the vocabulary of size V with weight e, which takes one more
all-reduce: (1 - e) [j = t] + e / V instead of [j = t].

Where every process has the whole vocabulary, m and z need no communication: PyTorch's kernels compute log (exp(x_j - m)
/ z) and the loss, and return the number of targets that count.

Shape legend: N local samples, V local vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime.comm import collectives
from runtime.ops.index_check import expect_within

_SUM = 2  # torch's number for the sum of the losses


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLoss:
    """How the logits are split, and the settings of `torch.nn.functional.cross_entropy`.

    `offset` is the first class of this process's piece, `classes` the size of the whole vocabulary without padding
    columns, which are left out. `counted` is the number of this process's targets in the mean, where it differs from
    the targets of the call that are not ignored.
    """

    vocabulary_groups: Sequence[dist.ProcessGroup]
    sample_groups: Sequence[dist.ProcessGroup]
    offset: int
    classes: int
    mean: bool
    ignore_index: int
    label_smoothing: float
    counted: torch.Tensor | None = None

    def kept(self, logits_NV: torch.Tensor) -> int:
        """The number of columns of this process's piece that are classes."""
        return min(max(self.classes - self.offset, 0), logits_NV.shape[1])

    def weight(self, count: torch.Tensor) -> torch.Tensor:
        """The factor from the sum of losses to their mean, where `count` targets of the call are not ignored."""
        count = count if self.counted is None else self.counted.to(count.dtype)
        return _over(count, self.sample_groups, collectives.all_reduce).reciprocal()


def split_cross_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor, split: SplitLoss) -> torch.Tensor:
    """This process's term of the loss, a scalar of the dtype of the logits; equal on all processes of the vocabulary
    axes. For a target that is neither a class nor ignored it raises RuntimeError, or IndexError where the vocabulary is
    whole."""
    if logits_NV.shape[1] == split.classes and not split.label_smoothing:
        return _WholeCrossEntropy.apply(logits_NV, targets_N, split)  # type: ignore[no-any-return, no-untyped-call]
    expect_within(targets_N, split.classes, "targets of the cross entropy", split.ignore_index)
    return _SplitCrossEntropy.apply(logits_NV, targets_N, split)  # type: ignore[no-any-return, no-untyped-call]


class _SplitCrossEntropy(torch.autograd.Function):
    """Keeps the probabilities, and computes the gradient in their memory: at most two tensors of the size of the
    logits, where PyTorch's own has three in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, split: SplitLoss) -> torch.Tensor:
        wide_NV, kept = _wide(logits_NV), split.kept(logits_NV)
        own_N = wide_NV[:, :kept].amax(dim=1) if kept else wide_NV.new_full((len(wide_NV),), -math.inf)
        largest_N = _over(own_N, split.vocabulary_groups, collectives.all_reduce_max)
        column_N, here_N = _columns(targets_N, split.offset, logits_NV.shape[1])
        chosen_N = wide_NV.gather(1, column_N[:, None])[:, 0].masked_fill(~here_N, 0.0)
        chosen_N = _over(chosen_N, split.vocabulary_groups, collectives.all_reduce)
        if split.label_smoothing:
            total_N = _over(wide_NV[:, :kept].sum(dim=1), split.vocabulary_groups, collectives.all_reduce)
        probabilities_NV = (wide_NV - largest_N[:, None]).exp_()
        probabilities_NV[:, kept:] = 0.0
        sum_N = _over(probabilities_NV.sum(dim=1), split.vocabulary_groups, collectives.all_reduce)
        probabilities_NV /= sum_N[:, None]
        losses_N = largest_N + sum_N.log() - (1.0 - split.label_smoothing) * chosen_N
        if split.label_smoothing:
            losses_N = losses_N - split.label_smoothing / split.classes * total_N
        counted_N = targets_N != split.ignore_index
        loss = losses_N.masked_fill(~counted_N, 0.0).sum()
        weight = torch.ones_like(loss)
        if split.mean:
            weight = split.weight(counted_N.sum().to(loss.dtype))
        ctx.split, ctx.dtype = split, logits_NV.dtype
        ctx.save_for_backward(probabilities_NV, targets_N, weight)
        return (loss * weight).to(logits_NV.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient_NV, targets_N, weight = ctx.saved_tensors  # the gradient takes the place of the probabilities
        split: SplitLoss = ctx.split
        if split.label_smoothing:
            gradient_NV[:, : split.kept(gradient_NV)] -= split.label_smoothing / split.classes
        column_N, here_N = _columns(targets_N, split.offset, gradient_NV.shape[1])
        hit_N = here_N.to(gradient_NV.dtype) * (1.0 - split.label_smoothing)
        gradient_NV.scatter_add_(1, column_N[:, None], -hit_N[:, None])
        scale_N = (targets_N != split.ignore_index).to(gradient_NV.dtype) * (weight * gradients[0])
        return _scaled(gradient_NV, scale_N, ctx.dtype), None, None


class _WholeCrossEntropy(torch.autograd.Function):
    """Keeps the log probabilities, and computes the gradient in their memory."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, split: SplitLoss) -> torch.Tensor:
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        logarithms_NV = torch.log_softmax(logits_NV, 1, dtype=wide)  # on CUDA the fp16 cast is fused
        loss, count = torch.ops.aten.nll_loss_forward(logarithms_NV, targets_N, None, _SUM, split.ignore_index)
        weight = split.weight(count) if split.mean else torch.ones_like(loss)
        ctx.ignore_index, ctx.dtype = split.ignore_index, logits_NV.dtype
        ctx.save_for_backward(logarithms_NV, targets_N, weight)
        mean: torch.Tensor = loss * weight
        return mean.to(logits_NV.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logarithms_NV, targets_N, weight = ctx.saved_tensors
        gradient_NV = logarithms_NV.exp_()
        ignored_N = targets_N == ctx.ignore_index
        column_N = targets_N.masked_fill(ignored_N, 0)
        gradient_NV.scatter_add_(1, column_N[:, None], gradient_NV.new_full((len(column_N), 1), -1.0))
        return _scaled(gradient_NV, (weight * gradients[0]).masked_fill(ignored_N, 0.0), ctx.dtype), None, None


def _scaled(gradient_NV: torch.Tensor, scale_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows times their scales, in place where the rows have that dtype; else cast in the same pass."""
    if gradient_NV.dtype == dtype:
        return gradient_NV.mul_(scale_N[:, None])
    return torch.mul(gradient_NV, scale_N[:, None], out=torch.empty_like(gradient_NV, dtype=dtype))


def _wide(logits_NV: torch.Tensor) -> torch.Tensor:
    """Half precision is summed in float32, as in PyTorch's own kernel."""
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()


def _over(term: torch.Tensor, groups: Sequence[dist.ProcessGroup], reduce: Any) -> torch.Tensor:
    for group in groups:
        term = reduce(term, group)
    return term


def _columns(targets_N: torch.Tensor, offset: int, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each target in this process's piece (0 if it is in another piece), and whether it is in this
    one."""
    column_N = targets_N - offset
    here_N = (column_N >= 0) & (column_N < extent)
    return column_N.masked_fill(~here_N, 0), here_N
