"""Products of experts in fp8, group by group, and tokens that are sent to experts in fp8.

    product    rows R I, matrices E I O      scales of a tensor   rows of an expert     matrix of an expert
                                             scales of a row      row, over I           column of a matrix, over I
                                             blocks               128 of I in a row     128 x 128 of a matrix
    outer      rows R I, rows R O            scales of a tensor   rows of an expert     rows of an expert
                                             all others           column of the rows of an expert, on both sides

A scale covers all rows of an expert, or its whole matrix, wherever pieces of them are: devices agree on the
largest element (`Agreement`). Operands are rounded to 8 bits and multiplied in fp32, or in float64 if the model is in
float64; `runtime.ops.fp8.fp8_groups` has the kernels of CUDA devices.

A token is packed to be sent: a byte for each element, in e4m3, and four for the scale of each 128 of them, as products
by blocks need it (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3). The results that come back from experts are not
packed.

Shape legend: N tokens, H hidden, R rows, E experts, I and O the dims of a matrix that are summed over and left.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from planner.fp8_recipes import BLOCK, Recipe
from planner.models.experts.grouped import grouped_outer, grouped_product, rows_by_group

Side = Literal["hidden", "width"]
"""A dim of experts: that of tokens ("hidden"), which is never cut, or that of an expert ("width")."""

Matrix = Literal["gate", "up", "down"]

_LOW = torch.float8_e4m3fn
_LEAST = 1e-12
"""The largest element counts as at least this, so that a tensor of zeros has a scale, too."""
_EXPONENTS = 127
"""Range of the exponents of scales in e8m0, both ways."""


def _alone(largest: torch.Tensor) -> torch.Tensor:
    return largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How devices agree on the largest elements of tensors that they have pieces of. `tokens` joins devices with other
    rows of the same experts, `width` devices with another part of each expert; this device's part begins at `first` of
    `whole` (0: it has all)."""

    tokens: Callable[[torch.Tensor], torch.Tensor] = _alone
    width: Callable[[torch.Tensor], torch.Tensor] = _alone
    first: int = 0
    whole: int = 0


ALONE = Agreement()


class PlainProducts:
    """Products of experts without fp8."""

    def product(
        self,
        rows_RI: torch.Tensor,
        matrices_EIO: torch.Tensor,
        counts_E: torch.Tensor,
        over: Side,
        *,
        of: Matrix,
        back: bool,
    ) -> torch.Tensor:
        """Each row times the matrix of its expert, R O, summed `over` that dim; `of` says which matrix it is, `back`
        that rows are gradients."""
        made_RO: torch.Tensor = grouped_product(rows_RI, matrices_EIO, counts_E)
        return made_RO

    def outer(
        self, rows_RI: torch.Tensor, rows_RO: torch.Tensor, counts_E: torch.Tensor, first: Side, *, of: Matrix
    ) -> torch.Tensor:
        """The gradient of matrices, E I O, from gradients, whose dim is `first`, and from the rows that were
        multiplied."""
        made_EIO: torch.Tensor = grouped_outer(rows_RI, rows_RO, counts_E)
        return made_EIO


