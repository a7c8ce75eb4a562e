"""How the pipeline of a configuration is run, as far as bounds and fillings of stages depend on it."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from costmodels import SCHEDULES, moments_in_flight, most_in_flight, schedule_orders
from planner.strategy_search.decomposition.pieces import Chain
from planner.strategy_search.request.space import Configuration, Counts

_ASKED = (0.0, 0.25, 0.5, 1.0)
"""Of the most micro-batches that a chunk holds in flight: for so many prices are asked for, whatever the number of
chunks, and what is proved for others lies between (see `Multipliers.combinations`)."""

_APART = 4
"""Groups of the chunks of a rank that may run unlike each other."""

_ROUNDING = 1e-9
"""Of a capacity: sums in another order differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the pipeline is run: ranks, virtual stages on each, micro-batches, micro-batches in flight of every chunk
    (ranks, chunks), on average over the moments at which a rank is at its fullest, and, for stages that are filled, at
    each of them (`fullest`, of every rank a row for each moment; all chunks together hold equally many), the bytes that
    a device may fill, whether ranks hold equally many blocks, where they divide, whether stages recompute equally many
    of their blocks, or all that they have, whether passes let weights come for each other
    (`planner.plan.schedule.relays`), where these come ahead, whether the virtual stages of a rank run alike, and, where
    they do not, for which micro-batches in flight of a block prices are `asked` for: from none to as many as a chunk
    ever holds. `uneven`: the chunks of a rank, and those of others, hold unequal numbers of blocks; a rank is filled as
    one range of them, each in flight as often as in the average chunk, and cut behind the search
    (`planner.strategy_search.engine.uneven_stages`)."""

    ranks: int
    chunks: int
    micro_batches: int
    in_flight: tuple[tuple[float, ...], ...]
    capacity: float
    fullest: tuple[tuple[tuple[float, ...], ...], ...]
    even: bool = False
    counts: Counts = "any"
    relays: bool = True
    alike: bool = True
    uneven: bool = False
    asked: tuple[float, ...] = ()

    @property
    def copies(self) -> int:
        """Chunks of a rank that hold equally many blocks, which are filled at once."""
        return 1 if self.uneven else self.chunks

    @property
    def shares_equally(self) -> bool:
        """Whether all ranks hold equally many blocks, as their virtual stages do, or there is but one."""
        return self.ranks == 1 or self.copies > 1

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
        if self.ranks == 1:
            return share
        return int(min(chain.block_ranges.blocks, share + share // 4 + 1, max(1, self.holds(chain))))

    def holds(self, chain: Chain) -> float:
        """Inner blocks for which a rank has memory at most, by what stays of them; no limit where nothing says so."""
        if self.ranks == 1 or not chain.least_fixed or self.capacity == math.inf:
            return math.inf
        return max(0, math.floor(self.capacity / chain.least_fixed * (1 + _ROUNDING)))

    def unlike(self, chain: Chain) -> bool:
        """Whether virtual stages of a rank may run unlike each other: those with blocks of one kind."""
        return not self.alike and len(chain.block_ranges.counts) == 1

    def flights(self, rank: int) -> float:
        """Micro-batches in flight of a rank, on average over its chunks."""
        return math.fsum(self.in_flight[rank]) / self.chunks

    def tried_first(self, chain: Chain) -> tuple[float, ...]:
        """Micro-batches in flight for which a price is tried first, the fewest first."""
        if self.unlike(chain):
            return self.asked
        return tuple(sorted({self.flights(0), self.flights(self.ranks // 2)}))

    def together(self, rank: int) -> list[tuple[int, float]]:
        """Numbers of chunks of a rank that follow each other, `_APART` at most, and their micro-batches in flight on
        average."""
        flights = np.array(self.in_flight[rank])
        parts = [part.tolist() for part in np.array_split(flights, min(_APART, len(flights)))]
        return [(len(part), math.fsum(part) / len(part)) for part in parts]

    def scaled(self, ratio: int) -> "Setting":
        """The same with micro-batches in flight counted in those that are so many times as large."""
        flights = tuple(tuple(number / ratio for number in chunks) for chunks in self.in_flight)
        return replace(self, in_flight=flights, asked=tuple(number / ratio for number in self.asked))


def setting_of(configuration: Configuration, capacity: float) -> Setting:
    """How the pipeline of a configuration is run."""
    p, v, m = configuration.pipeline, configuration.virtual_stages, configuration.micro_batches
    flights = _flights(configuration.schedule, p, v, m)
    pattern = None if configuration.decided is None else configuration.decided.pattern
    alike = v == 1 or pattern is not None or configuration.uneven
    return Setting(
        ranks=p, chunks=v, micro_batches=m, in_flight=flights, capacity=capacity,
        fullest=_fullest(configuration.schedule, p, v, m), even=configuration.even,
        counts="any" if pattern is None else pattern.counts, relays=SCHEDULES[configuration.schedule].flushes,
        alike=alike, uneven=configuration.uneven, asked=() if alike else tuple(part * min(2 * p, m) for part in _ASKED),
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
def _fullest(schedule: str, ranks: int, virtual: int, micro_batches: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Micro-batches in flight of the chunks of every rank, at each moment at which it may be at its fullest."""
    if virtual == 1:
        return tuple((one,) for one in _flights(schedule, ranks, virtual, micro_batches))
    moments = (moments_in_flight(rank, ranks, virtual, micro_batches) for rank in range(ranks))
    return tuple(tuple(sorted({tuple(map(float, one)) for one in own})) for own in moments)


def _at_the_fullest(rank: int, ranks: int, virtual: int, micro_batches: int) -> tuple[float, ...]:
    """Micro-batches in flight of each chunk of a rank, on average over the moments at which all chunks hold most: they
    hold no less at the fullest of them. Of the last rank those count at which it holds what follows the blocks."""
    moments = np.array(moments_in_flight(rank, ranks, virtual, micro_batches), dtype=np.float64)
    ending = moments[moments[:, -1] >= 1]
    return tuple((ending if rank == ranks - 1 and len(ending) else moments).mean(axis=0).tolist())
