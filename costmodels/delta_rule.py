"""Time of the gated delta rule on one device, from its shape.

By the kernels of flash-linear-attention (chunk_gated_delta_rule; chunk_kda where each channel of the keys has a decay).
Some compute all chunks of C steps side by side, and pass their operands through memory in between; others walk along a
sequence, a block of columns of a state each, chunk after chunk:

    forward     |q| |k| -> A = (I + tril(b k k^T))^-1 -> w, u  ==> states, n  -> o
    backward    w, u  ==> states, n  -> dv  ==> dstates, dv  -> dq, dk, dw -> dk, dv -> dq |q|, dk |k|
                ->  side by side: each of all chunks        ==>  walks

    side by side    E (elements) / bandwidth + F / rate
    a walk          the longer of that and  N t(d) max(1, B H (e / 32) / units)

for each step and head, with elements and operations counted in the kernels (`_SIDE_BY_SIDE`, `_WALKS`): a block reads
its tiles, multiplies them and writes them before another takes its place, so that times add up. A walk takes t of a
chunk, however few walk: 1.2 us forward, 3.6 backward with keys of 128, in proportion to the keys, whose rows a block
has one tile after the other. A device has a block of 32 columns for each of its units. Steps that the chunk does not
divide are rounded up. `again`: the backward pass runs the forward kernels before its own.

On an H200 (fla 0.5.1, heads of 128; benchmark/benchmark_results_H200.txt of QwenLM/FlashQLA@c18a486), with 1 to 8
sequences of 1,024 to 32,768 steps, 18 times forward are 0 to 18% too long with 8 to 64 heads; backward 13% off in the
root mean square of 19: within 12% with 16 heads or more, 26% too long with 4 in one sequence, 28% too short with 4 in 8
(`tests/validation/test_delta_rule_kernels.py`). With a decay for each channel there are ratios of both alone:
1.65 here with 96 heads and 8,192 steps, 1.51 on an H20 and 1.82 on a GB200 (MoonshotAI/FlashKDA@1ce47ea). Kernels that
are quicker (FlashQLA, FlashKDA) are left out.

Where the rule is `composed` of a framework's operators, its products are these, with as many matrices as there are
samples, heads and chunks, three times as many backward, beside what passes over memory:

    of a head and C steps       k k^T, q k^T         triangle        q k^T n         w S, q S        k^T n
    rows, columns, depth        2 (C, C, d)          (C, d + e, C)   (C, e, C)       2 (C, e, d)     (d, e, C)

N chunks take the operators of `_LAUNCHED`, those of a chunk and those of all, and their passes the elements of
`_COMPOSED`, counted in `planner.graph.delta_rule` (`tests/unit/pricing/test_delta_rule.py` counts again). On an H200
(4,096 steps, 32 heads of 128) they took 10.3 ms forward, 11 us for each of 935.

Monotone in every extent; c times the samples or the steps take at most c times as long.

Sources: Yang et al. 2024, "Gated delta networks", arXiv 2412.06464, section 3.3 (the chunkwise form); Kimi Team 2025,
"Kimi Linear", arXiv 2510.26692, section 3; fla-org/flash-linear-attention@bc3b101d, fla/ops/gated_delta_rule, kda and
common (chunk_delta_h.py, chunk_o.py), whose tensors and products are counted here.
"""

from dataclasses import dataclass

import numpy as np

from costmodels.chunked import Chunked, launched_by_chunks
from costmodels.compute import operator_time
from costmodels.matmul import element_bytes, matmul_rate, matmul_time
from costmodels.units import Quantity
from hardware_profiles import Device

_LAUNCHED = {False: ((14, 39), (44, 90)), True: ((31, 19), (129, 25))}
"""Operators of a framework for each chunk and for all of them, forward, and backward with what is computed again; with
a decay for each channel, and without."""

_COMPOSED = {
    False: ((32, 13, 12, 5, 0), (117, 23, 42, 19, 0)),
    True: ((42, 13, 4, 5, 13), (197, 29, 13, 22, 56)),
}
"""Elements that these read and write for a step of a head but for products, in units of d, e, C, d e / C and C d."""


_WIDE = 4
"""Bytes of an element of float32."""
_COLUMNS = 32
"""Columns of a state that a block walks with."""
_KEYS = 128
"""Keys of a head for which the seconds of a chunk were found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What kernels take for a step of a head: elements that pass in units of d, e, C and d e / C, those of them in
    float32 in units of d and C, and operations in units of C d, C e, d e and C C."""

    elements: tuple[float, float, float, float]
    wide: tuple[float, float] = (0.0, 0.0)
    operations: tuple[float, float, float, float]


