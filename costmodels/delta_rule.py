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

Where the rule is `composed` of a framework's operators, each of these passes over memory, and launches them chunk by
chunk: N chunks take the operators of `_LAUNCHED`, those of a chunk and those of all, and their passes the elements of
`_COMPOSED`, counted in `planner.graph.delta_rule` (`tests/unit/pricing/test_delta_rule.py` counts again). On an H200
(4,096 steps, 32 heads of 128) they took 10.3 ms forward, 11 us for each of 935.

Source: Yang et al. 2024, "Gated delta networks", arXiv 2412.06464, section 3.3 (the chunkwise form).
"""

from dataclasses import dataclass

from costmodels.chunked import Chunked, launched_by_chunks
from costmodels.compute import operator_time
from costmodels.matmul import element_bytes, matmul_time
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleShape(Chunked):
    """What one device has: numbers, or arrays of one shape (K,). `keys` and `values` are the dims of a head, `chunk`
    the steps that are computed at a time; `channels`: whether each channel of the keys has a decay. `composed`: whether
    a framework computes it operator by operator."""

    heads: Quantity
    keys: Quantity
    values: Quantity
    channels: bool = False
    composed: bool = False

    @property
    def launched(self) -> tuple[Quantity, Quantity]:
        """Operators that it is composed of, forward and backward; 0 where one kernel computes it."""
        return launched_by_chunks(self.chunks, self.composed, _LAUNCHED[self.channels])


def delta_rule_time(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass, element-wise."""
    elements = _composed(shape, 0) if shape.composed else 4 * shape.keys + 3 * shape.values
    return _products(shape, dtype, device) + _passed(shape, elements, dtype, device)


def delta_rule_backward_time(shape: DeltaRuleShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the backward pass, element-wise: for the gradients of all operands, computed at once."""
    elements = _composed(shape, 1) if shape.composed else 8 * shape.keys + 6 * shape.values
    return 3 * _products(shape, dtype, device) + _passed(shape, elements, dtype, device)


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
