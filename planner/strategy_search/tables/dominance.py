"""Stored layouts that no plan needs: another one of the same weight and gradient costs no more of anything.

    weight   gradient   state        seconds   bytes
    R        R          S(0)            3        8         kept
    R        R          S(1)            3        8         left out: it costs the same, and comes later
    R        R          R               2       16         kept: faster

What an operator reads and what it gives back depend on the layouts of weight and gradient alone, so the prices of the
parameter decide. Nothing is lost: whatever seconds and bytes are worth, one of those that stay is as good. Of equals
the first stays, which is the one that a search takes.
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
    """Positions of the stored layouts that are needed, in order."""
    kinds: dict[object, int] = {}
    kind = np.array(
        [kinds.setdefault((one.weight, one.gradient, one.state_home, one.weight_home), len(kinds)) for one in stored]
    )
    one, other = np.nonzero(kind[:, None] == kind[None, :])  # those of another kind stand in for nothing
    costs = np.stack([getattr(prices, field.name) for field in fields(prices)])
    seconds = np.sum([getattr(prices, name) for name in _SECONDS], axis=0)
    better = (costs[:, one] <= costs[:, other]).all(axis=0) & ((one < other) | (seconds[one] < seconds[other]))
    needless = np.zeros(len(stored), dtype=np.bool_)
    needless[other[better]] = True
    return np.flatnonzero(~needless)


def among(prices: ParameterPrices, places: NDArray[np.intp]) -> ParameterPrices:
    """The prices of some stored layouts."""
    return ParameterPrices(**{field.name: getattr(prices, field.name)[places] for field in fields(prices)})
