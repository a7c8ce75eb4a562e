"""RMS norms without a fused kernel: chains of PyTorch operators, in fp32 if tensors have 16 bits.

    x = x.float(); x = x * rsqrt(x.pow(2).mean(-1) + eps); return x.to(16 bits) * weight

(llama/model.py of Meta, `LlamaRMSNorm` of transformers). Bytes per element, with each operator reading and writing
memory:

    forward    float 6, pow 8, mean 4, product 8, cast 6, product with the weight 4                                   36
    backward   product with the weight: of both operands 4 and 6, summed 2; cast 6; product: 8, 12, summed 4; mean 4;
               pow, which computes 2 x again, 28; sum of both gradients of x 12; cast 6                               92
    kept       the fp32 copy; the norm in 16 bits is counted as the operand that a fused kernel keeps                  4

Of 22 pairs of runs with and without a fused kernel for norms (Hagemann et al. 2023, arXiv 2311.05610), those without
take 90 to 98 ps longer per element, forward and backward, on A100; this count gives 77.
"""

import numpy as np

from costmodels import element_bytes
from planner.pricing.kernels.call import Array, KernelCall, passed

RMS_NORM = "aten.rms_norm.default"
FORWARD, BACKWARD, KEPT = 36.0, 92.0, 4.0
"""Bytes of an element."""

KERNELS = 6
"""Operators that a framework launches for it in the forward pass."""

_SHORT = 2  # bytes of an element that has to be cast


def is_composed(call: KernelCall) -> bool:
    """Whether an operator is a norm that software computes by a chain of operators."""
    return call.software.composed_norms and call.rule.op == RMS_NORM and element_bytes(call.dtype) == _SHORT


def composed_seconds(call: KernelCall) -> tuple[Array, Array]:
    """Seconds of the chain, forward and backward, (K,) each."""
    elements = _elements(call)
    forward = passed(call, FORWARD * elements)
    return forward, passed(call, BACKWARD * elements) if call.graded else np.zeros(len(elements))


def composed_bytes(call: KernelCall) -> Array:
    """Bytes that it keeps for its backward pass in addition to those of a fused norm, (K,)."""
    return KEPT * _elements(call) if is_composed(call) and call.graded else np.zeros(len(call.extents))


def _elements(call: KernelCall) -> Array:
    return call.extent(tuple(factor for indexed in call.rule.operands[0] for factor in indexed))
