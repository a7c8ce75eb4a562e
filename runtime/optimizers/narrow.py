"""AdamW and SGD on weights or moments that are kept narrower than float32.

    for each chunk of elements:    widen ─> torch's update in float32 ─> round to the nearest

Takes weights, gradients and moments of any dtype; float32 ones are updated in place. A chunk has at most `UPDATE_CHUNK`
elements, of many small weights or of a part of a large one, so that float32 copies take little memory for any model,
and one kernel of an accelerator updates many weights. The update reads the stored moments, and uses its new moments
before they are rounded, like a kernel that holds them in registers (FusedAdam of Transformer Engine with exp_avg_dtype,
bfloat16 parameters under torch's fused AdamW).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from costmodels import UPDATE_CHUNK

Tensors: TypeAlias = Sequence[torch.Tensor]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def kept_dtype(word: str, weight: torch.dtype) -> torch.dtype:
    """The dtype of a weight's moments, by the word in a plan (`Update.moment_dtype`)."""
    return torch.bfloat16 if word == "bf16" else wide_dtype(weight)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype of the update: itself, or a copy."""
    return tensor.to(wide_dtype(tensor.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Equal parts of a weight, of its gradient and of its moments, and the number of earlier updates, where it is
    counted."""

    weight: torch.Tensor
    gradient: torch.Tensor
    moments: Tensors
    step: torch.Tensor | None


Update: TypeAlias = Callable[
    [Mapping[str, Any], list[torch.Tensor], list[torch.Tensor], Sequence[list[torch.Tensor]], Any], None
]
"""The update, in place; from a group's settings, weights, gradients, moments of each kind, and update counts."""


class _Narrow(torch.optim.Optimizer):
    """A mixin, placed before the class of an optimizer: its moments are kept in the dtype that `moments` names."""

    def __init__(self, weights: Any, *, moments: str, **settings: Any) -> None:
        super().__init__(weights, **settings)
        self._kept = moments


class NarrowAdamW(_Narrow, torch.optim.AdamW):
    """AdamW."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Update every weight that has a gradient."""
        assert closure is None
        _step(self, ("exp_avg", "exp_avg_sq"), self._kept, _adamw, counted=True)


class NarrowSGD(_Narrow, torch.optim.SGD):
    """SGD."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Update every weight that has a gradient."""
        assert closure is None
        kinds = ("momentum_buffer",) if self.defaults["momentum"] else ()
        _step(self, kinds, self._kept, _sgd, counted=False)


def _step(optimizer: torch.optim.Optimizer, kinds: Sequence[str], word: str, update: Update, *, counted: bool) -> None:
    for group in optimizer.param_groups:
        pieces: list[_Piece] = []
        steps: list[torch.Tensor] = []
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = optimizer.state[weight]
            if not state:
                _begin(state, weight, kinds, word, group, counted=counted)
            step = state["step"] if counted else None
            steps += [] if step is None else [step]
            pieces += _pieces(weight, [state[kind] for kind in kinds], step)
        for chunk in _chunks(pieces):
            _update(chunk, group, update)
        for step in steps:
            step += 1


def _begin(
    state: Any, weight: torch.Tensor, kinds: Sequence[str], word: str, group: Mapping[str, Any], *, counted: bool
) -> None:
    if counted:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device=weight.device if group["fused"] else None)
    for kind in kinds:
        state[kind] = torch.zeros_like(weight, dtype=kept_dtype(word, weight.dtype))


def _pieces(weight: torch.Tensor, moments: Tensors, step: torch.Tensor | None) -> Iterator[_Piece]:
    """Parts of at most `UPDATE_CHUNK` elements where all tensors are contiguous, else parts of whole rows."""
    assert weight.grad is not None
    parts = [weight.detach(), weight.grad, *moments]
    if all(part.is_contiguous() for part in parts):
        parts = [part.view(-1) for part in parts]
    rows = parts[0].shape[0]
    count = max(1, UPDATE_CHUNK * rows // max(1, weight.numel()))
    for start in range(0, rows, count):
        own, gradient, *kept = (part[start : start + count] for part in parts)
        yield _Piece(weight=own, gradient=gradient, moments=kept, step=None if step is None else step.clone())


def _chunks(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    chunk: list[_Piece] = []
    held = 0
    for piece in pieces:
        size = piece.weight.numel()
        if chunk and held + size > UPDATE_CHUNK:
            yield chunk
            chunk, held = [], 0
        chunk.append(piece)
        held += size
    if chunk:
        yield chunk


def _update(chunk: Sequence[_Piece], group: Mapping[str, Any], update: Update) -> None:
    kept = [[piece.weight for piece in chunk], *map(list, zip(*(piece.moments for piece in chunk), strict=True))]
    weights, *moments = wide = [[widened(one) for one in own] for own in kept]
    update(group, weights, [widened(piece.gradient) for piece in chunk], moments, [piece.step for piece in chunk])
    for narrow, made in zip(kept, wide, strict=True):
        copied = [(into, new) for into, new in zip(narrow, made, strict=True) if into is not new]
        if copied:
            torch._foreach_copy_([into for into, _ in copied], [new for _, new in copied])


def _adamw(
    group: Mapping[str, Any],
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: Sequence[list[torch.Tensor]],
    steps: Any,
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        weights,
        gradients,
        moments[0],
        moments[1],
        [],
        steps,
        fused=group["fused"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _sgd(
    group: Mapping[str, Any],
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: Sequence[list[torch.Tensor]],
    steps: Any,
) -> None:
    kept: list[torch.Tensor | None] = [*moments[0]] if moments else [None] * len(weights)
    sgd(
        weights,
        gradients,
        kept,
        fused=group["fused"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
