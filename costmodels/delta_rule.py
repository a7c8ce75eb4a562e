"""Time of the gated delta rule on one device, from its shape.

    of a head and C steps       k k^T, q k^T         triangle        q k^T n         w S, q S        k^T n
    rows, columns, depth        2 (C, C, d)          (C, d + e, C)   (C, e, C)       2 (C, e, d)     (d, e, C)

Each is one product with as many matrices as there are samples, heads and chunks (`matmul_time`, a launch each), beside
passes over the operands and what is made of them:

    forward     those products, E(4 d + 3 e) for each step and head
    backward    those products once more, and twice as many for the gradients; E(8 d + 6 e)

Chunks follow each other only in what crosses them, which is taken for one product as well: that holds where samples and
heads alone fill the device. Monotone in every extent; c times the samples or the steps take at most c times as long. No
measured kernel stands behind it.

Source: Yang et al. 2024, "Gated delta networks", arXiv 2412.06464, section 3.3 (the chunkwise form).
"""

from dataclasses import dataclass

import numpy as np

from costmodels.compute import operator_time
from costmodels.matmul import element_bytes, matmul_time
from costmodels.units import Quantity
from hardware_profiles import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleShape:
    """What one device has: numbers, or arrays of one shape (K,). `keys` and `values` are the dims of a head, `chunk`
    the steps that are computed at a time."""

    batch: Quantity
    steps: Quantity
    heads: Quantity
    keys: Quantity
    values: Quantity
    chunk: int


def delta_rule_time(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass, element-wise."""
    return _products(shape, dtype, device) + _passed(shape, 4 * shape.keys + 3 * shape.values, dtype, device)


def delta_rule_backward_time(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the backward pass, element-wise: for the gradients of all operands, computed at once."""
    passed = _passed(shape, 8 * shape.keys + 6 * shape.values, dtype, device)
    return 3 * _products(shape, dtype, device) + passed


def _products(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    each, d, e = np.minimum(shape.chunk, shape.steps) + 0 * shape.batch, shape.keys, shape.values
    chunks = shape.batch * shape.heads * np.ceil(shape.steps / each)
    extents = ((each, each, d), (each, each, d), (each, d + e, each), (each, e, each), (each, e, d), (each, e, d))
    time: Quantity = matmul_time(d + 0 * each, e + 0 * each, each, chunks, dtype, device)
    for rows, columns, depth in extents:
        time = time + matmul_time(rows, columns + 0 * each, depth + 0 * each, chunks, dtype, device)
    return time


def _passed(shape: DeltaRuleShape, elements: Quantity, dtype: str, device: Device) -> Quantity:
    return operator_time(
        op_class="elementwise",
        flops=0.0 * shape.batch,
        bytes_moved=shape.batch * shape.steps * shape.heads * elements * element_bytes(dtype),
        dtype=dtype,
        device=device,
    )
