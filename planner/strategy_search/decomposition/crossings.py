"""Seconds in which a micro-batch crosses from one pipeline rank to the next."""

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.setting import Setting

Array = NDArray[np.float64]


def crossing_seconds(chain: Chain, setting: Setting, rank: int) -> Array:
    """Seconds in which a rank receives a micro-batch of the chain and sends back its gradients, for every state."""
    between, last = chain.crossing.between, setting.ranks - 1
    if not between:
        return np.broadcast_to(_along_own_axes(chain, setting, rank == 0, rank == last), chain.shape)
    found = np.zeros(chain.shape)
    found = found if rank == 0 else found + between[rank - 1][0]
    return found if rank == last else found + between[rank][1]


def seconds_of_all(chain: Chain, setting: Setting, parts: int) -> Array:
    """Seconds of a micro-batch in transfers between all ranks, for every state. The micro-batch is one of `parts` equal
    parts of that of the chain."""
    if setting.ranks == 1:
        return np.zeros(chain.shape)
    if chain.crossing.between:
        alone = [crossing_seconds(chain, setting, rank) for rank in range(setting.ranks)]
        return sum(alone, np.zeros(chain.shape)) / parts
    ends = _along_own_axes(chain, setting, True, False) + _along_own_axes(chain, setting, False, True)
    between = (setting.ranks - 2) * _along_own_axes(chain, setting, False, False)
    return np.broadcast_to((ends + between) / parts, chain.shape)


def _along_own_axes(chain: Chain, setting: Setting, first: bool, last: bool) -> Array:
    """`crossing_seconds` for equal links, with axes of length one where an axis makes no difference."""
    if setting.ranks == 1:
        return np.zeros(chain.shape)
    chunks, (forward, backward, around, around_back) = setting.chunks, chain.crossing.along_own_axes
    seconds = (chunks - 1) * around if first else chunks * forward
    return seconds + ((chunks - 1) * around_back if last else chunks * backward)
