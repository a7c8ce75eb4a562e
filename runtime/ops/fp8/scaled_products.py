"""FP8 products by torch's scaled product, with one scale per operand or one per row.

    rows R K ──── / scale, round ──> 8 bits ─┐
                                           ├─> `torch._scaled_mm` ─> R C, accumulated in fp32
    others C K ── / scale, round ──> 8 bits ─┘

CPUs and CUDA devices of capability 8.9 or more have such products. CUDA's need extents that are multiples of 16:
operands are zero-padded, which changes no sum, and the result is cut. Where there is no such product, the same rounded
operands are multiplied in fp32 (in float64 for a model in float64).

Shape legend: R and C rows of the operands, K inner dim (summed over).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from planner.models.experts.fp8 import scale_of, wide
from runtime.comm import collectives
from runtime.ops.fp8.capability import IN_FP8, WORDS, cuda_capability
from runtime.ops.fp8.narrow_weights import in_8_bits, largest_of

Groups = Sequence[dist.ProcessGroup]


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a product, (R, K), summed over K, and its 8-bit dtype."""

    rows: torch.Tensor
    dtype: torch.dtype

    def scale(self, groups: Groups) -> torch.Tensor:
        """One scale for the whole operand, ()."""
        return self._scale(largest_of(self.rows), groups)

    def scales(self, groups: Groups) -> torch.Tensor:
        """A scale for every row, (R, 1)."""
        return self._scale(largest_of(self.rows, dim=1), groups)

    def _scale(self, largest: torch.Tensor, groups: Groups) -> torch.Tensor:
        largest = wide(largest)
        for group in groups:
            largest = collectives.all_reduce_max(largest, group)
        return scale_of(largest, self.dtype)

    def cast(self, scale: torch.Tensor) -> torch.Tensor:
        """The operand in 8 bits, (R, K), contiguous; unchanged where it is in 8 bits already."""
        if self.rows.dtype == self.dtype:
            return self.rows.contiguous()
        return in_8_bits(self.rows, scale, self.dtype).contiguous()


def scaled_product(
    left: Operand, right: Operand, scales: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The product of the left operand with the transposed right one, in `dtype`, (R, C)."""
    one_RK, other_CK = left.cast(scales[0]), right.cast(scales[1])
    if not has_scaled_product(one_RK, dtype, by_row=scales[0].ndim > 0):
        wide = scales[0].dtype
        return ((one_RK.to(wide) * scales[0]) @ (other_CK.to(wide) * scales[1]).t()).to(dtype)
    rows, columns = len(one_RK), len(other_CK)
    if one_RK.device.type != "cpu":
        one_RK, other_CK = in_words(one_RK), in_words(other_CK)
    first, second = (_as_read(scale, len(each)) for scale, each in zip(scales, (one_RK, other_CK), strict=True))
    turned = second.t() if second.ndim else second
    made: torch.Tensor = torch._scaled_mm(one_RK, other_CK.t(), first, turned, out_dtype=dtype)
    return made[:rows, :columns]


def in_words(bits_RK: torch.Tensor, rows: int = WORDS, columns: int = WORDS) -> torch.Tensor:
    """An operand of CUDA's products, zero-padded to multiples of `rows` and `columns`."""
    lacks = [-extent % word for extent, word in zip(bits_RK.shape, (rows, columns), strict=True)]
    if not any(lacks):
        return bits_RK
    padded = F.pad(bits_RK.view(torch.uint8), (0, lacks[1], 0, lacks[0]))  # a byte of zeros is a zero
    return padded.view(bits_RK.dtype)


def _as_read(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales in the form that CUDA's products read, one for every row of a padded operand; a view into a larger tensor
    may be misaligned, so it is copied."""
    if scale.ndim and len(scale) < rows:
        return F.pad(scale, (0, 0, 0, rows - len(scale)), value=1.0)
    scale = scale.contiguous()
    return scale.clone() if scale.is_cuda and scale.data_ptr() % WORDS else scale


def has_scaled_product(operand: torch.Tensor, dtype: torch.dtype, *, by_row: bool) -> bool:
    """Whether the device has a product of such operands with results of this dtype; CUDA's with a scale per row have
    results in bf16 only (PyTorch 2.13)."""
    if not operand.numel():
        return False
    if operand.device.type == "cpu":
        return dtype in (torch.float32, torch.bfloat16)
    if cuda_capability(operand.device) < IN_FP8:
        return False
    return dtype in ((torch.bfloat16,) if by_row else (torch.bfloat16, torch.float16, torch.float32))