PLAIN = PlainProducts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Products:
    """Products of experts in fp8 by a recipe."""

    recipe: Recipe
    agreement: Agreement = ALONE

    def product(
        self,
        rows_RI: torch.Tensor,
        matrices_EIO: torch.Tensor,
        counts_E: torch.Tensor,
        over: Side,
        *,
        of: Matrix,
        back: bool,
    ) -> torch.Tensor:
        low = self.recipe.gradients if back else "float8_e4m3fn"
        inside = self._cells(rows_RI, rows_RI.shape[1], over, each=False)
        each = self.recipe.scales in ("row", "line")
        outside = self._cells(rows_RI, matrices_EIO.shape[2], _other(over), each=each)
        if self.recipe.scales == "tensor":
            of_experts = self._of_experts(rows_RI, counts_E, over)
            of_rows = of_experts[:, 0].index_select(0, experts_of(counts_E, len(rows_RI)))
        else:
            of_rows = largest_in(rows_RI, EACH, inside)
            of_rows = self.agreement.width(of_rows) if inside.shared else of_rows
        of_matrices = largest_in(matrices_EIO, inside, outside)
        if inside.shared or outside.shared:
            of_matrices = self.agreement.width(of_matrices)
        if self.recipe.powers:
            of_rows, of_matrices = in_powers(of_rows, getattr(torch, low)), in_powers(of_matrices, _LOW)
        made_RO: torch.Tensor = fp8_grouped_product(
            rows_RI, of_rows, matrices_EIO, of_matrices, inside.at, outside.at, counts_E, low
        )
        return made_RO

    def outer(
        self, rows_RI: torch.Tensor, rows_RO: torch.Tensor, counts_E: torch.Tensor, first: Side, *, of: Matrix
    ) -> torch.Tensor:
        if not self.recipe.weight_gradients:
            return PLAIN.outer(rows_RI, rows_RO, counts_E, first, of=of)
        if self.recipe.scales == "tensor":
            scales = [
                self._of_experts(rows, counts_E, side) for rows, side in ((rows_RI, first), (rows_RO, _other(first)))
            ]
        else:
            scales = [self.agreement.tokens(largest_of_groups(rows, counts_E)) for rows in (rows_RI, rows_RO)]
            if self.recipe.powers:
                lows = getattr(torch, self.recipe.gradients), _LOW
                scales = [in_powers(most, low) for most, low in zip(scales, lows, strict=True)]
        made_EIO: torch.Tensor = fp8_grouped_outer(
            rows_RI, scales[0], rows_RO, scales[1], counts_E, self.recipe.gradients
        )
        return made_EIO

    def _of_experts(self, rows: torch.Tensor, counts_E: torch.Tensor, side: Side) -> torch.Tensor:
        """The largest element of all rows of each expert, E 1 1."""
        agreement = self.agreement
        found = agreement.tokens(largest_of_experts(rows, counts_E))
        return (agreement.width(found) if side == "width" and agreement.whole else found).unsqueeze(-1)

    def _cells(self, like: torch.Tensor, extent: int, side: Side, *, each: bool) -> "Cells":
        """The cells of a dim that have a scale of their own; with `each`, every index is a cell."""
        whole, first = (self.agreement.whole, self.agreement.first) if side == "width" else (0, 0)
        if each:
            return EACH
        if not self.recipe.block:
            return one_cell(extent, like.device, shared=whole > 0)
        return blocks_of(extent, first, whole, like.device, self.recipe.block)


def _other(side: Side) -> Side:
    return "width" if side == "hidden" else "hidden"


class Cells(NamedTuple):
    """`at`: which of `cells` cells each index of a dim is in; None where each is a cell. `shared`: whether other
    devices have parts of the same cells. `block`: the number of indices in a cell, if cells follow each other and only
    the last may be shorter; 0 where that is not known."""

    at: torch.Tensor | None
    cells: int
    shared: bool
    block: int = 0


EACH = Cells(None, 0, shared=False)
"""Each index by itself."""


def one_cell(extent: int, device: torch.device, *, shared: bool = False) -> Cells:
    """One cell for all indices."""
    return Cells(torch.zeros(extent, dtype=torch.long, device=device), 1, shared=shared, block=max(1, extent))


