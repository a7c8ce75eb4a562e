"""What the shapes of chunked scans have in common: the chunks of a sequence are computed one after the other."""

from dataclasses import dataclass

import numpy as np

from costmodels.units import Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """What one device has: `batch` samples of `steps` steps each; `chunk` steps are computed at a time."""

    batch: Quantity
    steps: Quantity
    chunk: int

    @property
    def each(self) -> Quantity:
        """Steps of a chunk: `chunk`, or all steps of a shorter sequence."""
        return np.minimum(self.chunk, self.steps) + 0 * self.batch

    @property
    def chunks(self) -> Quantity:
        """Number of chunks in a sequence, rounded up."""
        found: Quantity = np.ceil(self.steps / self.each)
        return found


def launched_by_chunks(
    chunks: Quantity, composed: bool, counts: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[Quantity, Quantity]:
    """Operators that a framework launches, forward and backward; 0 where kernels compute the scan.

    `counts` has (operators per chunk, operators once for all chunks) for the forward and for the backward pass.
    """
    forward, backward = (composed * (for_each * chunks + for_all) for for_each, for_all in counts)
    return forward, backward
