"""Time of the scans of state-space models on one device, from their shapes.

With one decay for each head (Mamba-2): chunks of C steps, kernels one after the other. R = H / G heads share a group.
Each kernel is one product with one matrix per sample, head (or group) and chunk:

    of a chunk      c b^T of a group       pairs x        b^T x          c S
    m, n, k         (C, C, n)              (C, p, C)      (n, p, C)      (C, p, n)

    forward     one of each, p + 2 for each step and head, and states in float32 that are written and read twice
    backward    c b^T once more and two of its kind; pairs x three times; b^T x twice and c S three times, or their
                gradients; 3 p + 4, and states and their gradients as often again each

With a decay for each channel and element of its state (Mamba), one kernel passes over its operands and computes 9 n
operations in float32 for each step and channel, none of them a product; backward three times as many. Elements that
pass:

    forward     4 elements for each step and channel        backward    8

Monotone in every extent; c times the samples, steps or heads take at most c times as long. On an H800 the two products
with all steps of a chunk and with the states before, of 8 samples of 4,096 steps, 80 heads of 64, n = 128 and C = 256,
took 0.65 ms as one kernel (tile-ai/tilelang benchmark/mamba2/README.md@be9c08f6). Here they take 1.11 ms; this formula
assumes the kernels in Triton, which are the slower ones of that comparison. No measurement supports the formula of the
other scan.

Composed of a framework's operators, both scans pass over memory and launch operators chunk by chunk: `_LAUNCHED` has
the operators for each chunk and for all chunks, `_COMPOSED` the elements, counted in `planner.graph`
(`tests/unit/pricing/test_state_space.py` counts again).

Sources: Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060, section 6, and the kernels of state-spaces/mamba,
ops/triton/ssd_*.py; Gu and Dao 2023, "Mamba", arXiv 2312.00752, section 3.3.
"""

from dataclasses import dataclass

import numpy as np

from costmodels.kernels.chunked import Chunked, launched_by_chunks
from costmodels.kernels.compute import operator_time
from costmodels.kernels.matmul import element_bytes, matmul_time
from costmodels.units import Quantity
from hardware_profiles import Device

_STATES = 16.0
"""Bytes that pass through memory for an element of a state: in float32, written and read twice."""
_EACH = 9.0
"""FLOP of a step for an element of a state."""
_TOGETHER = 32
"""Steps of the second scan that a framework's operators compute at a time."""

Passes = tuple[float, ...]
_HEADS_LAUNCHED, _CHANNELS_LAUNCHED = ((27, 3), (110, 0)), ((40, 3), (187, 2))
"""Operators that a framework launches (per chunk, for all chunks), forward, then backward with its recomputation; for
the scan by heads and the scan by channels."""
_HEADS_COMPOSED: tuple[Passes, Passes] = ((17, 7, 7, 6, 0), (60, 29, 18, 18, 42))
"""Elements that these operators read and write for a step of a head, products excluded, in units of p, C, C / R, n p /
C and 1; forward, then backward."""
_CHANNELS_COMPOSED: tuple[Passes, Passes] = ((23, 66), (83, 330))
"""The same for a step of a channel, in units of 1 and n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceShape(Chunked):
    """Extents of the scan with a decay per head on one device: numbers, or arrays of one shape (K,).

    Attributes:
        heads: H, number of heads.
        groups: G, number of groups.
        width: p, columns of a head.
        state: n, rows of a head's state.
        composed: whether a framework computes the scan operator by operator.
        again: whether the backward pass first runs the forward kernels; has no effect where `composed`.
    """

    heads: Quantity
    groups: Quantity
    width: Quantity
    state: Quantity
    composed: bool = False
    again: bool = False

    @property
    def launched(self) -> tuple[Quantity, Quantity]:
        """Operators that a framework launches, forward and backward; 0 where kernels compute the scan."""
        return launched_by_chunks(self.chunks, self.composed, _HEADS_LAUNCHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScanShape:
    """Extents of the scan with a decay per channel on one device: numbers, or arrays of one shape (K,).

    Attributes:
        batch: samples.
        channels: channels of a sample.
        steps: steps of a sample.
        state: n, elements of the state of a channel.
        composed: whether a framework computes the scan operator by operator.
        again: whether the backward pass first runs the forward kernel; has no effect where `composed`.
    """

    batch: Quantity
    channels: Quantity
    steps: Quantity
    state: Quantity
    composed: bool = False
    again: bool = False

    @property
    def launched(self) -> tuple[Quantity, Quantity]:
        """Operators that a framework launches, forward and backward; 0 where a kernel computes the scan."""
        return launched_by_chunks(np.ceil(self.steps / _TOGETHER), self.composed, _CHANNELS_LAUNCHED)


def state_space_time(shape: StateSpaceShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass, element-wise.

    Raises: as `costmodels.matmul_time` and `costmodels.operator_time`.
    """
    return _by_heads(shape, dtype, device, (1, 1, 1, 1), (shape.width + 2, 1.0, _HEADS_COMPOSED[0]))


