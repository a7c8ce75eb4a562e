"""Products without columns, as in depthwise convolutions: each channel of the result has its own stencil.

    tiles      m x k with k x 1, for each of g groups: a tile of 64 columns computes one
    passed     g m (k + 1) elements pass memory once, 2 g m k operations on vectors in float32      what kernels do

A framework has special kernels for them (PyTorch's conv_depthwise, cuDNN's), which multiply no matrices. They take the
lesser of both times, but at least the time by the best rate of matrix products, on which bounds rely. Both times are
monotone, and c times the work takes at most c times as long; so the same holds for the lesser one. This is not
measured.
"""

import numpy as np

from costmodels import matmul_rate, operator_time
from planner.pricing.kernels.call import Array, KernelCall


def at_most_passed(call: KernelCall, forward: Array, backward: Array) -> tuple[Array, Array]:
    """Seconds of a product and of its gradients. If the product has no columns, it takes at most the time in which its
    tensors pass memory."""
    roles = dict(call.rule.roles)
    if roles.get("columns", (0,)) or not roles["batch"] or not call.device.multiplies("fp32"):
        return forward, backward
    once = operator_time(
        op_class="elementwise", flops=call.flops, bytes_moved=call.moved, dtype="fp32", device=call.device
    )
    least = np.maximum(once, call.flops / matmul_rate(call.multiplied, call.device))
    return np.minimum(forward, least), np.minimum(backward, call.worked * least)
