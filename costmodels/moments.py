"""Amounts that a device holds at several moments, of which the fullest counts.

What is held is a sum of bytes times micro-batches. Where the counts of micro-batches differ from moment to moment, as
of the two chunks of a rank in a V, they are an array, and so are the sums: element by element of one moment each.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray


def counts_at_moments(counts: Sequence[int]) -> int:
    """Micro-batches at each moment: a number where there is one moment, else an array that is summed like one."""
    return counts[0] if len(counts) == 1 else cast(int, np.array(counts, dtype=np.float64))


def counts_beyond(counts: int | NDArray[np.float64], taken: int) -> float:
    """Micro-batches beside those that are taken, none at the least where there are several moments."""
    return counts - taken if isinstance(counts, int) else cast(float, np.maximum(counts - taken, 0.0))


def fullest_moment(amounts: float) -> tuple[float, int]:
    """The most of what is held at the moments, and the number of that moment."""
    values = np.atleast_1d(amounts)
    number = int(values.argmax())
    return float(values[number]), number
