"""FP8 products of experts by the kernels of a CUDA device, one expert after the other.

    product    rows R I  x  matrix I O    one scale per operand         torch's scaled product
                                          one per row and column        the same
                                          128 of I, 128 x 128           the Hopper kernel
                                          32 of I, on both sides        the Blackwell kernel
    outer      rows R I, rows R O         per column, or one for all    torch's scaled product, over R

These are the kernels of linear layers in fp8, and they round the same way. Products without a kernel on the device are
computed in fp32, as `planner.models.experts.fp8` does on all other devices; this file registers the CUDA
implementations of that module's operators.

Shape legend: R rows, E experts, I inputs (summed over), O outputs; J and P blocks of 128 of I and of O.
"""

import torch

from planner.fp8_recipes import BLOCK, FORWARD, LINE
from planner.models.experts.fp8 import fp8_grouped_outer, fp8_grouped_product, product_in_fp32, scale_of
from planner.models.experts.grouped import rows_by_group
from runtime.ops.fp8.blocks_product import blocks_product, has_blocks_product
from runtime.ops.fp8.lines_product import has_lines_product, lines_product
from runtime.ops.fp8.scaled_products import Operand, scaled_product

_LOW: torch.dtype = getattr(torch, FORWARD)


@fp8_grouped_product.register_kernel("cuda")
def grouped_product(
    rows_RI: torch.Tensor,
    of_rows: torch.Tensor,
    matrices_EIO: torch.Tensor,
    of_matrices: torch.Tensor,
    inside: torch.Tensor,
    outside: torch.Tensor | None,
    counts_E: torch.Tensor,
    low: str,
) -> torch.Tensor:
    """`planner.models.experts.fp8.fp8_grouped_product`."""
    made_RO = rows_RI.new_empty((rows_RI.shape[0], matrices_EIO.shape[2]))
    scales = None
    if of_rows.shape[1] == of_matrices.shape[1] == 1 and (outside is None or of_matrices.shape[2] == 1):
        scales = scale_of(of_rows, getattr(torch, low)), scale_of(of_matrices.transpose(1, 2), _LOW)  # of all experts
    for group, part in rows_by_group(counts_E):
        if part.stop > part.start:
            rows, matrix_IO = rows_RI[part], matrices_EIO[group]
            if scales is None:
                made_RO[part] = _product(rows, of_rows[part], matrix_IO, of_matrices[group], inside, outside, low)
            else:
                own = _own_scales(scales[0][part], scales[1][group], matrix_IO, alone=outside is not None)
                pair = Operand(rows, getattr(torch, low)), Operand(matrix_IO.t(), _LOW)
                made_RO[part] = scaled_product(*pair, own, rows.dtype)
    return made_RO


def _own_scales(
    of_rows: torch.Tensor, of_matrix: torch.Tensor, matrix_IO: torch.Tensor, *, alone: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of one expert in the form of a scaled product: where its matrix has one per column, or a single one
    (`alone`): that of a block, or, if there are more, combined with one for all its rows."""
    if alone and max(matrix_IO.shape) > BLOCK:
        return of_rows[0, 0], of_matrix[0, 0]
    return of_rows, of_matrix.expand(matrix_IO.shape[1], 1)


def _product(
    rows_RI: torch.Tensor,
    of_rows: torch.Tensor,
    matrix_IO: torch.Tensor,
    of_matrix: torch.Tensor,
    inside: torch.Tensor,
    outside: torch.Tensor | None,
    low: str,
) -> torch.Tensor:
    """Rows times the matrix of their expert, R O, with scales by blocks or by lines."""
    dtype, matrix_OI = getattr(torch, low), matrix_IO.t()
    if _is_whole(matrix_OI.shape[1], of_rows.shape[1], LINE) and outside is None:
        if has_lines_product(rows_RI, matrix_OI):
            return lines_product(rows_RI, of_rows, matrix_OI, of_matrix.t(), dtype)
    elif outside is not None and has_blocks_product(rows_RI, matrix_OI):
        extents = zip(matrix_OI.shape, reversed(of_matrix.shape), strict=True)
        if all(_is_whole(extent, cells, BLOCK) for extent, cells in extents):
            return blocks_product(rows_RI, of_rows, matrix_OI, of_matrix.t(), dtype)
    return product_in_fp32(rows_RI, of_rows, matrix_IO, of_matrix, inside, outside, low)


def _is_whole(extent: int, cells: int, block: int) -> bool:
    """Whether the cells are blocks of exactly this extent, not of a larger one of which it is a part."""
    return cells == -(-extent // block)


@fp8_grouped_outer.register_kernel("cuda")
def grouped_outer(
    rows_RI: torch.Tensor,
    of_rows_EI: torch.Tensor,
    others_RO: torch.Tensor,
    of_others_EO: torch.Tensor,
    counts_E: torch.Tensor,
    low: str,
) -> torch.Tensor:
    """`planner.models.experts.fp8.fp8_grouped_outer`."""
    dtype = getattr(torch, low)
    made_EIO = rows_RI.new_empty((counts_E.shape[0], rows_RI.shape[1], others_RO.shape[1]))
    both = scale_of(of_rows_EI, dtype), scale_of(of_others_EO, _LOW)  # of all experts at once
    for group, part in rows_by_group(counts_E):
        scales = [
            scale.reshape(()) if scale.numel() == 1 else scale.view(-1, 1) for scale in (one[group] for one in both)
        ]
        pair = Operand(rows_RI[part].t(), dtype), Operand(others_RO[part].t(), _LOW)
        if scales[0].ndim != scales[1].ndim:  # one of them has one column
            scales = [scale.expand(len(one.rows), 1) for scale, one in zip(scales, pair, strict=True)]
        made_EIO[group] = scaled_product(*pair, (scales[0], scales[1]), rows_RI.dtype)
    return made_EIO
