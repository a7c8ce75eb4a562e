"""Losses as operators with rules: cross entropy, in all ways to call it, and losses that ask for values.

The operator of cross entropy has a rule for one row of logits for each target, and a scalar loss: `n v, n ->`. Its
classes can be split. Other calls are composed of it, or of the operators by which PyTorch computes them
(aten/src/ATen/native/LossNLL.cpp):

    logits b v s, targets b s        classes moved behind, rows flattened, the operator
    class weights, reduction "none"  log_softmax, gather, and for a mean the quotient of two sums
    targets that are probabilities   log_softmax, products, a sum

The last two have their classes whole on every device. `F.ctc_loss` becomes `planner.graph.operators.ctc`, also where
targets lie one behind the other, as `labels.masked_select(mask)` with lengths `mask.sum(-1)`: they become padded rows.
`F.gaussian_nll_loss` is composed as in PyTorch, without the check whether a variance is negative; a model that runs
makes that check.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction
from torch.overrides import TorchFunctionMode

from planner.graph.operators.ctc import ctc_loss
from planner.graph.tracing.known_tensors import KnownTensors, Writes

_SUMS = frozenset({"mean", "sum"})
_SELECTING = frozenset({torch.masked_select, torch.Tensor.masked_select})
_COUNTING = frozenset({torch.sum, torch.Tensor.sum})
_LAST_OF_TWO = (-1, 1, (-1,), (1,), [-1], [1])
"""Ways to name the last dim of a mask."""


class WholeLosses(TorchFunctionMode):
    """While active, calls of cross entropy, of negative log likelihoods and of the CTC loss become calls that have a
    rule."""

    def __init__(self) -> None:
        super().__init__()
        self._writes = Writes()
        self._selected = KnownTensors[tuple[torch.Tensor, torch.Tensor]](self._writes)  # the source and the mask
        self._counted = KnownTensors[torch.Tensor](self._writes)  # counts: the mask whose last dim they count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        if func is F.nll_loss:
            return _nll_loss(*args, **(kwargs or {}))
        if func is F.ctc_loss:
            return self._ctc_loss(*args, **(kwargs or {}))
        if func in _SELECTING:
            return self._select(*args, **(kwargs or {}))
        if func in _COUNTING:
            return self._count(func, *args, **(kwargs or {}))
        if func is F.gaussian_nll_loss:
            return _gaussian_nll_loss(*args, **(kwargs or {}))
        return self._writes.call(func, args, kwargs or {})

    def _select(self, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        selected = input.masked_select(mask)
        if input.dim() == 2 and input.shape == mask.shape:
            self._selected.say(selected, (input, mask), input, mask)
        return selected

    def _count(self, func: Any, *args: Any, **named: Any) -> torch.Tensor:
        counted: torch.Tensor = func(*args, **named)
        dim = args[1] if len(args) > 1 else named.get("dim")
        if args and args[0].dtype == torch.bool and (args[0].dim(), counted.dim()) == (2, 1) and dim in _LAST_OF_TWO:
            self._counted.say(counted, args[0], args[0])
        return counted

    def _ctc_loss(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: torch.Tensor,
        target_lengths: torch.Tensor,
        blank: int = 0,
        *how: Any,
        **named: Any,
    ) -> torch.Tensor:
        source, mask = self._selected.said(targets) or (None, None)
        if source is not None and mask is not None and self._counted.said(target_lengths) is mask:
            order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
            targets = source.masked_fill(~mask, blank).gather(1, order)
        return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, *how, **named)


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    given = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    reduction = _named(size_average, reduce, reduction)
    probabilities = target.is_floating_point()
    if not _fits(input, target) and not (probabilities and input.shape == target.shape):
        return F.cross_entropy(input, target, reduction=reduction, **given)  # type: ignore[arg-type]  # PyTorch refuses it
    logits = input if input.dim() > 1 else input[None]
    target = target if input.dim() > 1 else target[None]
    if probabilities:
        loss = _of_probabilities(logits, target, weight, reduction, label_smoothing)
    elif weight is None and reduction in _SUMS:
        return F.cross_entropy(*_rows(logits, target), reduction=reduction, **given)  # type: ignore[arg-type]
    else:
        log_likelihoods = logits.log_softmax(1)
        loss = _of_classes(log_likelihoods, target, weight, ignore_index, reduction, label_smoothing)
    return loss if input.dim() > 1 or reduction in _SUMS else loss[0]


def _nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    reduction = _named(size_average, reduce, reduction)
    if not _fits(input, target) or input.dim() == 1:
        return F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    if weight is None and reduction in _SUMS:
        return F.nll_loss(*_rows(input, target), ignore_index=ignore_index, reduction=reduction)
    return _of_classes(input, target, weight, ignore_index, reduction, 0.0)


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    if isinstance(var, float):
        return F.gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()  # gradients also flow through bounded values
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _named(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The reduction of losses, given the two arguments that named it before PyTorch 1.0."""
    if size_average is None and reduce is None:
        return reduction
    return _reduction.legacy_get_string(size_average, reduce)


def _fits(input: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the target has the number of a class for each row of logits."""
    rows = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    return not target.is_floating_point() and tuple(target.shape) == rows


def _rows(input: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of logits for each target."""
    if input.dim() == 2:
        return input, target
    return input.permute(0, *range(2, input.dim()), 1).flatten(0, -2), target.flatten()


def _of_classes(
    log_likelihoods: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> torch.Tensor:
    """The loss for targets that are numbers of classes, along dim 1. A mean is over the weights of the targets that
    count; a loss without weights is the operator's own (`_rows`)."""
    counts = target != ignore_index
    classes = torch.where(counts, target, 0)
    losses = -log_likelihoods.gather(1, classes.unsqueeze(1)).squeeze(1)
    weights = None if weight is None else weight[classes]
    if weights is not None:
        losses = losses * weights
    if label_smoothing:
        smooth = _weighted(log_likelihoods, weight).sum(1)
        losses = losses * (1 - label_smoothing) - smooth * (label_smoothing / log_likelihoods.shape[1])
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if weights is None or reduction == "sum" else total / torch.where(counts, weights, 0.0).sum()


def _of_probabilities(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, label_smoothing: float
) -> torch.Tensor:
    """The loss for targets with a probability for each class. A mean is over the rows, whatever their weights."""
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / logits.shape[1]
    losses = -_weighted(logits.log_softmax(1) * target, weight).sum(1)
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def _weighted(values: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Values of classes, along dim 1, times the weights of the classes."""
    return values if weight is None else values * weight.view(-1, *(1,) * (values.dim() - 2))
