"""Drops stored layouts that no plan needs: another one with the same weight and gradient is at least as good in
everything.

    weight   gradient   state        seconds   bytes
    R        R          S(0)            3        8         kept
    R        R          S(1)            3        8         dropped: same costs, later in the list
    R        R          R               2       16         kept: faster

Readers of a weight, and what they give back, depend on the layouts of weight and gradient alone. So the prices of the
parameter decide. Nothing is lost: whatever a second and a byte are worth, a remaining layout is as good. Of equal ones
the first remains, which is the one that a search takes.
"""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from planner.pricing.parameter_price import ParameterPrices
from planner.sharding.stored import StoredParameter

_SECONDS = (
    "accumulation", "synchronisation", "update", "gather", "fetch", "store", "offload", "weight_fetch", "weight_store"
)  # fmt: skip


def undominated(stored: Sequence[StoredParameter], prices: ParameterPrices) -> NDArray[np.intp]:
    """The positions of the stored layouts that are needed, in order."""
    kinds: dict[object, int] = {}
    kind = np.array(
        [kinds.setdefault((one.weight, one.gradient, one.state_home, one.weight_home), len(kinds)) for one in stored]
    )
    one, other = np.nonzero(kind[:, None] == kind[None, :])  # layouts of another kind replace nothing
    costs = np.stack([getattr(prices, field.name) for field in fields(prices)])
    seconds = np.sum([getattr(prices, name) for name in _SECONDS], axis=0)
    better = (costs[:, one] <= costs[:, other]).all(axis=0) & ((one < other) | (seconds[one] < seconds[other]))
    needless = np.zeros(len(stored), dtype=np.bool_)
    needless[other[better]] = True
    return np.flatnonzero(~needless)


def among(prices: ParameterPrices, places: NDArray[np.intp]) -> ParameterPrices:
    """The prices of a subset of the stored layouts."""
    return ParameterPrices(**{field.name: getattr(prices, field.name)[places] for field in fields(prices)})
