"""Time of the gated delta rule on one device, from its shape.

The kernels are those of flash-linear-attention (chunk_gated_delta_rule; chunk_kda if each channel of the keys has its
own decay). There are two kinds. Parallel kernels compute all chunks of C steps at once and pass their operands through
memory. Sequential kernels (walks) go along a sequence chunk after chunk, with one block for some columns of a state:

    forward     |q| |k| -> A = (I + tril(b k k^T))^-1 -> w, u  ==> states, n  -> o
    backward    w, u  ==> states, n  -> dv  ==> dstates, dv  -> dq, dk, dw -> dk, dv -> dq |q|, dk |k|
                ->  parallel: all chunks at once            ==>  walks

    parallel        E (elements) / bandwidth + F / rate
    a walk          the longer of that and  N t(d) max(1, B H (e / 32) / units)

The formulas hold for each step and head; elements and operations are counted in the kernels (`_SIDE_BY_SIDE`,
`_WALKS`). A block reads its tiles, multiplies them and writes them before the next block takes its place, so the times
add up. A walk takes t per chunk, however few blocks walk: 1.2 us forward and 3.6 us backward with keys of 128. t is
proportional to the keys, because a block takes their rows one tile after the other. A block holds 32 columns, and each
compute unit runs one block. If the chunk does not divide the steps, they are rounded up. With `again` the backward pass
first runs the forward kernels.

On an H200 (fla 0.5.1, heads of 128; benchmark/benchmark_results_H200.txt of QwenLM/FlashQLA@c18a486), with 1 to 8
sequences of 1,024 to 32,768 steps: 18 forward times are 0 to 18% too long with 8 to 64 heads. 19 backward times are off
by 13% in the root mean square: within 12% with 16 heads or more, 26% too long with 4 heads in one sequence, 28% too
short with 4 heads in 8 (`tests/validation/test_delta_rule_kernels.py`). With a decay for each channel only ratios of
the two kernels are known: 1.65 here with 96 heads and 8,192 steps, 1.51 on an H20 and 1.82 on a GB200
(MoonshotAI/FlashKDA@1ce47ea). Faster kernels (FlashQLA, FlashKDA) are not modelled.

If the rule is `composed` of a framework's operators, these are its products, each with one matrix per sample, head and
chunk, and three times as many backward. Memory traffic comes on top:

    of a head and C steps       k k^T, q k^T         triangle        q k^T n         w S, q S        k^T n
    rows, columns, depth        2 (C, C, d)          (C, d + e, C)   (C, e, C)       2 (C, e, d)     (d, e, C)

N chunks launch the operators of `_LAUNCHED` (those per chunk and those for all chunks). Their passes move the elements
of `_COMPOSED`, counted in `planner.graph.operators.delta_rule` (`tests/unit/pricing/test_delta_rule.py` counts again).
On an H200 (4,096 steps, 32 heads of 128) the forward pass took 10.3 ms, 11 us for each of 935 operators.

Monotone in every extent; c times the samples or the steps take at most c times as long.

Sources: Yang et al. 2024, "Gated delta networks", arXiv 2412.06464, section 3.3 (the chunkwise form); Kimi Team 2025,
"Kimi Linear", arXiv 2510.26692, section 3; fla-org/flash-linear-attention@bc3b101d, fla/ops/gated_delta_rule, kda and
common (chunk_delta_h.py, chunk_o.py), whose tensors and products are counted here.
"""

from dataclasses import dataclass

import numpy as np

from costmodels.kernels.chunked import Chunked, launched_by_chunks
from costmodels.kernels.compute import operator_time
from costmodels.kernels.matmul import element_bytes, matmul_rate, matmul_time
from costmodels.units import Quantity
from hardware_profiles import Device

_LAUNCHED = {False: ((14, 39), (44, 90)), True: ((31, 19), (129, 25))}
"""Operators that a framework launches (per chunk, for all chunks), forward, then backward with its recomputation. The
key is whether each channel has its own decay."""

