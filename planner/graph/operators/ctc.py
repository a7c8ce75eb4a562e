"""Connectionist temporal classification (Graves et al. 2006, ICML: https://www.cs.toronto.edu/~graves/icml_2006.pdf) as
an operator that runs on tensors without data, which PyTorch's own operator does not.

    log probabilities T N C, targets N S, how many steps and how many targets count N -> a loss for each sample N

It is known to torch as `planner::ctc_loss` once this module is imported. Samples are independent of each other. The
sums over all alignments, N T (2 S + 1), are computed once more in the backward pass, for which only the operands are
kept. Both passes are PyTorch's kernels, in float32 at least.
"""

from typing import Any

import torch
import torch.nn.functional as F

CTC = "planner.ctc_loss.default"

Tensor = torch.Tensor


@torch.library.custom_op("planner::ctc_loss", mutates_args=())
def ctc_losses(
    log_probs: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """The negative logarithm of the probability of each sample's targets; 0 for an infinity with `zero_infinity`."""
    losses, _ = _forward(log_probs, targets, steps, lengths, blank, zero_infinity)
    return (torch.where(losses.isinf(), 0.0, losses) if zero_infinity else losses).to(log_probs.dtype)


@ctc_losses.register_fake
def _(log_probs: Tensor, *_others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("planner::ctc_loss_backward", mutates_args=())
def ctc_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    steps: Tensor,
    lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of the log probabilities, from the gradient of the losses."""
    losses, sums = _forward(log_probs, targets, steps, lengths, blank, zero_infinity)
    wide = log_probs.to(losses.dtype)
    found: Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        gradient.to(losses.dtype), wide, targets, steps, lengths, losses, sums, blank, zero_infinity
    )
    return found.to(log_probs.dtype, memory_format=torch.contiguous_format)


@ctc_backward.register_fake
def _(gradient: Tensor, log_probs: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _forward(
    log_probs: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Losses, and the sums over alignments that they are made from."""
    wide = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    made: tuple[Tensor, Tensor] = torch.ops.aten._ctc_loss.Tensor(wide, targets, steps, lengths, blank, zero_infinity)
    return made


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = ctc_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_keep)


def sums(log_probs: Tensor, targets: Tensor, *_others: Any) -> Tensor:
    """A tensor of the size of the sums over alignments, which live while the forward pass is computed."""
    steps, samples, _ = log_probs.shape
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return log_probs.new_empty((samples, steps, 2 * targets.shape[1] + 1), dtype=dtype)


def sums_backward(gradient: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The same for the backward pass: the sums from the first step on, and those from the last."""
    return sums(*given), sums(*given)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`F.ctc_loss` as the operator, where targets are a row for each sample and lengths are tensors; else unchanged."""
    lengths = (input_lengths, target_lengths)
    single = log_probs.dim() == 2
    if targets.dim() + single != 2 or not all(isinstance(one, Tensor) for one in lengths):
        return F.ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    rows = (log_probs[:, None], targets[None], *(one.reshape(1) for one in lengths)) if single else None
    losses: Tensor = ctc_losses(*(rows or (log_probs, targets, *lengths)), blank, zero_infinity)
    if reduction == "mean":
        return (losses / target_lengths.to(losses.dtype).clamp_min(1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses[0] if single else losses
