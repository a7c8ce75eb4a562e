"""Products without columns, as of depthwise convolutions: each channel of the result has a stencil of its own.

    tiles      m x k with k x 1, for each of g groups: a tile of 64 columns computes one
    passed     g m (k + 1) elements pass memory once, 2 g m k operations on vectors in float32      what kernels do

A framework has kernels of its own for them (PyTorch's conv_depthwise, cuDNN's), which multiply no matrices. They take
the lesser of both times; no less than the best rate of products says, which bounds stand on. Both are monotone, and c
times as much takes at most c times as long, so the lesser is and does, too. Nothing measured stands behind it.
"""

import numpy as np

from costmodels import matmul_rate, operator_time
from planner.pricing.kernel_call import Array, KernelCall


def at_most_passed(call: KernelCall, forward: Array, backward: Array) -> tuple[Array, Array]:
    """Seconds of a product and of its gradients, which take no longer than passing its tensors where it has no
    columns."""
    roles = dict(call.rule.roles)
    if roles.get("columns", (0,)) or not roles["batch"] or not call.device.multiplies("fp32"):
        return forward, backward
    once = operator_time(
        op_class="elementwise", flops=call.flops, bytes_moved=call.moved, dtype="fp32", device=call.device
    )
    least = np.maximum(once, call.flops / matmul_rate(call.multiplied, call.device))
    return np.minimum(forward, least), np.minimum(backward, call.worked * least)