def blocks_of(
    extent: int, first: int, whole: int, device: torch.device, block: int = BLOCK, *, spread: bool = False
) -> Cells:
    """The blocks of a dim of which this device has `extent` from `first` on, of `whole` (0: all of it). If pieces
    consist of whole blocks, these are the device's own blocks; if not, or with `spread`, all blocks of the whole
    dim."""
    shared = whole > 0 and extent % block > 0
    if not shared and not (spread and whole):
        return Cells(torch.arange(extent, device=device) // block, -(-extent // block), shared=False, block=block)
    return Cells(torch.arange(first, first + extent, device=device) // block, -(-whole // block), shared=shared)


def experts_of(counts_E: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each row, R."""
    numbers = torch.arange(len(counts_E), device=counts_E.device)
    return torch.repeat_interleave(numbers, counts_E, output_size=rows)


def wide(values: torch.Tensor) -> torch.Tensor:
    """The values in float32 at least."""
    return values if values.dtype == torch.float64 else values.float()


def largest_in(values: torch.Tensor, rows: Cells, columns: Cells) -> torch.Tensor:
    """The largest magnitude of each cell of ... A B, in float32 at least."""
    found, left = values.detach(), [columns, rows]
    for place, dim in enumerate((-1, -2)):
        if left[place].block and values.shape[dim]:
            found, left[place] = _of_blocks(found, dim, left[place]), EACH
    if all(cells.at is None for cells in left):
        return wide(found.abs())
    made: torch.Tensor = largest(found, left[1].at, left[1].cells, left[0].at, left[0].cells)
    return made


def _of_blocks(values: torch.Tensor, dim: int, cells: Cells) -> torch.Tensor:
    """The largest magnitude of cells that follow each other, without a copy of the values."""
    extent = values.shape[dim]
    full, rest = divmod(extent, cells.block)
    found = list[torch.Tensor]()
    if full:
        shape = list(values.shape)
        shape[dim:] = [full, cells.block, *shape[dim:][1:]]
        whole = values.narrow(dim, 0, extent - rest).view(shape)
        found.append(torch.linalg.vector_norm(whole, math.inf, dim=dim))
    if rest:
        part = values.narrow(dim, extent - rest, rest)
        found.append(torch.linalg.vector_norm(part, math.inf, dim=dim, keepdim=True))
    return found[0] if len(found) == 1 else torch.cat(found, dim=dim)


def largest_of_experts(rows: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """The largest magnitude among all rows of each expert, E 1; 0 without rows."""
    most_R1 = largest_in(rows, EACH, one_cell(rows.shape[1], rows.device))
    made: torch.Tensor = largest(most_R1, experts_of(counts_E, len(rows)), len(counts_E), None, 0)
    return made


@torch.library.custom_op("planner::largest_of_groups", mutates_args=())
def largest_of_groups(rows_RC: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each column of the rows of each group, E C, in float32 at least; 0 without rows."""
    made_EC = torch.zeros((len(counts_E), rows_RC.shape[1]), dtype=rows_RC.dtype, device=rows_RC.device)
    for group, part in rows_by_group(counts_E):
        if part.stop > part.start:
            made_EC[group] = torch.linalg.vector_norm(rows_RC[part], math.inf, dim=0)
    return wide(made_EC).clone()


@largest_of_groups.register_fake
def _(rows_RC: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(rows_RC.dtype, torch.float32)
    return rows_RC.new_empty((counts_E.shape[0], rows_RC.shape[1]), dtype=dtype)


@torch.library.custom_op("planner::largest", mutates_args=())
def largest(
    values: torch.Tensor, rows: torch.Tensor | None, row_cells: int, columns: torch.Tensor | None, column_cells: int
) -> torch.Tensor:
    """The largest magnitude of each cell of ... A B, in float32 at least: `rows` and `columns` give the cell of each
    index of A and of B, with the number of cells; None: each index is a cell. 0 for an empty cell."""
    found = values.abs()
    for dim, at, cells in ((-1, columns, column_cells), (-2, rows, row_cells)):
        if at is not None:
            shape = list(found.shape)
            shape[dim] = cells
            index = at.view(-1, *(1,) * (-1 - dim)).expand(found.shape)
            found = found.new_zeros(shape).scatter_reduce_(dim, index, found, "amax")
    return wide(found).clone()


@largest.register_fake
def _(
    values: torch.Tensor, rows: torch.Tensor | None, row_cells: int, columns: torch.Tensor | None, column_cells: int
) -> torch.Tensor:
    shape = list(values.shape)
    shape[-1] = shape[-1] if columns is None else column_cells
    shape[-2] = shape[-2] if rows is None else row_cells
    return values.new_empty(shape, dtype=torch.promote_types(values.dtype, torch.float32))


def rounded(values: torch.Tensor, most: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """Values rounded to 8 bits, in float32 at least, where the largest are `most`; values that are already in 8 bits by
    these scales are only converted back."""
    scale = scale_of(most, low)
    bits = values if values.dtype == low else in_bytes(values, scale, low)
    return bits.to(scale.dtype).mul_(scale)


def in_powers(most: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """The largest elements for which scales are the next powers of two, so that nothing is cut off (the scales of
    NVIDIA's recipe, Mishra et al. 2025, arXiv 2506.08027; e8m0 has the exponents -127 to 127)."""
    mantissa, exponent = torch.frexp(scale_of(most, low))
    exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(-_EXPONENTS, _EXPONENTS)
    return torch.ldexp(torch.full_like(most, torch.finfo(low).max), exponent)


def scale_of(most: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """The divisor of elements whose largest are `most`."""
    return most.clamp(min=_LEAST) / torch.finfo(low).max


def in_bytes(values: torch.Tensor, scale: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """Values over their scale, rounded to a dtype of 8 bits; values beyond its range are clamped."""
    top = torch.finfo(low).max
    return (wide(values) / scale).clamp_(-top, top).to(low)


def _cell(most: torch.Tensor, at: torch.Tensor | None, dim: int) -> torch.Tensor:
    """The largest element of the cell of every index."""
    return most if at is None else most.index_select(dim, at)


@torch.library.custom_op("planner::fp8_grouped_product", mutates_args=())
def fp8_grouped_product(
    rows_RI: torch.Tensor,
    of_rows: torch.Tensor,
    matrices_EIO: torch.Tensor,
    of_matrices: torch.Tensor,
    inside: torch.Tensor,
    outside: torch.Tensor | None,
    counts_E: torch.Tensor,
    low: str,
) -> torch.Tensor:
    """Each row times the matrix of its group, R O, both rounded to 8 bits, the rows to `low`, by their largest elements
    in cells of I and of O."""
    made_RO = rows_RI.new_empty((rows_RI.shape[0], matrices_EIO.shape[2]))
    for group, part in rows_by_group(counts_E):
        if part.stop > part.start:
            made_RO[part] = product_in_fp32(
                rows_RI[part], of_rows[part], matrices_EIO[group], of_matrices[group], inside, outside, low
            )
    return made_RO


def product_in_fp32(
    rows_RI: torch.Tensor,
    of_rows: torch.Tensor,
    matrix_IO: torch.Tensor,
    of_matrix: torch.Tensor,
    inside: torch.Tensor,
    outside: torch.Tensor | None,
    low: str,
) -> torch.Tensor:
    """Rows times a matrix, R O, both rounded to 8 bits, the rows to `low`, by their largest elements in cells of I and
    of O."""
    rows = rounded(rows_RI, _cell(of_rows, inside, 1), getattr(torch, low))
    matrix = rounded(matrix_IO, _cell(_cell(of_matrix, inside, 0), outside, 1), _LOW)
    return (rows @ matrix).to(rows_RI.dtype)


@fp8_grouped_product.register_fake
def _(rows_RI: torch.Tensor, of_rows: torch.Tensor, matrices_EIO: torch.Tensor, *_others: object) -> torch.Tensor:
    return rows_RI.new_empty((rows_RI.shape[0], matrices_EIO.shape[2]))


@torch.library.custom_op("planner::fp8_blocks_product", mutates_args=())
def fp8_blocks_product(
    rows_TI: torch.Tensor,
    of_rows: torch.Tensor,
    weight_OI: torch.Tensor,
    of_weight: torch.Tensor,
    inside: torch.Tensor,
    outside: torch.Tensor | None,
    low: str,
) -> torch.Tensor:
    """The product of rows with a transposed weight, T O: rows rounded to `low`, the weight to e4m3, by their largest
    elements in blocks of I and of O, or only of I."""
    return product_in_fp32(rows_TI, of_rows, weight_OI.t(), of_weight.t(), inside, outside, low)


@fp8_blocks_product.register_fake
def _(rows_TI: torch.Tensor, of_rows: torch.Tensor, weight_OI: torch.Tensor, *_others: object) -> torch.Tensor:
    return rows_TI.new_empty((rows_TI.shape[0], weight_OI.shape[0]))


@torch.library.custom_op("planner::fp8_grouped_outer", mutates_args=())
def fp8_grouped_outer(
    rows_RI: torch.Tensor,
    of_rows_EI: torch.Tensor,
    others_RO: torch.Tensor,
    of_others_EO: torch.Tensor,
    counts_E: torch.Tensor,
    low: str,
) -> torch.Tensor:
    """The sum over the rows of each group of their outer products, E I O, of rows rounded to `low` and others to e4m3;
    zeros for a group without rows."""
    made_EIO = rows_RI.new_empty((counts_E.shape[0], rows_RI.shape[1], others_RO.shape[1]))
    for group, part in rows_by_group(counts_E):
        rows = rounded(rows_RI[part], of_rows_EI[group], getattr(torch, low))
        others = rounded(others_RO[part], of_others_EO[group], _LOW)
        made_EIO[group] = (rows.t() @ others).to(made_EIO.dtype)
    return made_EIO


@fp8_grouped_outer.register_fake
def _(
    rows_RI: torch.Tensor,
    of_rows_EI: torch.Tensor,
    others_RO: torch.Tensor,
    of_others_EO: torch.Tensor,
    counts_E: torch.Tensor,
    low: str,
) -> torch.Tensor:
    return rows_RI.new_empty((counts_E.shape[0], rows_RI.shape[1], others_RO.shape[1]))


@torch.library.custom_op("planner::packed_tokens", mutates_args=())
def packed_tokens(x_NH: torch.Tensor) -> torch.Tensor:
    """Tokens as bytes: H of elements in e4m3, and four for the scale of each 128 of them, in float32."""
    blocks = blocks_of(x_NH.shape[1], 0, 0, x_NH.device)
    scale = scale_of(largest_in(x_NH, EACH, blocks).float(), _LOW)
    low = in_bytes(x_NH, _cell(scale, blocks.at, 1), _LOW)
    return torch.cat((low.view(torch.uint8), scale.view(torch.uint8)), dim=1)


@packed_tokens.register_fake
def _(x_NH: torch.Tensor) -> torch.Tensor:
    return x_NH.new_empty((x_NH.shape[0], packed_bytes(x_NH.shape[1])), dtype=torch.uint8)


@torch.library.custom_op("planner::unpacked_tokens", mutates_args=())
def unpacked_tokens(packed: torch.Tensor, hidden: int, like: torch.Tensor) -> torch.Tensor:
    """The tokens again, N H, in the dtype of `like`."""
    scale = packed[:, hidden:].contiguous().view(torch.float32)
    low = packed[:, :hidden].contiguous().view(_LOW)
    blocks = blocks_of(hidden, 0, 0, packed.device)
    at_least = torch.promote_types(like.dtype, torch.float32)
    return (low.to(at_least) * _cell(scale, blocks.at, 1).to(at_least)).to(like.dtype)


@unpacked_tokens.register_fake
def _(packed: torch.Tensor, hidden: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((packed.shape[0], hidden))


def packed_bytes(hidden: int) -> int:
    """Bytes of a packed token."""
    return hidden + 4 * -(-hidden // BLOCK)
