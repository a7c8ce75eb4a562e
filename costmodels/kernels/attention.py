"""Time of fused attention from its shape: compute units take tiles of queries, and each runs along the keys.

                keys                 q = ceil(queries / 128) tiles of queries, r = ceil(keys / 128) of keys
            +--+--+--+--+            met     = q r pairs of tiles; causal: (q r + max(q, r)) / 2, with the diagonal
    queries |##|  |  |  |            work    = batch heads 128 (128 met + f q) score, f keys to start a tile
            +--+--+--+--+            longest = 128 (128 r + f) score
            |##|##|  |  |            score   = 512 (c^2 + x^2)^(1/2) / (512^2 + x^2)^(1/2), FLOP of a score:
            +--+--+--+--+                      c = 2 (d + d_v) of the two products, x of the softmax
            |##|##|##|  |            compute = max(work + g S longest, S longest) / (e P)
            +--+--+--+--+            memory  = bytes of queries, keys, values and result / (b W)
            |##|##|##|##|            t       = L + (compute^3 + memory^3)^(1/3)
            +--+--+--+--+

A window that leaves a share v of these scores, and at most w keys for each query, leaves

    met = v q r (v q r / 2 if causal) + q / 2 + (1 - w / keys) q / 2      pairs: it cuts a tile at either end of a row

and w + 128 keys of the longest row. Queries, keys, values and results pass memory as without it, and every tile of
queries starts as without it. On B300 with 65,536 tokens, 8 heads of 256 and windows of 1,024 keys this makes 0.59 ms
forward and 1.7 ms backward; measured are 1.6 and 4.0 with the faster of FlashAttention-2 and 4
(Dao-AILab/flash-attention pull request 2749). The share v of the whole time would be 0.29 and 0.85 ms.

P is the peak times the clock that a power limit leaves (`Device.clock`), W the memory bandwidth, L the launch latency,
S the number of compute units, b the bandwidth efficiency of the op class. e, x, f and g are `compute`, `softmax`,
`fill` and `tail` of the device's `AttentionKernel`. d and d_v are rounded up to the next head width that has a kernel:
32, 64, 96, 128, 192 or 256, then multiples of 64. e is defined at d = d_v = 128, where c = 512. The fitted f are large
(150 to 1000 keys), because short sequences take much longer than their work suggests; the formula does not say why. The
measured calls also rotate and store queries and keys. That time is `attention_preparation`; only the fit uses it,
because a training graph has operators of its own for this work.

Backward pass: five products instead of two, at 0.86 of the forward rate. Three of the five take d, two take d_v: 2.5
times the work where both are equal, 2.6 times with the 192 and 128 elements of DeepSeek-V3 (PyTorch counts the same:
torch/utils/flop_counter.py, sdpa_backward_flop_count). So large calls take 2.9 times as long as forward.
FlashAttention-2 reaches 73% of the peak of an A100 forward and 63% backward. On H100 the two rates of FlashAttention-3
differ more (740 TFLOP/s forward; backward 1.5 to 1.75 times FlashAttention-2, a ratio of about 0.76); this formula does
not follow that. Where backward passes were measured, as on MI300X, the kernel has a rate of its own (`backward`).

t is monotone in every extent. It is subadditive in batch and heads: c times as many take at most c times as long. It is
not subadditive in the sequence, since the scores grow with its square. Not good for: queries and keys of different
length under a causal mask that is aligned at the end; decoding (one query).

Sources: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", arXiv 2307.08691,
2023, abstract, section 3.1 and 4.1; Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and
low-precision", arXiv 2407.08608, 2024, section 4.
"""

import math
from dataclasses import dataclass

import numpy as np

from costmodels.errors import CostModelError
from costmodels.kernels.compute import operator_time
from costmodels.kernels.matmul import element_bytes
from costmodels.units import Array, FlopsPerSecond, Quantity
from hardware_profiles import AttentionKernel, Device

BACKWARD_WORK = 2.5
"""Work of the backward pass over that of the forward pass, for all three gradients, if d = d_v (FlashAttention-2)."""

BACKWARD_RATE = 0.63 / 0.73
"""Rate of the backward pass over that of the forward pass (FlashAttention-2 on A100), unless the kernel has its own."""

_TILE = 128
_WIDTHS = np.array([32.0, 64.0, 96.0, 128.0, 192.0, 256.0])
"""Head widths that FlashAttention-2 has kernels for (csrc/flash_attn/src/static_switch.h, HEADDIM_SWITCH, v2.7). A head
of width 150 takes the time of one of width 192."""

