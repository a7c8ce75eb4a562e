"""Time of a matrix product from its shape: a roofline of tiles on compute units.

    C (m x n) = A (m x k) B (k x n), `batch` times. Each tile of C is the work of one of S compute units, which runs
    along k. Libraries pick the best of a few tile shapes, and cut k into s parts if the tiles alone would leave units
    idle:

         n              tiles of C: ceil(m/t_m) ceil(n/t_n), times batch and the s parts of k
       +--+--+--+-      load      = tiles / S             in waves of S tiles
     m |  |  |  |       waves     = q ceil(load) + (1-q) max(1, load)
       +--+--+--+-      step      = time of one tile per step along k, on one of the units:
       |  |  |  |                   the norm of   2 t_m t_n S / (e P)    and   (t_m + t_n) w S / R
                        compute   = min over (t_m, t_n, s) of   waves (32 ceil(k/(32 s)) + f) step
                                                                + [s > 1] (D + 4 s m n batch / W)
                        memory    = batch (m k + k n + m n) w / (b W)
                        t         = L + norm of compute and memory (+ 3 m k batch / C, where A is converted first)

P is the peak times the clock; W the memory bandwidth and S from the datasheet; w bytes per element (of C at least 2).
e, b, L, R, f, q, D and C are `compute`, `bandwidth`, `launch`, `feed`, `fill`, `quantisation`, `split` and `convert` of
the device's `MatmulKernel`. The norms (a^p + b^p)^(1/p) replace the maximum, which real kernels only approach: p is 6
inside a tile, whose loads are pipelined, and 3 between computing and memory. (4 s m n: the partial sums are written and
read back in four bytes, half of that from the cache. 3 m k: read in 2 bytes, written in the 1 byte of fp8.)

The search relies on two laws. They hold exactly: each choice of tile and parts obeys them, and a minimum over a fixed
set keeps them:

    monotone       t does not fall when m, n, k or batch grows
    subadditive    c-fold m, n, k or batch takes at most c times as long (c a whole number)

Effects that break the second law are left out on purpose. One is that operands in the cache are read faster: in the
measured tables, skinny products of less than about 100 MB on B200 beat its memory. Another is power: it limits the
clock of a device that works all the time, and products of several milliseconds take 6 to 14 percent longer per
operation than those of some 100 µs. A training step is longer than any of them, so all products get the clock of the
longest (`MatmulKernel.clock`, and `Device.clock` where the limit is lower than that of the board). A short product on a
device that rests in between is faster. Not good for: sparse products, n below 32, and libraries that were not tuned.

Costs some 25 array operations on (15, K) numbers.

Sources: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009; NVIDIA, "Matrix multiplication background user's
guide", DU-09799-001 (tile and wave quantisation); Osama et al., "Stream-K: work-centric parallel decomposition for
dense matrix-matrix multiplication on the GPU", PPoPP 2023, arXiv 2301.03598 (parts of k, and what they cost).
"""

from functools import lru_cache
from typing import overload

import numpy as np

from costmodels.errors import CostModelError
from costmodels.kernels.compute import operator_time
from costmodels.units import Array, FlopsPerSecond, Quantity
from hardware_profiles import DTYPES, Device, MatmulKernel

_TILES = ((64, 64, 1), (128, 64, 1), (128, 128, 1), (128, 256, 1), (256, 128, 1), (64, 256, 1), (256, 64, 1))
_PARTS = (*((128, 128, parts) for parts in (2, 3, 5, 8)), *((64, 64, parts) for parts in (2, 4, 8, 16)))
_ROWS, _COLUMNS, _SPLITS = (
    np.array(column, dtype=np.float64)[:, None] for column in zip(*_TILES, *_PARTS, strict=True)
)
_PER_ROW, _PER_COLUMN = 1 / _ROWS, 1 / _COLUMNS  # exact: powers of two
_DEPTH = 32  # elements of k in one step of the innermost loop