_SIDE_BY_SIDE = {
    False: (
        _Work(elements=(9, 4, 2, 1), operations=(6, 4, 2, 0)),
        _Work(elements=(22, 10, 2, 2), operations=(18, 10, 6, 4)),
    ),
    True: (
        _Work(elements=(12, 4, 4, 1), wide=(6, 0), operations=(6, 4, 2, 0)),
        _Work(elements=(17, 10, 3, 2), wide=(16, 4), operations=(14, 10, 6, 4)),
    ),
}
"""Forward and backward, with a decay for each channel and without; queries and keys are brought to length 1 there."""
_STATES, _GRADIENTS = (
    (_Work(elements=(2, 2, 0, 1), operations=(0, 0, 4, 0)), 1.2e-6),
    (_Work(elements=(3, 3, 0, 1), operations=(0, 0, 6, 0)), 3.6e-6),
)
_WALKS = ((_STATES,), (_STATES, _GRADIENTS))
"""Walks of the forward and of the backward pass, with the seconds of a chunk."""
_KERNELS = (8, 14)
"""Kernels of either pass, which are launched without a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleShape(Chunked):
    """What one device has: numbers, or arrays of one shape (K,). `keys` and `values` are the dims of a head, `chunk`
    the steps that are computed at a time; `channels`: whether each channel of the keys has a decay. `composed`: whether
    a framework computes it operator by operator; `again`: whether its backward pass runs the forward kernels beside its
    own."""

    heads: Quantity
    keys: Quantity
    values: Quantity
    channels: bool = False
    composed: bool = False
    again: bool = False

    @property
    def launched(self) -> tuple[Quantity, Quantity]:
        """Operators that it is composed of, forward and backward; 0 where kernels compute it."""
        return launched_by_chunks(self.chunks, self.composed, _LAUNCHED[self.channels])


def delta_rule_time(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass, element-wise."""
    if shape.composed:
        return _products(shape, dtype, device) + _passed(shape, _composed(shape, 0), dtype, device)
    return _kernels(shape, 0, dtype, device)


def delta_rule_backward_time(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the backward pass, element-wise: for the gradients of all operands, computed at once."""
    if shape.composed:
        return 3 * _products(shape, dtype, device) + _passed(shape, _composed(shape, 1), dtype, device)
    backward = _kernels(shape, 1, dtype, device)
    return backward + delta_rule_time(shape, dtype, device) if shape.again else backward


def _kernels(shape: DeltaRuleShape, which: int, dtype: str, device: Device) -> Quantity:
    """Seconds of the kernels of the forward pass, 0, or the backward pass, 1."""
    time: Quantity = _busy(shape, _SIDE_BY_SIDE[shape.channels][which], dtype, device)
    blocks = shape.batch * shape.heads * shape.values / _COLUMNS
    for work, of_chunk in _WALKS[which]:
        walk = shape.chunks * of_chunk * shape.keys / _KEYS * np.maximum(1.0, blocks / device.compute_units)
        time = time + np.maximum(walk, _busy(shape, work, dtype, device))
    return time + device.launch_latency * _KERNELS[which]


def _busy(shape: DeltaRuleShape, work: _Work, dtype: str, device: Device) -> Quantity:
    """Seconds of what passes and is multiplied, one after the other."""
    d, e, each = shape.keys, shape.values, shape.each
    elements, wide, operations = (
        sum(count * unit for count, unit in zip(counts, units, strict=True))
        for counts, units in (
            (work.elements, (d, e, each, d * e / each)),
            (work.wide, (d, each)),
            (work.operations, (each * d, each * e, d * e, each * each)),
        )
    )
    nbytes = elements * element_bytes(dtype) + wide * max(_WIDE, element_bytes(dtype))
    bandwidth = device.memory_bandwidth * device.efficiency("elementwise").bandwidth
    steps = shape.batch * shape.heads * shape.chunks * each
    time: Quantity = steps * (nbytes / bandwidth + operations / matmul_rate(dtype, device))
    return time


def _composed(shape: DeltaRuleShape, which: int) -> Quantity:
    """Elements that pass for a step of a head in the forward pass, 0, or the backward pass, 1."""
    d, e, each = shape.keys, shape.values, shape.each
    terms = zip(_COMPOSED[shape.channels][which], (d, e, each, d * e / each, each * d), strict=True)
    found: Quantity = sum(count * term for count, term in terms)
    return found


def _products(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    each, d, e = shape.each, shape.keys, shape.values
    chunks = shape.batch * shape.heads * shape.chunks
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
