"""Time of fused attention from its shape: tiles of queries on compute units, each of which runs along the keys.

                keys                 q = ceil(queries / 128) tiles of queries, r = ceil(keys / 128) of keys
            +--+--+--+--+            met     = q r pairs of tiles; causal: (q r + max(q, r)) / 2, with the diagonal
    queries |##|  |  |  |            work    = batch heads 128 (128 met + f q) score, f keys to start a tile
            +--+--+--+--+            longest = 128 (128 r + f) score
            |##|##|  |  |            score   = 512 (c^2 + x^2)^(1/2) / (512^2 + x^2)^(1/2), what a score costs:
            +--+--+--+--+                      c = 2 (d + d_v) FLOP of the two products, x of the softmax
            |##|##|##|  |            compute = max(work + g S longest, S longest) / (e P)
            +--+--+--+--+            memory  = bytes of queries, keys, values and result / (b W)
            |##|##|##|##|            t       = L + (compute^3 + memory^3)^(1/3)
            +--+--+--+--+

P peak, times the clock that a power limit leaves (`Device.clock`), W memory bandwidth, L launch latency, S compute
units, b the bandwidth efficiency of the class; e, x, f, g the `compute`, `softmax`, `fill` and `tail` of the device's
`AttentionKernel`. d and d_v are those of the next kernel, 32, 64, 96, 128, 192 or 256; e is defined at d = d_v = 128,
c = 512. The fitted f are large (150 to 1000 keys), because short sequences take much longer than their work says; the
formula makes no claim as to why. What a measured call does beside (rotating queries and keys, storing them) is in
`attention_preparation` and belongs to the fit alone: a training graph has operators for it.

Backward: 2.5 times the work (five products for two), at 0.86 of the rate of the forward pass, so 2.9 times the time of
large ones. FlashAttention-2 reaches 73% of the peak of an A100 forward and 63% backward; FlashAttention-3 on H100 is
further apart (740 TFLOP/s forward; backward 1.5 to 1.75 times FlashAttention-2, so about 0.76), which this does not
follow. No table at hand has backward times by shape.

t is monotone in every extent, and subadditive in batch and heads: c-fold takes at most c times as long. Along the
sequence it is not, since scores grow with the square. Not good for: queries and keys of different length under a causal
mask aligned at the end, windows, decoding (one query).

Sources: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", arXiv 2307.08691,
2023, abstract, section 3.1 and 4.1; Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and
low-precision", arXiv 2407.08608, 2024, section 4.
"""

from dataclasses import dataclass

import numpy as np

from costmodels.compute import operator_time
from costmodels.errors import CostModelError
from costmodels.matmul import element_bytes
from costmodels.units import Array, FlopsPerSecond, Quantity
from hardware_profiles import AttentionKernel, Device

BACKWARD_WORK = 2.5
"""Work of the backward pass over that of the forward pass, all three gradients wanted (FlashAttention-2)."""

BACKWARD_RATE = 0.63 / 0.73
"""Rate of the backward pass over that of the forward pass (FlashAttention-2 on A100)."""

_TILE = 128
_WIDTHS = np.array([32.0, 64.0, 96.0, 128.0, 192.0, 256.0])
"""Widths of heads that FlashAttention-2 has kernels of (csrc/flash_attn/src/static_switch.h, HEADDIM_SWITCH, v2.7): a
head of 150 takes the time of one of 192."""

_WIDE = 64.0  # wider ones are multiples of this
_REFERENCE = 512.0  # FLOP per score with head_dim 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Extents of one call, numbers or arrays of one shape (K,): `heads` of queries, `key_heads` of keys and values."""

    batch: Quantity
    heads: Quantity
    key_heads: Quantity
    queries: Quantity
    keys: Quantity
    head_dim: Quantity
    value_dim: Quantity
    causal: bool

    @property
    def flops(self) -> Quantity:
        """Forward floating point operations, half of them where a causal mask leaves half of the scores."""
        scores = self.batch * self.heads * self.queries * self.keys
        return (1.0 if self.causal else 2.0) * scores * (self.head_dim + self.value_dim)

    @property
    def elements(self) -> Quantity:
        """Elements of queries, keys, values and result."""
        rows = self.heads * self.queries + self.key_heads * self.keys
        return self.batch * rows * (self.head_dim + self.value_dim)


