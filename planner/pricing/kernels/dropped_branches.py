"""Dropout of a branch where it joins the residual stream: hidden dropout of GPT and BERT.

Bytes beyond those of the sum itself, with E elements of w bytes:

                fused                                      a kernel of its own
    forward     the mask is written             E          the branch is read and written, and the mask     (2 w + 1) E
    backward    the mask is read                E          the same                                                   E
    kept        the mask                        E          the same                                                   E

Fused is Megatron's bias_dropout_add (megatron/core/fusions/fused_bias_dropout.py, compiled by jit_fuser). A mask has a
byte for each element (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1: s b h for each of both dropouts of a
layer).

Backward, frameworks add up two gradients of the stream, 3 w E, and the gradient of what was dropped is read and written
with the mask, (2 w + 1) E. A sum is priced as 5 w E, whether its branch is dropped or not, so that the mask is what
is left. Random numbers are drawn while memory is waited for.

Every sum of two tensors joins a branch, in the decoders that rows are built as. With learned positions that of tokens
and positions is one of them, which GPT drops, too.
"""

import numpy as np

from costmodels import element_bytes
from planner.pricing.kernels.call import Array, KernelCall

_SUM = "aten.add.Tensor"
_MASK = 1.0
"""Bytes of an element of a mask."""


def drops_branch(call: KernelCall) -> bool:
    """Whether an operator adds what software drops, in training."""
    adds = call.rule.op == _SUM and len(call.rule.operands) > 1 and bool(call.graded)
    return adds and call.software.hidden_dropout != "none"


def dropped_moved(call: KernelCall) -> tuple[Array, Array]:
    """Bytes that dropout moves beside the sum, forward and backward, (K,) each."""
    mask = dropped_bytes(call)
    return mask * (1 + 2 * element_bytes(call.dtype) / _MASK) if dropped_launches(call) else mask, mask


def dropped_launches(call: KernelCall) -> int:
    """Kernels that it has of its own in each pass."""
    return int(drops_branch(call) and call.software.hidden_dropout == "apart")


def dropped_bytes(call: KernelCall) -> Array:
    """Bytes of the mask, which is kept for the backward pass, (K,)."""
    if not drops_branch(call):
        return np.zeros(len(call.extents))
    return _MASK * call.extent(tuple(factor for indexed in call.rule.results[0] for factor in indexed))
