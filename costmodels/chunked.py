"""Scans along a sequence that are computed chunk by chunk: what their shapes have in common."""

from dataclasses import dataclass

import numpy as np

from costmodels.units import Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """What one device has: samples, steps of each, and the steps that are computed at a time."""

    batch: Quantity
    steps: Quantity
    chunk: int

    @property
    def each(self) -> Quantity:
        """The steps of a chunk."""
        return np.minimum(self.chunk, self.steps) + 0 * self.batch

    @property
    def chunks(self) -> Quantity:
        """How many follow each other."""
        found: Quantity = np.ceil(self.steps / self.each)
        return found


def launched_by_chunks(
    chunks: Quantity, composed: bool, counts: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[Quantity, Quantity]:
    """Operators that a framework launches forward and backward, of which `counts` has those for each chunk and for all
    of them; 0 where kernels compute it."""
    forward, backward = (composed * (for_each * chunks + for_all) for for_each, for_all in counts)
    return forward, backward
