"""FP8 products by the device's kernel, with a power-of-two scale for each 32 elements of a row.

    rows R K ──> 8 bits, and a scale in e8m0 for each 32 of K ─┐
                                                             ├─> `torch._scaled_mm` ─> R C, accumulated in fp32
    others C K ──> the same ─────────────────────────────────┘

The kernel wants scales in tiles of 128 rows and 4 lines, padded with zeros: the scale of row r and line l of a tile is
at (r mod 32) 16 + (r div 32) 4 + l. CUDA devices of capability 10 or more (Blackwell) have it; all others multiply the
same rounded operands in fp32 (`planner.models.experts.fp8`). Extents are padded with zeros to the multiples that the
kernel needs.

Source: NVIDIA, cuBLAS, "1D Block Scaling Factors Layout"; OCP Microscaling Formats 1.0.

Shape legend: R and C rows of the operands, K inner dim (summed over), L lines of it, N elements of a line.
"""

import torch
import torch.nn.functional as F

from planner.fp8_recipes import LINE
from planner.models.experts.fp8 import in_bytes
from runtime.ops.fp8.capability import cuda_capability
from runtime.ops.fp8.narrow_casts import has_narrow_cast, narrow_cast
from runtime.ops.fp8.scaled_products import in_words

_CAPABILITY = (10, 0)
_RESULT = torch.bfloat16
"""The result dtype for which PyTorch 2.13 tests its kernel."""
_ROWS, _LINES, _ROUND = 128, 4, 32
"""The rows and lines of a tile of scales, and the rows that are interleaved."""


def has_lines_product(rows_RK: torch.Tensor, others_CK: torch.Tensor) -> bool:
    """Whether the device has a kernel for such operands, with results in their dtype."""
    wanted = rows_RK.dtype == others_CK.dtype == _RESULT and rows_RK.numel() > 0
    return wanted and cuda_capability(rows_RK.device) >= _CAPABILITY


def lines_product(
    rows_RK: torch.Tensor,
    of_rows_RL: torch.Tensor,
    others_CK: torch.Tensor,
    of_others_CL: torch.Tensor,
    low: torch.dtype,
) -> torch.Tensor:
    """The product of rows (cast to `low`) with transposed others in e4m3, R C; the scales are powers of two, from the
    largest elements of their lines (`planner.models.experts.fp8.in_powers`)."""
    rows, of_rows = _cast(rows_RK, of_rows_RL, low)
    others, of_others = _cast(others_CK, of_others_CL, torch.float8_e4m3fn)
    made: torch.Tensor = torch._scaled_mm(rows, others.t(), of_rows, of_others, out_dtype=rows_RK.dtype)
    return made[: len(rows_RK), : len(others_CK)]


def _cast(values_RK: torch.Tensor, most_RL: torch.Tensor, low: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in 8 bits, contiguous, padded to whole lines and words, and the scales in tiles."""
    scale_RL = most_RL.float() / torch.finfo(low).max
    if has_narrow_cast(values_RK):
        bits_RK = narrow_cast(values_RK, scale_RL, low, (1, LINE))
    else:
        of_each = scale_RL.repeat_interleave(LINE, dim=1)[:, : values_RK.shape[1]]
        bits_RK = in_bytes(values_RK, of_each, low).contiguous()
    bits_RK = in_words(bits_RK, columns=LINE)
    scale_RL = F.pad(scale_RL, (0, 0, 0, len(bits_RK) - len(scale_RL)), value=1.0)
    return bits_RK, _in_tiles(scale_RL.to(torch.float8_e8m0fnu))


def _in_tiles(scale_RL: torch.Tensor) -> torch.Tensor:
    """Scales in the kernel's order, contiguous."""
    rows, lines = scale_RL.shape
    padded = F.pad(scale_RL.view(torch.uint8), (0, -lines % _LINES, 0, -rows % _ROWS))
    tiles = padded.view(padded.shape[0] // _ROWS, _ROWS // _ROUND, _ROUND, padded.shape[1] // _LINES, _LINES)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten().view(torch.float8_e8m0fnu)
