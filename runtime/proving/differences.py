"""Differences between the ranks' results and the unsharded model's, and their tolerances.

    gradient of a parameter      |found - wanted| / |wanted|                 norms over all its elements
    change of a parameter        |found - wanted| / |wanted - before|
    buffer                       |found - wanted| / |wanted|

The gradient of a parameter may be a tiny part of all gradients. It is then compared relative to a share of their norm,
because a value that is zero up to rounding has no relative error. In 16 bits rounding shows in every single parameter,
so only all gradients together are compared, and changes of weights are not: these are proved in float64, or in fp32
where an operator lacks float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hardware_profiles import DTYPES
from planner.plan.shrinking.shrink import EXACT

SINGLY = (EXACT, "fp32")
"""Precisions in which parameters are compared one by one."""

_FLOOR = 1e-5
"""Share of the norm of all gradients below which a gradient is not compared relative to its own norm."""

GRADIENTS, CHANGES = 1e-3, 1e-2
"""Tolerances in float64 and fp32. Sums in another order differ by 1e-10 or less, by 1e-5 where a model computes in fp32
partly or entirely; a missing or doubled term differs by 0.1 or more."""
TOGETHER = 0.1
"""Tolerance of all gradients together in 16 bits, whose mantissa has 8 (bf16) or 11 bits."""
TOGETHER_IN_FP8 = 0.3
"""The same with fp8 products, whose operands have 3 or 4 bits: a different rounding in 16 bits may become the next
number there. A missing or doubled term is half of a sum or all of it; scales are proved in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What was compared in a precision: the largest relative differences of losses, gradients, weight changes and
    buffers, and the parameter that has it; `parameters` and `steps` are the numbers compared, `fp8` whether layers are
    in fp8. None: not compared."""

    precision: str
    steps: int
    parameters: int
    loss: float
    gradient: float | None
    worst_gradient: str
    change: float | None
    worst_change: str
    buffer: float | None
    fp8: bool = False

    @property
    def tolerances(self) -> Mapping[str, float]:
        """The tolerance of each."""
        loss = DTYPES["fp32" if self.precision == EXACT else self.precision].tolerance
        assert loss is not None, "plans are trained in it"
        return {
            "loss": loss,
            "gradient": GRADIENTS if self.precision in SINGLY else TOGETHER_IN_FP8 if self.fp8 else TOGETHER,
            "change": CHANGES,
            "buffer": CHANGES,
        }

    @property
    def failures(self) -> tuple[str, ...]:
        """Those that are larger than their tolerance, or NaN."""
        found = {name: getattr(self, name) for name in self.tolerances}
        return tuple(name for name, one in found.items() if one is not None and not one <= self.tolerances[name])

    @property
    def agrees(self) -> bool:
        return not self.failures


def worst(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], floor: float = 0.0
) -> tuple[float, str]:
    """The largest relative difference, and the name of its tensor. Norms of `wanted` count as at least `floor`. A
    missing tensor, or one of another shape, is infinitely different."""
    differences = [(_relative(found.get(name), tensor, floor), name) for name, tensor in wanted.items()]
    return max(differences, default=(0.0, ""), key=lambda one: (one[0] != one[0], one[0]))


def together(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The relative difference of all tensors as one vector; infinite where one is missing, or all are zero."""
    if not wanted.keys() <= found.keys() or not is_something(wanted):
        return float("inf")
    error = sum(_norm(found[name].double() - tensor.double()) ** 2 for name, tensor in wanted.items())
    return float(error**0.5 / max(whole_norm(wanted), 1e-30))


def whole_norm(tensors: Mapping[str, torch.Tensor]) -> float:
    """The norm of all tensors as one vector."""
    return float(sum(_norm(tensor.double()) ** 2 for tensor in tensors.values()) ** 0.5)


def is_something(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether there is anything to compare: finite numbers that are not all zero."""
    return 0 < whole_norm(tensors) < float("inf")


def floor_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """The gradient norm below which differences are not relative."""
    return _FLOOR * whole_norm(gradients)


def changes(after: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The change of each tensor."""
    return {name: after[name].double() - tensor.double() for name, tensor in before.items() if name in after}


def rounding(weights: Mapping[str, torch.Tensor]) -> float:
    """The largest norm by which rounding alone changes a weight in fp32."""
    return 1e-6 * max((_norm(weight.double()) for weight in weights.values()), default=0.0)


def _relative(found: torch.Tensor | None, wanted: torch.Tensor, floor: float) -> float:
    if found is None or found.shape != wanted.shape:
        return float("inf")
    return _norm(found.double() - wanted.double()) / max(_norm(wanted.double()), floor, 1e-30)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
