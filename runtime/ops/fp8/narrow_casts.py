"""Scales values and rounds them to 8 bits in one kernel, where the device compiles Triton.

    values R K ── / scale ── clamp ── round ──> 8 bits, contiguous rows

PyTorch's own operators take four kernels, which move 27 bytes for each 16-bit value instead of 3: on an H200 they take
longer than fp8 products save. There is one scale, (); or one per row, (R, 1); or one per block of rows and columns.
Division and rounding are those of IEEE 754, as in PyTorch, so both give the same bits.
"""

import functools
import importlib.util

import torch

from runtime.ops.fp8.capability import IN_FP8, cuda_capability

_ROWS, _COLUMNS = 32, 128
"""Elements of a tile; each program rounds one tile."""


def has_narrow_cast(values: torch.Tensor) -> bool:
    """Whether the device rounds these values (R, K) in one kernel."""
    if values.device.type != "cuda" or values.ndim != 2 or values.dtype == torch.float64:
        return False
    return cuda_capability(values.device) >= IN_FP8 and _triton_is_there()


def narrow_cast(
    values_RK: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] = (1, 1)
) -> torch.Tensor:
    """Values divided by their scale, rounded to an 8-bit dtype, (R, K), contiguous; values beyond its range saturate.
    `scale` in fp32 is (), (R, 1), or one per `block` of rows and columns, with any strides. Only for values for which
    `has_narrow_cast` is true."""
    from runtime.ops import triton_kernels

    made = torch.empty(values_RK.shape, dtype=dtype, device=values_RK.device)
    if not made.numel():
        return made
    steps = [0 if extent == 1 else step for extent, step in zip(scale.shape, scale.stride(), strict=True)] or [0, 0]
    rows, columns = values_RK.shape
    grid = (-(-rows // _ROWS), -(-columns // _COLUMNS))
    with torch.cuda.device(values_RK.device):
        triton_kernels.narrow_cast[grid](
            values_RK, scale, made, rows, columns, *values_RK.stride(), *steps, torch.finfo(dtype).max,
            row_block=block[0], column_block=block[1], tile_rows=_ROWS, tile_columns=_COLUMNS,
        )  # fmt: skip
    return made


@functools.cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None
