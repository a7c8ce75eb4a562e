"""Muon: momentum whose update of a matrix is made orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    m <- b m + (1 - b) g           u = (1 - b) g + b m             Nesterov's momentum
    o = NewtonSchulz(u)            its singular values drawn to 1, in `costmodels.NEWTON_SCHULZ_STEPS` steps
    x <- x - rate decay x - rate 0.2 sqrt(max(rows, columns)) o    lengths as of AdamW, whose rate and decay it shares
                                                                   (Liu et al. 2025, arXiv 2502.16982, section 2.2)

The iteration needs whole matrices: where a weight lies in pieces, `Whole` gathers its update and cuts the result. It
runs in bfloat16 for weights that are computed with in that, in float32 for others. A weight of several matrices has
them in its last two dims. The update takes the place of the gradient. A weight of 16 bits may have a gradient in
float32 (`Tensor.grad_dtype`); momentum and arithmetic are float32 then. With `adjust_lr_fn="match_rms_adamw"`, which
computes in bfloat16, `torch.optim.Muon` is the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from costmodels import NEWTON_SCHULZ_STEPS

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST = 1e-7
_LENGTH = 0.2
"""Root mean square of an update of AdamW, about (Liu et al. 2025, section 2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A weight that Muon updates: rows and columns of its matrices in the model, the dtype of the iteration; `gather`
    makes whole matrices of this rank's piece of an update, and `cut` a piece of them. Both are collective."""

    rows: int
    columns: int
    dtype: torch.dtype
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda piece: piece
    cut: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole

    @property
    def scale(self) -> float:
        """By how much an orthogonal update is longer than the rate."""
        return _LENGTH * math.sqrt(max(self.rows, self.columns))


def whole_of(weight: torch.Tensor) -> Whole:
    """A weight that is here as a whole."""
    rows, columns = weight.shape[-2:]
    return Whole(rows=rows, columns=columns, dtype=iterated_dtype(weight.dtype))


def iterated_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the iteration for a weight that is computed with in this one."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


class Muon(torch.optim.Optimizer):
    """The optimizer of the same name over these weights, of which `wholes` has one each, in their order."""

    def __init__(
        self,
        weights: Sequence[dict[str, Any]],
        wholes: Sequence[Whole],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        every = [weight for group in self.param_groups for weight in group["params"]]
        self._wholes = dict(zip(every, wholes, strict=True))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Update every weight that has a gradient; those are the same on all ranks that share one."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, whole, rate = self.state[weight], self._wholes[weight], group["lr"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp_(momentum, group["momentum"])
        own = whole.cut(orthogonal(whole.gather(update.to(whole.dtype))))
        wide = weight if weight.dtype == gradient.dtype else weight.to(gradient.dtype)
        wide.mul_(1 - rate * group["weight_decay"]).add_(own, alpha=-rate * whole.scale)
        if wide is not weight:
            weight.copy_(wide)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (..., rows, columns) with singular values of about 1, between 0.7 and 1.2; in their own memory, whose
    content is lost, or in other."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=_LEAST))
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        both = torch.baddbmm(_3d(square), _3d(square), _3d(square), beta=b, alpha=c)
        x = torch.baddbmm(_3d(x), both, _3d(x), beta=a).view(x.shape)
    return x.mT if tall else x


def _3d(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:])
