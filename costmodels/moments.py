"""Memory that a device holds at several moments; the fullest moment counts.

An amount is a sum of bytes times micro-batches. If the counts of micro-batches differ from moment to moment, as for the
two chunks of a rank in a V, they are an array with one element per moment, and so are the sums.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray


def counts_at_moments(counts: Sequence[int]) -> int:
    """Micro-batches at each moment: a number for one moment, else an array (moments,) that takes part in sums as a
    number does."""
    return counts[0] if len(counts) == 1 else cast(int, np.array(counts, dtype=np.float64))


def counts_beyond(counts: int | NDArray[np.float64], taken: int) -> float:
    """Micro-batches less `taken`, at each moment; with several moments never below 0."""
    return counts - taken if isinstance(counts, int) else cast(float, np.maximum(counts - taken, 0.0))


def fullest_moment(amounts: float) -> tuple[float, int]:
    """The largest of the amounts at all moments, and the index of its moment."""
    values = np.atleast_1d(amounts)
    number = int(values.argmax())
    return float(values[number]), number
