"""Products of experts in fp8 with delayed scales, one for each expert and each of its tensors.

    x ─ gate ─> g ─┐                        in e4m3: the input (x), gate, up, down, and p, the input of down
      ─ up ───> u ─┴─> p ─ down ─> result   in e5m2: the gradients of the result, of g and of u

These are eight tensors. Experts without a gate have six: no gate, and no gradient of g.

An expert that gets no row in a step has 0 as its largest element of rows and gradients. Operands are rounded and
multiplied as in other recipes (`planner.models.experts.fp8`); scales are read, and largest elements noted,
through `Scales`, which the runtime keeps (`runtime.ops.fp8.delayed_scales`). Devices exchange nothing for it.

Source: Transformer Engine, `GroupedLinear` under `DelayedScaling`, which has a scale for each group as well.

Shape legend: R rows, E experts, I and O the dims of a matrix that are summed over and left.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from planner.fp8_recipes import Recipe
from planner.models.experts.fp8 import (
    Matrix,
    Side,
    experts_of,
    fp8_grouped_outer,
    fp8_grouped_product,
    largest_of_experts,
)

if TYPE_CHECKING:
    from planner.models.experts.rows import Kept, Matrices

_X = 0
"""The place of the input among the tensors; then come the first matrices, down, p, and the gradients of the result and
of the first matrices' results."""
_LOW = "float8_e4m3fn"


class Scales(Protocol):
    """The scales of the experts of a device."""

    def scale(self, tensor: int) -> torch.Tensor:
        """The divisor of the elements of a tensor for each expert, E."""

    def note(self, tensor: int, largest_E: torch.Tensor) -> None:
        """Note the largest elements of a tensor in this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedProducts:
    """Products by these `scales`, of experts whose `first` matrices are gate and up, or only up."""

    recipe: Recipe
    scales: Scales
    first: tuple[Matrix, ...]

    def see(self, kept: "Kept", counts_E: torch.Tensor, matrices: "Matrices") -> None:
        """Note the largest elements of the operands of a forward pass, before a backward pass."""
        for of, rows in ((self.first[0], kept.rows), ("down", kept.product)):
            self.scales.note(self._rows(of), _of_experts(rows, counts_E))
        for of, matrix in zip((*self.first, "down"), (*matrices.first, matrices.down), strict=True):
            self.scales.note(self._matrix(of), matrix.abs().amax(dim=(1, 2)))

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
        """As `planner.models.experts.fp8.PlainProducts.product`."""
        low = self.recipe.gradients if back else _LOW
        of_rows = self._most(self._gradient(of) if back else self._rows(of), low)
        of_matrices = self._most(self._matrix(of), _LOW)
        inside, outside = (
            torch.zeros(extent, dtype=torch.long, device=rows_RI.device) for extent in matrices_EIO.shape[1:]
        )
        made_RO: torch.Tensor = fp8_grouped_product(
            rows_RI,
            of_rows.index_select(0, experts_of(counts_E, len(rows_RI))).unsqueeze(1),
            matrices_EIO,
            of_matrices.view(-1, 1, 1),
            inside,
            outside,
            counts_E,
            low,
        )
        return made_RO

    def outer(
        self, rows_RI: torch.Tensor, rows_RO: torch.Tensor, counts_E: torch.Tensor, first: Side, *, of: Matrix
    ) -> torch.Tensor:
        """As `planner.models.experts.fp8.PlainProducts.outer`, which is called for every gradient of rows."""
        self.scales.note(self._gradient(of), _of_experts(rows_RI, counts_E))
        low = self.recipe.gradients
        of_rows, of_others = self._most(self._gradient(of), low), self._most(self._rows(of), _LOW)
        made_EIO: torch.Tensor = fp8_grouped_outer(
            rows_RI, of_rows.view(-1, 1, 1), rows_RO, of_others.view(-1, 1, 1), counts_E, low
        )
        return made_EIO

    def _matrix(self, of: Matrix) -> int:
        """The place of a matrix among the tensors."""
        return _X + 1 + (len(self.first) if of == "down" else self.first.index(of))

    def _rows(self, of: Matrix) -> int:
        """The place of the rows that a matrix multiplies."""
        return self._matrix("down") + 1 if of == "down" else _X

    def _gradient(self, of: Matrix) -> int:
        """The place of the gradient of a matrix's result."""
        result = self._rows("down") + 1
        return result if of == "down" else result + 1 + self.first.index(of)

    def _most(self, tensor: int, low: str) -> torch.Tensor:
        """The largest elements for which the scales of a tensor are made, E."""
        return self.scales.scale(tensor) * torch.finfo(getattr(torch, low)).max


def _of_experts(rows: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """The largest element of the rows of each expert, E; 0 without rows."""
    return largest_of_experts(rows, counts_E).flatten()
