"""FP8 products by the device's kernel, with one scale per 128 elements of a row, and one per 128 x 128 block of the
weight.

    rows T I ───> 8 bits, scales T I/128, row by row next to each other ─────┐
                                                                           ├─> scaled product ─> T O, summed in fp32
    weight O I ─> 8 bits, scales O/128 I/128, each row padded to fours ─────┘

The kernel is cuBLAS's, on CUDA devices of capability 9 (Hopper); all other devices multiply the same rounded operands
in fp32 (`planner.models.experts.fp8`).

Source: NVIDIA, cuBLAS, "1D and 2D Block Scaling for FP8"; DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2.

Shape legend: T rows, I inputs (summed over), O outputs, J and P blocks of I and of O.
"""

import torch
import torch.nn.functional as F

from planner.fp8_recipes import BLOCK
from planner.models.experts.fp8 import scale_of
from runtime.ops.fp8.capability import cuda_capability
from runtime.ops.fp8.narrow_casts import has_narrow_cast, narrow_cast
from runtime.ops.fp8.narrow_weights import DTYPE
from runtime.ops.fp8.scaled_products import in_words

_CAPABILITY = 9
_FOURS = 4


def has_blocks_product(rows_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether the device has a kernel for such operands, with results in the dtype of the rows; the weight may already
    be in 8 bits."""
    if cuda_capability(rows_TI.device)[0] != _CAPABILITY or rows_TI.dtype != torch.bfloat16:
        return False
    return rows_TI.numel() > 0 and weight_OI.dtype in (rows_TI.dtype, DTYPE) and has_narrow_cast(rows_TI)


def blocks_product(
    rows_TI: torch.Tensor,
    of_rows_TJ: torch.Tensor,
    weight_OI: torch.Tensor,
    of_weight_PJ: torch.Tensor,
    low: torch.dtype,
) -> torch.Tensor:
    """The product of rows (cast to `low`) with a transposed weight in e4m3, T O, scaled by the largest elements of
    their blocks. Extents are zero-padded to whole blocks, and rows to whole words."""
    scales_TJ, scales_PJ = (scale_of(most, each) for most, each in ((of_rows_TJ, low), (of_weight_PJ, DTYPE)))
    rows = in_words(narrow_cast(rows_TI, scales_TJ, low, (1, BLOCK)), columns=BLOCK)
    weight = weight_OI if weight_OI.dtype == DTYPE else narrow_cast(weight_OI, scales_PJ, DTYPE, (BLOCK, BLOCK))
    weight = in_words(weight.contiguous(), BLOCK, BLOCK)
    kinds = F.ScalingType
    made: torch.Tensor = F.scaled_mm(
        rows, weight.t(), of_blocks(scales_TJ, len(rows)), kinds.BlockWise1x128, in_fours(scales_PJ),
        kinds.BlockWise128x128, output_dtype=rows_TI.dtype,
    )  # fmt: skip
    return made[: len(rows_TI), : len(weight_OI)]


def of_blocks(scales_TJ: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of `rows` rows in the kernel's order, T J: those of one block column are contiguous."""
    turned_JT = F.pad(scales_TJ, (0, 0, 0, rows - len(scales_TJ)), value=1.0).t()
    return turned_JT.contiguous().as_strided((rows, scales_TJ.shape[1]), (1, rows))  # also with a single block


def in_fours(scales_PJ: torch.Tensor) -> torch.Tensor:
    """Scales of a weight in the kernel's order, J P: for each of P the scales of J are contiguous, zero-padded to a
    multiple of four. A tensor that needs no padding keeps its strides, also a transposed one."""
    return F.pad(scales_PJ, (0, -scales_PJ.shape[1] % _FOURS)).contiguous().t()
