"""Triton kernels. PyTorch for accelerators includes Triton; import this file only where Triton is available."""

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")


def _narrow_cast(  # type: ignore[no-untyped-def]
    values, scales, made, rows, columns, row_step, column_step, scale_row_step, scale_column_step, most,
    row_block: tl.constexpr, column_block: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """See `runtime.ops.fp8.narrow_casts.narrow_cast`; steps are strides in elements."""
    row = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)).to(tl.int64)[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(values + row * row_step + column * column_step, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(
        scales + (row // row_block) * scale_row_step + (column // column_block) * scale_column_step,
        mask=inside, other=1.0,
    )  # fmt: skip
    quotient = tl.clamp(tl.div_rn(value, scale), -most, most, propagate_nan=tl.PropagateNan.ALL)
    tl.store(made + row * columns + column, quotient.to(made.dtype.element_ty), mask=inside)


narrow_cast: Any = triton.jit(_narrow_cast)