def attention_time(shape: AttentionShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass; element-wise over arrays.

    For a dtype whose kernels the device has no figures of, this is `operator_time` of the class "attention".

    Raises:
        hardware_profiles.UnknownKeyError: the device says nothing about the dtype.
        CostModelError: an extent below 1, or a dtype of unknown size.
    """
    return _time(shape, dtype, device, work=1.0, rate=1.0, moved=1.0, kernels=1)


def attention_backward_time(shape: AttentionShape, dtype: str, device: Device, work: float = BACKWARD_WORK) -> Quantity:
    """Seconds of the backward pass, `work` times the work of the forward pass: three kernels, and twice the traffic.

    Raises: as `attention_time`.
    """
    return _time(shape, dtype, device, work=work, rate=BACKWARD_RATE, moved=2.0, kernels=3)


def attention_preparation(shape: AttentionShape, dtype: str, device: Device) -> Quantity:
    """Seconds of what the measured call of the forward pass does beside; none without figures for the dtype."""
    kernel = device.attention_kernel(dtype)
    if kernel is None:
        return 0.0 * shape.elements
    rows = shape.heads * shape.queries * shape.head_dim + shape.key_heads * shape.keys * (
        shape.head_dim + shape.value_dim
    )
    moved = 2 * kernel.passes * element_bytes(dtype) * shape.batch * rows
    return kernel.preparation + moved / device.memory_bandwidth


def attention_rate(dtype: str, device: Device) -> FlopsPerSecond:
    """FLOP/s that no attention exceeds, as `attention_time` has it: with heads so wide that the softmax is for free."""
    kernel = device.attention_kernel(dtype)
    if kernel is None:
        return device.peak(dtype) * device.efficiency("attention").compute
    share = kernel.compute * device.clock
    return device.peak(dtype) * share * float(np.hypot(1.0, kernel.softmax / _REFERENCE))


def _time(
    shape: AttentionShape, dtype: str, device: Device, *, work: float, rate: float, moved: float, kernels: int
) -> Quantity:
    extents = (shape.batch, shape.heads, shape.key_heads, shape.queries, shape.keys, shape.head_dim, shape.value_dim)
    least = min(extent if isinstance(extent, int | float) else extent.min() for extent in extents)
    if not least >= 1:
        raise CostModelError(f"attention with an extent of {least:g}: extents are 1 or more")
    read_and_written = shape.elements * (element_bytes(dtype) * moved)
    kernel = device.attention_kernel(dtype)
    if kernel is None:
        return operator_time(
            op_class="attention",
            flops=shape.flops * work,
            bytes_moved=read_and_written,
            dtype=dtype,
            device=device,
            kernels=kernels,
        )
    compute = _tiled(shape, kernel, device) * (work / (rate * kernel.compute * device.clock * device.peak(dtype)))
    memory = read_and_written * (1.0 / (device.efficiency("attention").bandwidth * device.memory_bandwidth))
    time = np.cbrt(compute * compute * compute + memory * memory * memory) + device.launch_latency * kernels
    return time if any(isinstance(extent, np.ndarray) for extent in extents) else float(time)


def _padded(width: Quantity) -> Quantity:
    """The width of a head as kernels compute with it: the next one that they are compiled for."""
    place = np.searchsorted(_WIDTHS, width)
    wide = _WIDE * np.ceil(np.asarray(width) / _WIDE)
    padded = np.where(place < len(_WIDTHS), _WIDTHS[np.minimum(place, len(_WIDTHS) - 1)], wide)
    return padded if isinstance(width, np.ndarray) else float(padded)


def _tiled(shape: AttentionShape, kernel: AttentionKernel, device: Device) -> Array:
    """Floating point operations of the peak rate that the slowest compute unit's time is worth, times their number."""
    rows, columns = np.ceil(shape.queries / _TILE), np.ceil(shape.keys / _TILE)
    met = (rows * columns + np.maximum(rows, columns)) / 2 if shape.causal else rows * columns
    products = 2.0 * (_padded(shape.head_dim) + _padded(shape.value_dim))
    score = np.hypot(products, kernel.softmax) * (1.0 / np.hypot(1.0, kernel.softmax / _REFERENCE))
    work = shape.batch * shape.heads * (_TILE * met + kernel.fill * rows)
    longest = (_TILE * columns + kernel.fill) * device.compute_units
    return np.asarray(np.maximum(work + kernel.tail * longest, longest) * score * _TILE)
