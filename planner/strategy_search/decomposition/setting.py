"""How the pipeline of a configuration is run, as far as bounds and fillings of stages depend on it."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from costmodels import SCHEDULES, moments_in_flight, most_in_flight, schedule_orders
from planner.strategy_search.decomposition.pieces import Chain
from planner.strategy_search.request.space import Configuration, Counts

_ROUNDING = 1e-9
"""Of a capacity: sums in another order differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the pipeline is run: ranks, virtual stages on each, micro-batches, micro-batches in flight of every chunk
    (ranks, chunks), on average over the moments at which a rank is at its fullest, and, for stages that are filled, of
    its first and last chunk at each of them (`fullest`, one row of pairs for each rank; all chunks together hold
    equally many), the bytes that a device may fill, whether ranks hold equally many blocks, where they divide,
    whether stages recompute equally many of their blocks, or all that they have, and whether passes let weights come
    for each other (`planner.plan.schedule.relays`), where these come ahead."""

    ranks: int
    chunks: int
    micro_batches: int
    in_flight: tuple[tuple[float, ...], ...]
    capacity: float
    fullest: tuple[tuple[tuple[float, float], ...], ...]
    even: bool = False
    counts: Counts = "any"
    relays: bool = True

    @property
    def weight(self) -> float:
        """How often the slowest rank's micro-batch counts, beside once for every rank's:
        m t for a single rank, (m - 1/v) max t + sum t / v for several (costmodels.schedules).
        """
        return self.micro_batches - (1 / self.chunks if self.ranks > 1 else 0.0)

    @property
    def shared_weight(self) -> float:
        """The same, and no more than that, for all numbers of virtual stages, but one: they share their prices."""
        return self.weight if self.chunks == 1 else self.micro_batches - 1 / 2

    def most(self, chain: Chain) -> int:
        """Inner blocks of a rank about which most is to be proved: all that it may hold, or some more than it holds on
        average."""
        share = math.ceil(chain.block_ranges.blocks / self.ranks)
        if self.ranks == 1 or self.chunks > 1:
            return share
        return int(min(chain.block_ranges.blocks, share + share // 4 + 1, max(1, self.holds(chain))))

    def holds(self, chain: Chain) -> float:
        """Inner blocks for which a rank has memory at most, by what stays of them; no limit where nothing says so."""
        if self.ranks == 1 or self.chunks > 1 or not chain.least_fixed or self.capacity == math.inf:
            return math.inf
        return max(0, math.floor(self.capacity / chain.least_fixed * (1 + _ROUNDING)))

    def flights(self, rank: int) -> float:
        """Micro-batches in flight of a rank, on average over its chunks."""
        return math.fsum(self.in_flight[rank]) / self.chunks


def setting_of(configuration: Configuration, capacity: float) -> Setting:
    """How the pipeline of a configuration is run."""
    p, v, m = configuration.pipeline, configuration.virtual_stages, configuration.micro_batches
    flights = _flights(configuration.schedule, p, v, m)
    pattern = None if configuration.decided is None else configuration.decided.pattern
    return Setting(
        ranks=p, chunks=v, micro_batches=m, in_flight=flights, capacity=capacity,
        fullest=_fullest(configuration.schedule, p, v, m), even=configuration.even,
        counts="any" if pattern is None else pattern.counts, relays=SCHEDULES[configuration.schedule].flushes,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _flights(schedule: str, ranks: int, virtual: int, micro_batches: int) -> tuple[tuple[float, ...], ...]:
    """Micro-batches in flight (ranks, chunks), where those with deferred weight gradients count in full: what is kept
    of them is no more than that, unless blocks are recomputed."""
    named = SCHEDULES[schedule]
    if named.v_shaped:  # stages of half the blocks each, as they are divided behind the search
        return tuple(
            (most_in_flight(order) / 2,) for order in schedule_orders(schedule, ranks, micro_batches, virtual=2)
        )
    if named.splits_backward:
        return ((float(min(micro_batches, ranks)),),) * ranks
    if virtual > 1:
        return tuple(_at_the_fullest(rank, ranks, virtual, micro_batches) for rank in range(ranks))
    return tuple(tuple(map(float, named.in_flight(rank, ranks, micro_batches, virtual, 1))) for rank in range(ranks))


@lru_cache(maxsize=1024)
def _fullest(
    schedule: str, ranks: int, virtual: int, micro_batches: int
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Micro-batches in flight of the first and the last chunk of every rank, at each moment at which it may be at its
    fullest."""
    if virtual == 1:
        return tuple(((one, one),) for (one,) in _flights(schedule, ranks, virtual, micro_batches))
    moments = (moments_in_flight(rank, ranks, virtual, micro_batches) for rank in range(ranks))
    return tuple(tuple(sorted({(float(one[0]), float(one[-1])) for one in own})) for own in moments)


def _at_the_fullest(rank: int, ranks: int, virtual: int, micro_batches: int) -> tuple[float, ...]:
    """Micro-batches in flight of each chunk of a rank, on average over the moments at which all chunks hold most: they
    hold no less at the fullest of them. Of the last rank those count at which it holds what follows the blocks."""
    moments = np.array(moments_in_flight(rank, ranks, virtual, micro_batches), dtype=np.float64)
    ending = moments[moments[:, -1] >= 1]
    return tuple((ending if rank == ranks - 1 and len(ending) else moments).mean(axis=0).tolist())
