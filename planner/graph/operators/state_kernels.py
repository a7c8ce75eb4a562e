"""Kernels of mamba-ssm, causal-conv1d and flash-linear-attention for operators of the planner, used where these
packages are installed.

Each takes the arguments of its operator. Autograd can differentiate all of them. None has run here: they are for GPUs.
"""

import importlib.util
import math

import torch


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def state_space_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
    least: float,
    most: float | None,
    chunk: int,
) -> torch.Tensor:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    limits = least, math.inf if most is None else most
    made: torch.Tensor = mamba_chunk_scan_combined(
        x, step, a, b, c, chunk, D=d, dt_bias=bias, dt_softplus=softplus, dt_limit=limits
    )
    return made


def selective_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
) -> torch.Tensor:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    made: torch.Tensor = selective_scan_fn(x, step, a, b, c, D=d, z=z, delta_bias=bias, delta_softplus=softplus)
    return made


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    from causal_conv1d import causal_conv1d_fn

    made: torch.Tensor = causal_conv1d_fn(x, weight, bias, activation="silu" if silu else None)
    return made


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    normalised: bool = False,
    chunk: int | None = None,  # the kernels choose it themselves
) -> torch.Tensor:
    if decay.dim() == key.dim():
        from fla.ops.kda import chunk_kda as kernel
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel

    each = value.shape[2] // key.shape[2]
    if each > 1:  # not all versions share keys among heads
        query, key = (one.repeat_interleave(each, dim=2) for one in (query, key))
    made: torch.Tensor
    made, _ = kernel(query, key, value, decay, beta, use_qk_l2norm_in_kernel=normalised)
    return made


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, epsilon: float, silu: bool
) -> torch.Tensor:
    from fla.modules.fused_norm_gate import rms_norm_gated

    activation = "silu" if silu else "sigmoid"
    made: torch.Tensor = rms_norm_gated(x, gate, weight, None, activation=activation, eps=epsilon)
    return made