_WIDE = 64.0  # widths above the last one are rounded up to a multiple of this
_REFERENCE = 512.0  # FLOP per score with head_dim 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Extents of one attention call on one device: numbers, or arrays of one shape (K,).

    `heads` counts heads of queries, `key_heads` heads of keys and values (fewer with grouped-query attention).
    `queries` and `keys` are positions, `head_dim` and `value_dim` elements of a head. A window leaves the share `seen`
    of all scores, and at most `reach` keys for each query.
    """

    batch: Quantity
    heads: Quantity
    key_heads: Quantity
    queries: Quantity
    keys: Quantity
    head_dim: Quantity
    value_dim: Quantity
    causal: bool
    seen: Quantity = 1.0
    reach: Quantity = math.inf

    @property
    def flops(self) -> Quantity:
        """FLOP of the forward pass; a causal mask halves them, and a window leaves its share."""
        scores = self.batch * self.heads * self.queries * self.keys * self.seen
        return (1.0 if self.causal else 2.0) * scores * (self.head_dim + self.value_dim)

    @property
    def elements(self) -> Quantity:
        """Number of elements of queries, keys, values and result together."""
        rows = self.heads * self.queries + self.key_heads * self.keys
        return self.batch * rows * (self.head_dim + self.value_dim)


def attention_time(shape: AttentionShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass; element-wise over arrays.

    If the device has no attention kernel for the dtype, this is `operator_time` of the class "attention".

    Raises:
        hardware_profiles.UnknownKeyError: the device has no figures for the dtype.
        CostModelError: an extent below 1, or a dtype of unknown size.
    """
    return _time(shape, dtype, device, work=1.0, rate=1.0, moved=1.0, kernels=1)


def attention_backward_time(shape: AttentionShape, dtype: str, device: Device, work: float = BACKWARD_WORK) -> Quantity:
    """Seconds of the backward pass: `work` times the forward FLOP, twice the memory traffic, three kernel launches.

    Raises: as `attention_time`.
    """
    kernel = device.attention_kernel(dtype)
    measured = None if kernel is None else kernel.backward
    rate = BACKWARD_RATE if measured is None else measured
    return _time(shape, dtype, device, work=work, rate=rate, moved=2.0, kernels=3)


def attention_preparation(shape: AttentionShape, dtype: str, device: Device) -> Quantity:
    """Seconds that the measured forward call spends outside attention itself; 0 if the device has no kernel for the
    dtype.

    preparation + 2 passes w batch (heads queries d + key_heads keys (d + d_v)) / W, with w bytes per element, W the
    memory bandwidth, and `preparation` and `passes` of the device's `AttentionKernel`.
    """
    kernel = device.attention_kernel(dtype)
    if kernel is None:
        return 0.0 * shape.elements
    rows = shape.heads * shape.queries * shape.head_dim + shape.key_heads * shape.keys * (
        shape.head_dim + shape.value_dim
    )
    moved = 2 * kernel.passes * element_bytes(dtype) * shape.batch * rows
    return kernel.preparation + moved / device.memory_bandwidth


def attention_rate(dtype: str, device: Device) -> FlopsPerSecond:
    """Highest FLOP/s that `attention_time` can give: the limit for wide heads, where the softmax costs nothing."""
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
    """Head width as the kernel computes it: the next width that a kernel is compiled for."""
    place = np.searchsorted(_WIDTHS, width)
    wide = _WIDE * np.ceil(np.asarray(width) / _WIDE)
    padded = np.where(place < len(_WIDTHS), _WIDTHS[np.minimum(place, len(_WIDTHS) - 1)], wide)
    return padded if isinstance(width, np.ndarray) else float(padded)


def _tiled(shape: AttentionShape, kernel: AttentionKernel, device: Device) -> Array:
    """FLOP at the rate e P that fill the time of the slowest compute unit, summed over all units: `compute` times e
    P."""
    rows, columns = np.ceil(shape.queries / _TILE), np.ceil(shape.keys / _TILE)
    met = (rows * columns + np.maximum(rows, columns)) / 2 if shape.causal else rows * columns
    cut = (2.0 - np.minimum(shape.reach / shape.keys, 1.0)) / 2 * rows  # tiles at the ends of rows
    left = shape.seen * (rows * columns / 2 if shape.causal else rows * columns) + cut
    met = np.where(np.less(shape.seen, 1.0), np.minimum(met, left), met)
    columns = np.minimum(columns, np.ceil(shape.reach / _TILE) + 1)
    products = 2.0 * (_padded(shape.head_dim) + _padded(shape.value_dim))
    score = np.hypot(products, kernel.softmax) * (1.0 / np.hypot(1.0, kernel.softmax / _REFERENCE))
    work = shape.batch * shape.heads * (_TILE * met + kernel.fill * rows)
    longest = (_TILE * columns + kernel.fill) * device.compute_units
    return np.asarray(np.maximum(work + kernel.tail * longest, longest) * score * _TILE)
