"""Products of operands in 8 bits with a scale for each 128 elements of a row, and for each 128 x 128 of the weight, by
the kernel of the device.

    rows T I ───> 8 bits, scales T I/128, row by row next to each other ─────┐
                                                                           ├─> scaled product ─> T O, summed in fp32
    weight O I ─> 8 bits, scales O/128 I/128, each row padded to fours ─────┘

The kernel is cuBLAS's, on CUDA devices of capability 9 (Hopper); all others multiply the same rounded operands in fp32
(`planner.models.fp8_experts`), also where an extent is no multiple of what the kernel wants.

Source: NVIDIA, cuBLAS, "1D and 2D Block Scaling for FP8"; DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2.

Shape legend: T rows, I what is summed over, O outputs, J and P blocks of I and of O.
"""

import torch
import torch.nn.functional as F

from planner.fp8_recipes import BLOCK
from planner.models.fp8_experts import scale_of, wide
from runtime.ops.capability import WORDS, cuda_capability
from runtime.ops.narrow_casts import has_narrow_cast, narrow_cast
from runtime.ops.narrow_weights import DTYPE, largest_of

_CAPABILITY = 9
_FOURS = 4


def has_blocks_product(rows_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether the device has a kernel for such operands, with results in their dtype."""
    if cuda_capability(rows_TI.device)[0] != _CAPABILITY or rows_TI.dtype != torch.bfloat16:
        return False
    whole = weight_OI.shape[0] % BLOCK == 0 and rows_TI.shape[1] % BLOCK == 0 and rows_TI.shape[0] % WORDS == 0
    return rows_TI.numel() > 0 and whole and weight_OI.dtype == rows_TI.dtype and has_narrow_cast(rows_TI)


def blocks_product(rows_TI: torch.Tensor, weight_OI: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """The product of rows, in `low`, with a weight in e4m3, turned, T O."""
    of_rows, of_weight = scales_of_rows(rows_TI, low), scales_of_weight(weight_OI)
    rows = narrow_cast(rows_TI, of_rows, low, (1, BLOCK))
    weight = narrow_cast(weight_OI, of_weight, DTYPE, (BLOCK, BLOCK))
    kinds = F.ScalingType
    made: torch.Tensor = F.scaled_mm(
        rows, weight.t(), of_rows, kinds.BlockWise1x128, in_fours(of_weight), kinds.BlockWise128x128,
        output_dtype=rows_TI.dtype,
    )  # fmt: skip
    return made


def scales_of_rows(rows_TI: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """A scale for each block of a row, T J, of which those of one block stand next to each other."""
    most_TJ = largest_of(rows_TI.view(len(rows_TI), -1, BLOCK), dim=2).squeeze(2)
    return scale_of(wide(most_TJ.t().contiguous()), low).t()


def scales_of_weight(weight_OI: torch.Tensor) -> torch.Tensor:
    """A scale for each block of a weight, P J."""
    outputs, inputs = weight_OI.shape
    blocks_PJBB = torch.as_strided(
        weight_OI, (outputs // BLOCK, inputs // BLOCK, BLOCK, BLOCK),
        (BLOCK * weight_OI.stride(0), BLOCK * weight_OI.stride(1), *weight_OI.stride()), weight_OI.storage_offset(),
    )  # fmt: skip
    return scale_of(wide(largest_of(blocks_PJBB, dim=(2, 3))[..., 0, 0]), DTYPE)


def in_fours(scales_PJ: torch.Tensor) -> torch.Tensor:
    """Scales of a weight as the kernel reads them, J P: for each of P those of J one after the other, and zeros up to a
    multiple of four."""
    return F.pad(scales_PJ, (0, -scales_PJ.shape[1] % _FOURS)).t()
