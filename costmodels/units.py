"""The unit aliases of `hardware_profiles.units`, and the input and output type of formulas: a number or an array."""

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from hardware_profiles.units import GB, GIB, KIB, MIB, Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds

Array: TypeAlias = NDArray[np.float64]
Quantity: TypeAlias = float | Array
QuantityT = TypeVar("QuantityT", float, Array)

__all__ = [
    "Array",
    "Bytes",
    "BytesPerSecond",
    "Flops",
    "FlopsPerSecond",
    "GB",
    "GIB",
    "KIB",
    "MIB",
    "Quantity",
    "QuantityT",
    "Seconds",
]