_COMPOSED = {
    False: ((32, 13, 12, 5, 0), (117, 23, 42, 19, 0)),
    True: ((42, 13, 4, 5, 13), (197, 29, 13, 22, 56)),
}
"""Elements that these operators read and write for a step of a head, products excluded, in units of d, e, C, d e / C
and C d; forward, then backward."""


_WIDE = 4
"""Bytes of an element of float32."""
_COLUMNS = 32
"""Columns of a state that one block holds."""
_KEYS = 128
"""Key dims of a head for which the seconds of a chunk were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Work of kernels for a step of a head.

    `elements` are those that pass through memory, in units of d, e, C and d e / C; `wide` are those of them in float32,
    in units of d and C; `operations` are FLOP, in units of C d, C e, d e and C C.
    """

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
"""Parallel kernels, forward and backward; the key is whether each channel has its own decay. They include the
normalization of queries and keys to length 1."""
_STATES, _GRADIENTS = (
    (_Work(elements=(2, 2, 0, 1), operations=(0, 0, 4, 0)), 1.2e-6),
    (_Work(elements=(3, 3, 0, 1), operations=(0, 0, 6, 0)), 3.6e-6),
)
_WALKS = ((_STATES,), (_STATES, _GRADIENTS))
"""Walks of the forward and of the backward pass, each with its seconds per chunk."""
_KERNELS = (8, 14)
"""Kernels of the forward and of the backward pass, launched without a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleShape(Chunked):
    """Extents on one device: numbers, or arrays of one shape (K,).

    Attributes:
        heads: number of heads.
        keys: d, key dims of a head.
        values: e, value dims of a head.
        channels: whether each channel of the keys has its own decay.
        composed: whether a framework computes the rule operator by operator.
        again: whether the backward pass first runs the forward kernels; has no effect where `composed`.
    """

    heads: Quantity
    keys: Quantity
    values: Quantity
    channels: bool = False
    composed: bool = False
    again: bool = False

    @property
    def launched(self) -> tuple[Quantity, Quantity]:
        """Operators that a framework launches, forward and backward; 0 where kernels compute the rule."""
        return launched_by_chunks(self.chunks, self.composed, _LAUNCHED[self.channels])


def delta_rule_time(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass, element-wise.

    Raises: as `costmodels.matmul_time` and `costmodels.operator_time`.
    """
    if shape.composed:
        return _products(shape, dtype, device) + _passed(shape, _composed(shape, 0), dtype, device)
    return _kernels(shape, 0, dtype, device)


def delta_rule_backward_time(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the backward pass, element-wise: the gradients of all operands, computed at once.

    Raises: as `delta_rule_time`.
    """
    if shape.composed:
        return 3 * _products(shape, dtype, device) + _passed(shape, _composed(shape, 1), dtype, device)
    backward = _kernels(shape, 1, dtype, device)
    return backward + delta_rule_time(shape, dtype, device) if shape.again else backward


def _kernels(shape: DeltaRuleShape, which: int, dtype: str, device: Device) -> Quantity:
    """Seconds of the kernels of one pass: `which` is 0 for forward, 1 for backward."""
    time: Quantity = _busy(shape, _SIDE_BY_SIDE[shape.channels][which], dtype, device)
    blocks = shape.batch * shape.heads * shape.values / _COLUMNS
    for work, of_chunk in _WALKS[which]:
        walk = shape.chunks * of_chunk * shape.keys / _KEYS * np.maximum(1.0, blocks / device.compute_units)
        time = time + np.maximum(walk, _busy(shape, work, dtype, device))
    return time + device.launch_latency * _KERNELS[which]


def _busy(shape: DeltaRuleShape, work: _Work, dtype: str, device: Device) -> Quantity:
    """Seconds of memory traffic and of products, added up."""
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
    """Elements that pass through memory for a step of a head: `which` is 0 for forward, 1 for backward."""
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
