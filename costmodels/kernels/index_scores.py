"""Time of the scores of an indexer on one device: they tell which keys a query attends to, by many small heads.

    t = matmul(m = S H, n = T, k = D, batch B); its operands, B S H weights of heads and the result, B S T, both in
        float32, pass through memory                                                                   one kernel
    composed of a framework's operators: and 4 B S H T elements in float32                             several

B samples, S queries, H heads of D elements, T keys. A kernel adds up the heads of a query where it computes them, so
the scores of heads are never in memory (DeepGEMM's mqa_logits). A framework writes the scores, applies the relu and
reads them. The backward pass recomputes the forward pass and has two more products of the same size. A masked key saves
no work, because the mask is applied afterwards.

Monotone in every extent; c times as many samples, queries or heads take at most c times as long. No measurement
supports this formula.

Source: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, section 2.1.
"""

from dataclasses import dataclass

from costmodels.kernels.compute import operator_time
from costmodels.kernels.matmul import element_bytes, matmul_time
from costmodels.units import Quantity
from hardware_profiles import Device

_WIDE = 4.0
"""Bytes of a score."""
_PASSES, _PASSES_BACK = 4.0, 12.0
"""Number of times that the score of a head is written or read. Forward: product, relu twice, sum over heads. Backward:
the same again, the gradients of weights and of scores, and those of the relu, which two products read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexScoresShape:
    """Extents on one device: numbers, or arrays of one shape (K,).

    Attributes:
        batch: B, samples.
        queries: S, of a sample.
        heads: H, of the indexer.
        depth: D, elements of a head.
        keys: T, of a sample.
        composed: whether a framework computes the scores operator by operator, without a kernel of its own.
    """

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
        """Seconds of a product of this size, with the result summed over heads before it is written."""
        rows = self.queries * self.heads
        operands = element_bytes(dtype) * self.batch * (rows + self.keys) * self.depth
        moved = operands + _WIDE * self.batch * (rows + self.queries * self.keys)
        return matmul_time(rows, self.keys, self.depth, self.batch, dtype, device, moved)

    def passed(self, passes: float, device: Device) -> Quantity:
        """Seconds in which the scores of heads pass through memory `passes` times."""
        moved = passes * _WIDE * self._scores
        return operator_time(op_class="elementwise", flops=0.0, bytes_moved=moved, dtype="fp32", device=device)


def index_scores_time(shape: IndexScoresShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass, element-wise.

    Raises: as `costmodels.matmul_time`.
    """
    time = shape.product(dtype, device)
    return time + shape.passed(_PASSES, device) if shape.composed else time


def index_scores_backward_time(shape: IndexScoresShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the backward pass, element-wise; it recomputes the forward pass.

    Raises: as `costmodels.matmul_time`.
    """
    time = 3.0 * shape.product(dtype, device)
    return time + shape.passed(_PASSES_BACK, device) if shape.composed else time
