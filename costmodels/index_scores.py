"""Time of the scores of an indexer on one device: which keys a query wants, by many small heads.

    t = matmul(m = S H, n = T, k = D, batch B), of which operands and the result B S T pass memory     one kernel
    composed of a framework's operators: and 4 B S H T elements in float32                             several

B samples, S queries, H heads of D elements, T keys. A kernel adds the heads of a query up where they are computed, so
scores of heads are never in memory (DeepGEMM's mqa_logits); a framework writes them, bends and reads them. It is
backward computed again, and has two products of the same size. No work is saved where a key is hidden: which ones are
is decided behind it.

Monotone in every extent; c times as many samples, queries or heads take at most c times as long. Nothing measured
stands behind it.

Source: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, section 2.1.
"""

from dataclasses import dataclass

from costmodels.compute import operator_time
from costmodels.matmul import element_bytes, matmul_time
from costmodels.units import Quantity
from hardware_profiles import Device

_WIDE = 4.0
"""Bytes of a score."""
_PASSES, _PASSES_BACK = 4.0, 12.0
"""Times that a score of a head is written or read: product, relu twice, sum over heads; and backward the same again,
the gradients of weights and of scores, and those of relu, which two products read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexScoresShape:
    """What one device has: numbers, or arrays of one shape (K,). `composed` of a framework's operators, where there is
    no kernel."""

    batch: Quantity
    queries: Quantity
    heads: Quantity
    depth: Quantity
    keys: Quantity
    composed: bool = False

    @property
    def _scores(self) -> Quantity:
        return self.batch * self.queries * self.heads * self.keys

    def product(self, dtype: str, device: Device) -> Quantity:
        """Seconds of a product of this size whose result is summed over heads before it is written."""
        rows = self.queries * self.heads
        operands = element_bytes(dtype) * self.batch * (rows + self.keys) * self.depth
        moved = operands + _WIDE * self.batch * (rows + self.queries * self.keys)
        return matmul_time(rows, self.keys, self.depth, self.batch, dtype, device, moved)

    def passed(self, passes: float, device: Device) -> Quantity:
        """Seconds in which scores of heads pass memory."""
        moved = passes * _WIDE * self._scores
        return operator_time(op_class="elementwise", flops=0.0, bytes_moved=moved, dtype="fp32", device=device)


def index_scores_time(shape: IndexScoresShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass."""
    time = shape.product(dtype, device)
    return time + shape.passed(_PASSES, device) if shape.composed else time


def index_scores_backward_time(shape: IndexScoresShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the backward pass, which computes the forward pass once more."""
    time = 3.0 * shape.product(dtype, device)
    return time + shape.passed(_PASSES_BACK, device) if shape.composed else time
