"""How the pipeline of a configuration runs, as far as bounds and stage fillings depend on it."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from costmodels import SCHEDULES, moments_in_flight, most_in_flight, schedule_orders
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.request.space import Configuration, Counts

_ASKED = (0.0, 0.25, 0.5, 1.0)
"""Prices are solved for these fractions of the most micro-batches that a chunk ever holds in flight, whatever the
number of chunks. Bounds for other numbers lie between them (`planner.strategy_search.decomposition.usable_prices`)."""

_APART = 4
"""The largest number of groups of chunks of a rank that may run unlike each other."""

_ROUNDING = 1e-9
"""Relative to a capacity: sums in different orders differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the pipeline runs.

    Attributes:
        ranks: pipeline ranks.
        chunks: virtual stages on each rank.
        micro_batches: per step.
        in_flight: micro-batches in flight of every chunk (ranks, chunks), on average over the moments at which the rank
            holds most.
        capacity: bytes that a device may use.
        host: bytes of the host's memory that a device may use.
        fullest: for stages to be filled, the micro-batches in flight of the chunks at each of these moments; one row
            per moment for every rank. All chunks have the same number of blocks.
        even: whether ranks hold equally many blocks, if the number of blocks is divisible.
        counts: whether stages may recompute "any" number of their blocks, or all stages an "equal" number, or all the
            blocks that they have.
        relays: whether weights for one pass are gathered during another, if they are prefetched
            (`planner.plan.schedule.relays`).
        alike: whether the virtual stages of a rank run alike.
        uneven: whether the chunks of all ranks hold unequal numbers of blocks. A rank is then filled as one range of
            blocks, each in flight as often as in the average chunk; it is cut into chunks after the search
            (`planner.strategy_search.engine.uneven_stages`).
        asked: if virtual stages run unlike each other, the micro-batches in flight of a block for which prices are
            solved, from 0 to the most that a chunk ever holds."""

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
    host: float = math.inf
    asked: tuple[float, ...] = ()

    @property
    def copies(self) -> int:
        """The number of chunks of a rank with equally many blocks, which are filled together."""
        return 1 if self.uneven else self.chunks

    @property
    def shares_equally(self) -> bool:
        """Whether all ranks hold equally many blocks because their virtual stages do, or because there is only one
        rank."""
        return self.ranks == 1 or self.copies > 1

    @property
    def weight(self) -> float:
        """How often the micro-batch of the slowest rank counts, in addition to once for the micro-batch of every rank:
        m t for a single rank, (m - 1/v) max t + sum t / v for several (costmodels.pipelines.schedules).
        """
        return self.micro_batches - (1 / self.chunks if self.ranks > 1 else 0.0)

    @property
    def shared_weight(self) -> float:
        """A weight that is at most `weight` and equal for all numbers of virtual stages above one, so that they share
        prices."""
        return self.weight if self.chunks == 1 else self.micro_batches - 1 / 2

    def most(self, chain: Chain) -> int:
        """The number of inner blocks on a rank up to which bounds should be tight: all that it can hold, or slightly
        more than the average."""
        share = math.ceil(chain.block_ranges.blocks / self.ranks)
        if self.ranks == 1:
            return share
        return int(min(chain.block_ranges.blocks, share + share // 4 + 1, max(1, self.holds(chain))))

    def holds(self, chain: Chain) -> float:
        """The most inner blocks for which a rank has memory, by the parameters of a block alone; infinite if nothing
        limits it."""
        if self.ranks == 1 or not chain.least_fixed or self.capacity == math.inf:
            return math.inf
        return max(0, math.floor(self.capacity / chain.least_fixed * (1 + _ROUNDING)))

    def unlike(self, chain: Chain) -> bool:
        """Whether virtual stages of a rank may run unlike each other; that requires blocks of one kind."""
        return not self.alike and len(chain.block_ranges.counts) == 1

    def may_hold_none(self, chain: Chain, rank: int) -> bool:
        """Whether a rank may hold no inner block: every rank holds a block, which may be that of the head or tail."""
        first, last = rank == 0, rank == self.ranks - 1
        at_end = (first and chain.blocks_in_head > 0) or (last and chain.blocks_in_tail > 0)
        return at_end and self.ranks > 1 and self.chunks == 1

    def flights(self, rank: int) -> float:
        """Micro-batches in flight on a rank, on average over its chunks."""
        return math.fsum(self.in_flight[rank]) / self.chunks

    def tried_first(self, chain: Chain) -> tuple[float, ...]:
        """The numbers of micro-batches in flight for which prices are tried first, in ascending order."""
        if self.unlike(chain):
            return self.asked
        return tuple(sorted({self.flights(0), self.flights(self.ranks // 2)}))

    def together(self, rank: int) -> list[tuple[int, float]]:
        """Groups of consecutive chunks of a rank, at most `_APART`: the number of chunks, and their average
        micro-batches in flight."""
        flights = np.array(self.in_flight[rank])
        parts = [part.tolist() for part in np.array_split(flights, min(_APART, len(flights)))]
        return [(len(part), math.fsum(part) / len(part)) for part in parts]

    def scaled(self, ratio: int) -> "Setting":
        """The same setting, with micro-batches in flight counted in micro-batches that are `ratio` times as large."""
        if ratio == 1:
            return self
        flights = tuple([tuple([number / ratio for number in chunks]) for chunks in self.in_flight])
        return replace(self, in_flight=flights, asked=tuple(number / ratio for number in self.asked))


def setting_of(configuration: Configuration, capacity: float, host: float = math.inf) -> Setting:
    """The setting of a configuration."""
    p, v, m = configuration.pipeline, configuration.virtual_stages, configuration.micro_batches
    flights = _flights(configuration.schedule, p, v, m)
    pattern = None if configuration.decided is None else configuration.decided.pattern
    alike = v == 1 or pattern is not None or configuration.uneven
    return Setting(
        ranks=p, chunks=v, micro_batches=m, in_flight=flights, capacity=capacity,
        fullest=_fullest(configuration.schedule, p, v, m), even=configuration.even,
        counts="any" if pattern is None else pattern.counts, relays=SCHEDULES[configuration.schedule].flushes,
        alike=alike, uneven=configuration.uneven, host=host,
        asked=() if alike else tuple(part * min(2 * p, m) for part in _ASKED),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _flights(schedule: str, ranks: int, virtual: int, micro_batches: int) -> tuple[tuple[float, ...], ...]:
    """Micro-batches in flight (ranks, chunks). Micro-batches with deferred weight gradients count in full: they keep at
    most that, unless blocks are recomputed."""
    named = SCHEDULES[schedule]
    if named.v_shaped:  # a stage has half of the blocks of its rank; they are divided after the search
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
    """Micro-batches in flight of the chunks of every rank, at each moment at which the rank may hold most."""
    if virtual == 1:
        return tuple((one,) for one in _flights(schedule, ranks, virtual, micro_batches))
    moments = (moments_in_flight(rank, ranks, virtual, micro_batches) for rank in range(ranks))
    return tuple(tuple(sorted({tuple(map(float, one)) for one in own})) for own in moments)


def _at_the_fullest(rank: int, ranks: int, virtual: int, micro_batches: int) -> tuple[float, ...]:
    """Micro-batches in flight of each chunk of a rank, on average over the moments at which all chunks together hold
    most. At the fullest moment they hold at least this average. For the last rank, only moments count at which it also
    holds the operators behind the blocks."""
    moments = np.array(moments_in_flight(rank, ranks, virtual, micro_batches), dtype=np.float64)
    ending = moments[moments[:, -1] >= 1]
    return tuple((ending if rank == ranks - 1 and len(ending) else moments).mean(axis=0).tolist())
