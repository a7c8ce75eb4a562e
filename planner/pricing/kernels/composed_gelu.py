"""GELU by its formula with tanh, 0.5 x (1 + tanh(c (x + 0.044715 x^3))), operator by operator (`gelu_new` of
transformers: `NewGELUActivation`).

Elements read or written for each element:

    forward    half of x 2, cube 2, scaled 2, sum 3, scaled 2, tanh 2, plus one 2, product 3                      18
    backward   product, of both factors 6; tanh 3; scaled 2; scaled 2; cube, which computes 3 x^2 again, 7; half of
               x 2; sums of three gradients of x 6                                                                28
    kept       half of x, tanh, and one plus it, beside x                                                          3
"""

import numpy as np

from costmodels import element_bytes
from planner.pricing.kernels.call import Array, KernelCall, passed

GELU = "aten.gelu.default"
FORWARD, BACKWARD, KEPT = 18.0, 28.0, 3.0
"""Elements."""

GELU_KERNELS = 8
"""Operators that a framework launches for it in the forward pass."""


def is_composed_gelu(call: KernelCall) -> bool:
    """Whether an operator is a GELU that a model computes by a chain of operators."""
    return call.software.composed_gelu and call.rule.op == GELU


def composed_gelu_seconds(call: KernelCall) -> tuple[Array, Array]:
    """Seconds of the chain, forward and backward, (K,) each."""
    moved = element_bytes(call.dtype) * _elements(call)
    forward = np.asarray(passed(call, FORWARD * moved))
    return forward, np.asarray(passed(call, BACKWARD * moved)) if call.graded else np.zeros(len(call.extents))


def composed_gelu_bytes(call: KernelCall) -> Array:
    """Bytes that it keeps for its backward pass beside its operand, (K,)."""
    kept = KEPT if is_composed_gelu(call) and call.graded else 0.0
    return np.asarray(kept * element_bytes(call.dtype) * _elements(call)) if kept else np.zeros(len(call.extents))


def _elements(call: KernelCall) -> Array:
    return call.extent(tuple(factor for indexed in call.rule.operands[0] for factor in indexed))
