"""Muon: momentum with orthogonalized matrix updates (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    m <- b m + (1 - b) g           u = (1 - b) g + b m             Nesterov's momentum
    o = NewtonSchulz(u)            its singular values drawn to 1, in `costmodels.NEWTON_SCHULZ_STEPS` steps
    x <- x - rate decay x - rate 0.2 sqrt(max(rows, columns)) o    lengths as of AdamW, whose rate and decay it shares
                                                                   (Liu et al. 2025, arXiv 2502.16982, section 2.2)

The iteration needs whole matrices. For weights sharded over N devices, N weights of one shape are updated together, and
each device gathers one of them (`planner.pricing.matrix_update`). It runs in bfloat16 for weights that are used in
bfloat16, in float32 for others. A weight with several matrices has them in its last two dims. The update overwrites the
gradient. A 16-bit weight may have a float32 gradient (`Tensor.grad_dtype`); arithmetic is then float32, and momentum is
rounded where it is narrower. With `adjust_lr_fn="match_rms_adamw"`
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from costmodels import NEWTON_SCHULZ_STEPS
from runtime.optimizers.narrow import kept_dtype, widened

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST = 1e-7
_LENGTH = 0.2
"""The approximate root mean square of an AdamW update (Liu et al. 2025, section 2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Weights that are updated together, by their `places` among all weights; `shapes` are those of their matrices in
    the model. The iteration runs in `dtype`. For weights sharded over `size` devices, `gather` turns a stack of pieces,
    (size, ...), into one whole update, (1, ...), and `cut` does the inverse; both are collective."""

    places: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    size: int = 1
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda pieces: pieces
    cut: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole

    @property
    def scales(self) -> list[float]:
        """The factors between orthogonal updates and the learning rate."""
        return [_LENGTH * math.sqrt(max(shape)) for shape in self.shapes]


def whole(place: int, weight: torch.Tensor) -> Together:
    """A weight that is whole on this device, as a group of its own."""
    rows, columns = weight.shape[-2:]
    return Together(places=(place,), shapes=((rows, columns),), dtype=iterated_dtype(weight.dtype))


def iterated_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the iteration, for a weight that is used in this dtype."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


class Muon(torch.optim.Optimizer):
    """Muon over these weights, each of which is in one of the `groups` that are updated together."""

    def __init__(
        self,
        weights: Sequence[dict[str, Any]],
        groups: Sequence[Together],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        moments: str = "fp32",
    ) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._together, self._kept = groups, moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Update every weight that has a gradient; those are the same on all ranks that share one."""
        assert closure is None
        every = [(weight, group) for group in self.param_groups for weight in group["params"]]
        for together in self._together:
            own = [every[place] for place in together.places]
            if any(weight.grad is not None for weight, _ in own):
                self._update(together, own)

    def _update(self, together: Together, own: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        updates = self._orthogonal(together, [self._momentum(weight, group) for weight, group in own])
        for (weight, group), update, scale in zip(own, updates, together.scales, strict=False):
            if weight.grad is None:
                continue
            rate, wide = group["lr"], weight.to(wide_of(weight))
            wide.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate * scale)
            if wide is not weight:
                weight.copy_(wide)

    def _momentum(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Write a weight's update, before orthogonalization, over its gradient; returns it. Zeros without a
        gradient."""
        gradient, state = weight.grad, self.state[weight]
        if gradient is None:
            return torch.zeros_like(weight, dtype=wide_of(weight))
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient, dtype=kept_dtype(self._kept, gradient.dtype))
        momentum = widened(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
        if momentum is not state["momentum_buffer"]:
            state["momentum_buffer"].copy_(momentum)
        return gradient.lerp_(momentum, group["momentum"])

    def _orthogonal(self, together: Together, updates: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if together.size == 1:
            return [orthogonal(updates[0].to(together.dtype))]
        return together.cut(orthogonal(together.gather(_stacked(together, updates)))).unbind()


def _stacked(together: Together, updates: Sequence[torch.Tensor]) -> torch.Tensor:
    """Updates one after the other, and zeros in unused places."""
    stack = updates[0].new_zeros((together.size, *updates[0].shape), dtype=together.dtype)
    for place, update in zip(stack, updates, strict=False):
        place.copy_(update)
    return stack


def wide_of(weight: torch.Tensor) -> torch.dtype:
    """The dtype in which a weight is updated."""
    return torch.promote_types(weight.dtype, torch.float32)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (..., rows, columns) with singular values of about 1, between 0.7 and 1.2. The memory of `matrices` may
    be overwritten."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    del matrices  # frees the input after the first step
    x = x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=_LEAST))
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        both = torch.baddbmm(_3d(square), _3d(square), _3d(square), beta=b, alpha=c)
        x = torch.baddbmm(_3d(x), both, _3d(x), beta=a).view(x.shape)
    return x.mT if tall else x


def _3d(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:])