def state_space_backward_time(shape: StateSpaceShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the backward pass, element-wise: the gradients of all operands, computed at once.

    Raises: as `state_space_time`.
    """
    backward = _by_heads(shape, dtype, device, (3, 3, 2, 3), (3 * shape.width + 4, 2.0, _HEADS_COMPOSED[1]))
    return backward + _once_more(shape, state_space_time(shape, dtype, device))


def selective_scan_time(shape: SelectiveScanShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass, element-wise.

    Raises: as `costmodels.operator_time`.
    """
    return _by_channels(shape, dtype, device, (1.0, 4.0, _CHANNELS_COMPOSED[0]))


def selective_scan_backward_time(shape: SelectiveScanShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the backward pass, element-wise: the gradients of all operands, computed at once.

    Raises: as `selective_scan_time`.
    """
    backward = _by_channels(shape, dtype, device, (3.0, 8.0, _CHANNELS_COMPOSED[1]))
    return backward + _once_more(shape, selective_scan_time(shape, dtype, device))


def _once_more(shape: StateSpaceShape | SelectiveScanShape, forward: Quantity) -> Quantity:
    return forward if shape.again and not shape.composed else 0.0 * forward


def _by_heads(
    shape: StateSpaceShape,
    dtype: str,
    device: Device,
    kernels: tuple[int, int, int, int],
    passes: tuple[Quantity, float, Passes],
) -> Quantity:
    """Seconds of the products and of memory traffic.

    `kernels` counts each of the four products. `passes` has the elements for each step of a head, how often states
    pass, and the elements that a framework moves instead of both.
    """
    each, wide, state = shape.each, shape.width + 0 * shape.each, shape.state + 0 * shape.each
    heads, groups = (shape.batch * shape.chunks * count for count in (shape.heads, shape.groups))
    extents = (
        (each, each, state, groups),
        (each, wide, each, heads),
        (state, wide, each, heads),
        (each, wide, state, heads),
    )
    time: Quantity = 0.0
    for count, product in zip(kernels, extents, strict=True):
        time = time + count * matmul_time(*product, dtype, device)
    elements, states, composed = passes
    moved = heads * each * elements * element_bytes(dtype) + states * _STATES * heads * wide * state
    if shape.composed:
        units = (wide, each, each * shape.groups / shape.heads, state * wide / each, 1.0)
        moved = (
            heads * each * element_bytes(dtype) * sum(count * unit for count, unit in zip(composed, units, strict=True))
        )
    return time + _passed(moved, dtype, device)


def _by_channels(
    shape: SelectiveScanShape, dtype: str, device: Device, passes: tuple[float, float, Passes]
) -> Quantity:
    """The longer of computation and memory traffic, in seconds."""
    points = shape.batch * shape.channels * shape.steps
    times, elements, composed = passes
    if shape.composed:
        each, of_state = composed
        return _passed(points * (each + of_state * shape.state) * element_bytes(dtype), dtype, device)
    computed = operator_time(
        op_class="elementwise",
        flops=times * _EACH * points * shape.state,
        bytes_moved=0.0 * points,
        dtype="fp32",
        device=device,
    )
    return np.maximum(computed, _passed(elements * points * element_bytes(dtype), dtype, device))


def _passed(nbytes: Quantity, dtype: str, device: Device) -> Quantity:
    return operator_time(op_class="elementwise", flops=0.0 * nbytes, bytes_moved=nbytes, dtype=dtype, device=device)
