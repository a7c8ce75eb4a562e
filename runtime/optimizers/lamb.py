"""LAMB: Adam steps, each scaled to the norm of the weight (You et al. 2020, arXiv 1904.00962, algorithm 2).

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g g           of each element
    r = m' / (sqrt(v') + eps)      m', v' corrected for their start at zero
    x = x - rate |x| / |r + decay x|  (r + decay x)                  |.| of the whole weight; where either is 0 the
                                                                     quotient is 1
The scaling function of the paper is the identity. For a sharded weight, `total` adds up the sums of squares of its
pieces, for all weights at once. The direction overwrites the gradient, so it needs no memory. A 16-bit weight may have
a float32 gradient (`Tensor.grad_dtype`); arithmetic is then float32, and moments are rounded where they are narrower.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.optimizers.narrow import kept_dtype, widened

Total = Callable[[torch.Tensor], torch.Tensor]
"""From the sums of squares of the pieces (one row per weight, two columns) to those of the whole weights."""


class Lamb(torch.optim.Optimizer):
    """LAMB over these weights."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor] | Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: str = "fp32",
        total: Total = lambda squares: squares,
    ) -> None:
        super().__init__(weights, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._total, self._kept = total, moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Update every weight that has a gradient; those are the same on all ranks that share one."""
        assert closure is None
        changed = [(w, group) for group in self.param_groups for w in group["params"] if w.grad is not None]
        if not changed:
            return
        squares = torch.stack([self._direct(weight, group) for weight, group in changed])
        lengths = self._total(squares).sqrt()
        known = (lengths > 0).all(dim=1)
        ratios = torch.where(known, lengths[:, 0] / torch.where(known, lengths[:, 1], 1.0), 1.0)
        for (weight, group), ratio in zip(changed, ratios, strict=True):
            updated = weight.to(weight.grad.dtype).sub(weight.grad.mul_(group["lr"] * ratio))
            weight.copy_(updated)

    def _direct(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Write the direction r + decay x into the gradient; returns the sums of squares of weight and direction,
        (2,)."""
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        if not state:
            state["step"] = 0
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros_like(gradient, dtype=kept_dtype(self._kept, gradient.dtype))
        state["step"] += 1
        first, second = group["betas"]
        mean, square = widened(state["exp_avg"]), widened(state["exp_avg_sq"])
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.div(1 - second ** state["step"]).sqrt_().add_(group["eps"])
        gradient.copy_(mean).div_(1 - first ** state["step"]).div_(root)
        for kind, made in (("exp_avg", mean), ("exp_avg_sq", square)):
            if made is not state[kind]:
                state[kind].copy_(made)
        del mean, square, made
        wide = weight.to(gradient.dtype)
        gradient.add_(wide, alpha=group["weight_decay"])
        return torch.stack([wide.square().sum(), gradient.square().sum()])
