"""Products of experts in fp8 by the kernels of a CUDA device, one expert after the other.

    product    rows R I  x  matrix I O    one scale for either          torch's scaled product
                                          one for each row and column   the same
                                          128 of I, 128 x 128           the kernel of Hopper
                                          32 of I, on both sides        the kernel of Blackwell
    outer      rows R I, rows R O         of columns, or one for all    torch's scaled product, over R

These are the kernels of linear layers in fp8, and round as they do. What a device has no kernel for it multiplies in
fp32, as `planner.models.fp8_experts` does everywhere else; here the operators of that module get what CUDA runs.

Shape legend: R rows, E experts, I what is summed over, O what is left; J and P blocks of 128 of I and of O.
"""

import torch

from planner.fp8_recipes import BLOCK, FORWARD, LINE
from planner.models.fp8_experts import fp8_grouped_outer, fp8_grouped_product, product_in_fp32, scale_of
from planner.models.grouped import rows_by_group
from runtime.ops.blocks_product import blocks_product, has_blocks_product
from runtime.ops.lines_product import has_lines_product, lines_product
from runtime.ops.scaled_products import Operand, scaled_product

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
    """`planner.models.fp8_experts.fp8_grouped_product`."""
    made_RO = rows_RI.new_empty((rows_RI.shape[0], matrices_EIO.shape[2]))
    for group, part in rows_by_group(counts_E):
        if part.stop > part.start:
            made_RO[part] = _product(
                rows_RI[part], of_rows[part], matrices_EIO[group], of_matrices[group], inside, outside, low
            )
    return made_RO


def _product(
    rows_RI: torch.Tensor,
    of_rows: torch.Tensor,
    matrix_IO: torch.Tensor,
    of_matrix: torch.Tensor,
    inside: torch.Tensor,
    outside: torch.Tensor | None,
    low: str,
) -> torch.Tensor:
    """Rows times the matrix of their expert, R O."""
    dtype, matrix_OI = getattr(torch, low), matrix_IO.t()
    one_of_rows, one_of_matrix = of_rows.shape[1] == 1, of_matrix.shape[0] == 1
    if one_of_rows and one_of_matrix and (outside is None or of_matrix.shape[1] == 1):
        scales = scale_of(of_rows, dtype), scale_of(of_matrix.t(), _LOW)
        if outside is not None and max(matrix_IO.shape) > BLOCK:  # more than a block: all rows of an expert have one
            scales = scales[0][0, 0], scales[1][0, 0]
        elif outside is not None:
            scales = scales[0], scales[1].expand(len(matrix_OI), 1)
        return scaled_product(Operand(rows_RI, dtype), Operand(matrix_OI, _LOW), scales, rows_RI.dtype)
    if _is_whole(matrix_OI.shape[1], of_rows.shape[1], LINE) and outside is None:
        if has_lines_product(rows_RI, matrix_OI):
            return lines_product(rows_RI, of_rows, matrix_OI, of_matrix.t(), dtype)
    elif outside is not None and has_blocks_product(rows_RI, matrix_OI):
        extents = zip(matrix_OI.shape, reversed(of_matrix.shape), strict=True)
        if all(_is_whole(extent, cells, BLOCK) for extent, cells in extents):
            return blocks_product(rows_RI, of_rows, matrix_OI, of_matrix.t(), dtype)
    return product_in_fp32(rows_RI, of_rows, matrix_IO, of_matrix, inside, outside, low)


def _is_whole(extent: int, cells: int, block: int) -> bool:
    """Whether cells are the blocks of what is here, and not of more of which it is a part."""
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
    """`planner.models.fp8_experts.fp8_grouped_outer`."""
    dtype = getattr(torch, low)
    made_EIO = rows_RI.new_empty((counts_E.shape[0], rows_RI.shape[1], others_RO.shape[1]))
    for group, part in rows_by_group(counts_E):
        scales = []
        for most, each in ((of_rows_EI[group], dtype), (of_others_EO[group], _LOW)):
            scale = scale_of(most, each)
            scales.append(scale.reshape(()) if scale.numel() == 1 else scale.view(-1, 1))
        pair = Operand(rows_RI[part].t(), dtype), Operand(others_RO[part].t(), _LOW)
        if scales[0].ndim != scales[1].ndim:  # one of them has one column
            scales = [scale.expand(len(one.rows), 1) for scale, one in zip(scales, pair, strict=True)]
        made_EIO[group] = scaled_product(*pair, (scales[0], scales[1]), rows_RI.dtype)
    return made_EIO
