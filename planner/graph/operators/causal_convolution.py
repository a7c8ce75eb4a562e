"""A short causal convolution along the steps of each channel, followed by SiLU.

    y_t = silu(sum_k w_k x_{t-K+1+k} + bias)

It is one operator, `planner::causal_convolution`, like the kernel of causal-conv1d that state-space models call: one
pass over its operand. Only the operand is kept for the backward pass, which computes the rest once more.

    B batch, D channels, S steps, K taps of the stencil
"""

import torch
import torch.nn.functional as F

from planner.graph.operators import state_kernels
from planner.graph.operators.recomputed import Kernel, recomputed


def composed(x_BDS: torch.Tensor, weight_DK: torch.Tensor, bias_D: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """B D S, in the dtype of the first operand; computed in that of the weight."""
    before, channels = weight_DK.shape[1] - 1, weight_DK.shape[0]
    padded = F.pad(x_BDS.to(weight_DK.dtype), (before, 0))
    made = F.conv1d(padded, weight_DK.unsqueeze(1), bias_D, groups=channels)
    return (F.silu(made) if silu else made).to(x_BDS.dtype)


causal_convolution = recomputed(
    "planner::causal_convolution",
    composed,
    kernel=Kernel(package="causal_conv1d", call=state_kernels.causal_convolution),
)
