"""The backward pass of FlashAttention-2 that adds up gradients of queries in one order (`deterministic=True`).

A thread block computes one head with 128 keys after the other, and adds to the gradient of all queries, in fp32. To add
in one order, only so many blocks of a head run side by side that each has a sum of its own, which are added up at last:

    splits = ceil(S / (batch heads))            S compute units, one thread block each (144 KB of shared memory)
    n      = ceil(keys / 128)                   pieces of keys of a head; 64 keys with heads of more than 128 elements
    rounds = ceil(splits batch heads / S)       the last one of few blocks: 160 of 32 heads on 152 units are two rounds
    longer = rounds ceil(n / splits) S / (batch heads n)

`longer` is over units that are never idle, which is what n batch heads blocks come close to that may add in any order.
Sums in fp32 that are more than one are cleared, and read again: 8 bytes of each of their elements.

(csrc/flash_attn/src/flash_bwd_launch_template.h of flash-attn 2.4.1 and later, run_flash_bwd_seqk_parallel: gridDimx;
flash_bwd_kernel.h, compute_dq_dk_dv_seqk_parallel: `n_block += gridDim.x`; flash_api.cpp: dq_accum is `torch::zeros`.
No time of it is published that we know; its README calls it slightly slower.) FlashAttention-3,
which waits for its turn instead of keeping several sums, takes 1.21 times as long (its pull request 1893, 16 heads of
128 with 8,192 keys on H100: 474 of 575 TFLOP/s), and 1.6 before September 2025 (Qiang et al. 2026, arXiv 2601.21824).
Kernels of cuDNN that add in one order are not counted: nobody says how long they take.
"""

import numpy as np

from costmodels import AttentionShape
from planner.pricing.kernels.call import Array, KernelCall, passed

_NARROW = 128
"""Elements of the widest heads whose pieces have 128 keys."""

_SUMMED = 8.0
"""Bytes of an element in fp32 that is cleared, and read."""


def ordered_seconds(seconds: Array, shape: AttentionShape, call: KernelCall) -> Array:
    """Seconds of the backward pass in one order, (K,), where it takes `seconds` in any."""
    if not call.software.ordered:
        return seconds
    units, several = call.device.compute_units, np.asarray(shape.batch * shape.heads, dtype=np.float64)
    pieces = np.ceil(np.asarray(shape.keys) / np.where(np.asarray(shape.head_dim) > _NARROW, _NARROW / 2, _NARROW))
    splits = np.ceil(units / several)
    rounds = np.ceil(splits * several / units)
    longer = rounds * np.ceil(pieces / splits) * units / (several * pieces)
    sums = (splits - 1) * several * shape.queries * shape.head_dim
    return np.asarray(seconds * np.maximum(1.0, longer) + np.where(sums > 0, passed(call, _SUMMED * sums), 0.0))
