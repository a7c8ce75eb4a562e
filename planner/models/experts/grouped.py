"""Grouped products: rows that lie one group after the other, each group with a matrix of its own.

    rows  R I   x  matrices  E I O  ->  R O          groups of `counts` rows each, which sum up to R
    rows  R I, R O                  ->  E I O        for each group the product over its rows

Devices that have grouped products run all groups in one kernel, which needs rows of a multiple of 16 bytes; everywhere
else there is one product for each group that has rows. Autograd records nothing.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

_ALIGNED = 16
"""The strides of operands of grouped products must be multiples of this many bytes (PyTorch 2.13)."""

_GROUPED = (torch.bfloat16, torch.float16, torch.float32)


_ON_HOST = "counts_on_host"
"""Attribute of a tensor of counts: the version of the tensor, and the counts as the host knows them."""


def rows_by_group(counts_E: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Every group with its rows. The host asks the device for the counts only once: it waits for everything launched
    before, and the products of a layer have the same counts."""
    version, counts = getattr(counts_E, _ON_HOST, (None, ()))
    if version != counts_E._version:
        counts = counts_E.tolist()
        setattr(counts_E, _ON_HOST, (counts_E._version, counts))
    start = 0
    for group, count in enumerate(counts):
        yield group, slice(start, start + count)
        start += count


@torch.library.custom_op("planner::grouped_product", mutates_args=())
def grouped_product(rows_RI: torch.Tensor, matrices_EIO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Each row times the matrix of its group, R O."""
    if _has_kernel(rows_RI, matrices_EIO):
        return F.grouped_mm(rows_RI, matrices_EIO, offs=counts_E.cumsum(0).to(torch.int32))
    made_RO = rows_RI.new_empty((rows_RI.shape[0], matrices_EIO.shape[2]))
    for group, rows in rows_by_group(counts_E):
        if rows.stop > rows.start:
            torch.mm(rows_RI[rows], matrices_EIO[group], out=made_RO[rows])
    return made_RO


@grouped_product.register_fake
def _(rows_RI: torch.Tensor, matrices_EIO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    return rows_RI.new_empty((rows_RI.shape[0], matrices_EIO.shape[2]))


@torch.library.custom_op("planner::grouped_outer", mutates_args=())
def grouped_outer(rows_RI: torch.Tensor, rows_RO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """The sum over the rows of each group of their outer products, E I O; zeros for a group without rows."""
    if _has_kernel(rows_RI, rows_RO):
        return F.grouped_mm(rows_RI.t(), rows_RO, offs=counts_E.cumsum(0).to(torch.int32))
    made_EIO = rows_RI.new_empty((counts_E.shape[0], rows_RI.shape[1], rows_RO.shape[1]))
    for group, rows in rows_by_group(counts_E):
        torch.mm(rows_RI[rows].t(), rows_RO[rows], out=made_EIO[group])
    return made_EIO


@grouped_outer.register_fake
def _(rows_RI: torch.Tensor, rows_RO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    return rows_RI.new_empty((counts_E.shape[0], rows_RI.shape[1], rows_RO.shape[1]))


def _has_kernel(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the device has a grouped product for these operands."""
    words = _ALIGNED // first.element_size()
    aligned = all(stride % words == 0 for tensor in (first, second) for stride in tensor.stride() if stride != 1)
    return first.device.type == "cuda" and first.dtype in _GROUPED and aligned and first.shape[0] > 0