@overload
def matmul_time(m: float, n: float, k: float, batch: float, dtype: str, device: Device) -> float: ...
@overload
def matmul_time(
    m: Quantity,
    n: Quantity,
    k: Quantity,
    batch: Quantity,
    dtype: str,
    device: Device,
    moved: Quantity | None = None,
    *,
    slower: Quantity = 1.0,
    converted: Quantity = 1.0,
) -> Quantity: ...
def matmul_time(
    m: Quantity,
    n: Quantity,
    k: Quantity,
    batch: Quantity,
    dtype: str,
    device: Device,
    moved: Quantity | None = None,
    *,
    slower: Quantity = 1.0,
    converted: Quantity = 1.0,
) -> Quantity:
    """Seconds of `batch` products of m x k with k x n, launched together; element-wise over arrays of one dim.

    If the device has no matmul kernel for the dtype, this is `operator_time` of the class "matmul".

    Args:
        m, n, k, batch: extents, >= 1; whole numbers, or arrays of them of one shape (K,).
        dtype: of the operands; the device must have a peak for it.
        device: the device.
        moved: bytes read and written, if they differ from those of three plain matrices. A convolution, for example,
            reads
            elements that its windows share once.
        slower: factor on the time of the compute units, 1 for a plain product.
        converted: share of the first operand that is converted to the dtype for this product.

    Raises:
        hardware_profiles.UnknownKeyError: the device has no figures for the dtype.
        CostModelError: an extent below 1, or a dtype of unknown size.
    """
    least = float(np.minimum(np.minimum(m, n), np.minimum(k, batch)).min())
    if not least >= 1:
        raise CostModelError(f"a matrix product with an extent of {least:g}: extents are 1 or more")
    width = element_bytes(dtype)
    read_and_written: Quantity = batch * ((m + n) * k * width + m * n * max(2, width)) if moved is None else moved
    kernel = device.matmul_kernel(dtype)
    if kernel is None:
        flops: Quantity = 2.0 * m * n * k * batch
        return operator_time(op_class="matmul", flops=flops, bytes_moved=read_and_written, dtype=dtype, device=device)
    peak, bandwidth = device.peak(dtype), device.memory_bandwidth
    clock = kernel.clock * device.clock
    steps = _steps(kernel, peak * clock, device.compute_units, width)
    time = _tiled(m, n, k, batch, steps, kernel, device) * slower
    memory = read_and_written * (1.0 / (kernel.bandwidth * bandwidth))
    time = np.cbrt(time * time * time + memory * memory * memory) + kernel.launch
    if kernel.convert is not None:
        time = time + converted * ((2 + width) * m * k * batch / kernel.convert)
    return time if any(isinstance(extent, np.ndarray) for extent in (m, n, k, batch)) else float(time[0])


def weight_gradient_time(
    m: Quantity,
    n: Quantity,
    k: Quantity,
    batch: Quantity,
    dtype: str,
    device: Device,
    moved: Quantity | None = None,
    *,
    added: bool,
) -> Quantity:
    """Seconds of `batch` weight gradients of m x n, summed over k rows.

    If it is `added` to a gradient in fp32, that gradient is read and written, and the product keeps
    `MatmulKernel.added` of its rate; `moved`, if given, must include this traffic. The operands are in the dtype
    already: libraries cast and transpose them once, together with the operands of the layer's other products.

    Raises: as `matmul_time`.
    """
    kernel, width = device.matmul_kernel(dtype), element_bytes(dtype)
    slower = 1.0 / kernel.added if added and kernel is not None else 1.0
    read_and_written: Quantity | None = moved
    if added and moved is None:
        read_and_written = batch * ((m + n) * k * width + m * n * 8.0)
    return matmul_time(m, n, k, batch, dtype, device, read_and_written, slower=slower, converted=0.0)


def element_bytes(dtype: str) -> int:
    """Bytes of one operand element. Raises `CostModelError` for a dtype of unknown size."""
    if dtype not in DTYPES:
        raise CostModelError(f"no size known for dtype {dtype!r}; known: {', '.join(DTYPES)}")
    return DTYPES[dtype].nbytes


def _tiled(
    m: Quantity, n: Quantity, k: Quantity, batch: Quantity, steps: Array, kernel: MatmulKernel, device: Device
) -> Array:
    """Seconds of the compute units with the best tile and parts, (K,)."""
    load = np.ceil(m * _PER_ROW)
    load *= np.ceil(n * _PER_COLUMN)
    load *= batch * _SPLITS
    load /= device.compute_units  # a division, which is exact where the tiles are whole waves
    waves = np.maximum(load, 1.0)
    if kernel.quantisation:
        waves += kernel.quantisation * (np.ceil(load) - waves)
    depth = np.ceil(k / (_DEPTH * _SPLITS))
    depth *= _DEPTH
    depth += kernel.fill
    waves *= depth
    waves *= steps
    added = (m * n * batch) * (4.0 * _SPLITS[len(_TILES) :] / device.memory_bandwidth)
    waves[len(_TILES) :] += added + kernel.split
    return np.asarray(waves.min(axis=0))


@lru_cache(maxsize=256)
def _steps(kernel: MatmulKernel, peak: FlopsPerSecond, compute_units: int, width: int) -> Array:
    """Seconds of one tile per element along k on one compute unit, for each choice of tile, (15, 1)."""
    compute = 2 * _ROWS * _COLUMNS * (compute_units / (kernel.compute * peak))
    feed = (_ROWS + _COLUMNS) * (width * compute_units / kernel.feed)
    return np.asarray((compute**6 + feed**6) ** (1 / 6))


def matmul_rate(dtype: str, device: Device) -> FlopsPerSecond:
    """Highest FLOP/s that `matmul_time` can give: the peak times the share that large kernels reach."""
    kernel = device.matmul_kernel(dtype)
    share = device.efficiency("matmul").compute if kernel is None else kernel.compute * kernel.clock * device.clock
    return device.peak(dtype) * share
