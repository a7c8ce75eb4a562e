"""The states of the boundary in which no plan fits in memory, however slow.

A rank with n inner blocks holds at least

    head + n inner + tail  +  largest interior  +  t          t: transient bytes of the operator that needs most of them

where head, inner and tail are the leanest ways to run them. Each is a problem that is solved exactly (`Multipliers`,
with an infinite price). But the leanest ways and the least t belong to different plans: an operator that keeps little
may need much transient memory. So plans are grouped by their t:

    t in [a, b]     excludes operators that need more than b; holds at least the sum of the leanest ways, and a

The interval that allows the leanest plan is halved until no interval allows a plan, or after a fixed number of rounds.
The largest interior of a recomputed block is at least that of the tail, that of the head, and the average over the
blocks. Each of these gives a bound, and the best one counts.

Ranks differ in their micro-batches in flight: a bound for few of them holds for more. A rank can hold some number of
blocks. If all ranks together cannot hold all blocks, nothing fits. The same is checked for each kind of block with all
others left out. Every step is a relaxation, so a state is excluded only by proof.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.lines import NEVER
from planner.strategy_search.decomposition.pieces import Piece
from planner.strategy_search.decomposition.setting import Setting

Array = NDArray[np.float64]

_HALVINGS = 6
"""How often the interval that allows the leanest plan is halved, for each number of micro-batches in flight."""

_FLIGHTS = 3
"""Different numbers of micro-batches in flight, over the ranks of a pipeline, that are examined."""

_ROUNDING = 1e-9
"""Relative to the capacity: sums in different orders differ by less."""


_Flights = tuple[tuple[float, float], ...]
"""Micro-batches in flight of the blocks of a rank, from the first chunk on, each with its share of the blocks."""

Leanest = tuple[Array, Array, Array, float]
"""Least bytes of the head, of one inner block (any kind, then each kind by itself; *states) and of the tail, for every
state; and the number of inner blocks up to which they are proved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Interval:
    """Bounds for plans whose largest transient memory of an operator is between `low` and `high` bytes."""

    low: float
    high: float
    leanest: tuple[Leanest, ...]


def impossible(chain: Chain, setting: Setting) -> NDArray[np.bool_]:
    """A mask of the states of the boundary in which no plan fits in the capacity, as far as this can be proved. The
    chain must be the same on all ranks."""
    return _Proof(chain, setting).run()


class _Proof:
    def __init__(self, chain: Chain, setting: Setting) -> None:
        self.chain, self.setting = chain, setting
        self.multipliers = Multipliers(chain, setting.weight, columns=False)
        self.blocks = chain.block_ranges.blocks
        kinds = chain.block_ranges.totals if len(chain.block_ranges.totals) > 1 else ()
        self.counts = np.array((self.blocks, *kinds)).reshape(-1, *(1,) * len(chain.shape))  # of any kind, then of each
        equal = setting.shares_equally
        self.share = math.ceil(self.blocks / setting.ranks)  # some rank holds at least this many
        averages = (self.share,) if equal else dict.fromkeys((self.share, min(self.blocks, 2 * self.share)))
        self.counted: list[tuple[tuple[float, float, float], float]] = []  # shares of interiors, most blocks
        self.counted += [((0.0, 1 / most, 0.0), float(most)) for most in averages if most]
        self.counted += [((0.0, 0.0, 1.0), math.inf)] if chain.tail else []
        self.counted += [((1.0, 0.0, 0.0), math.inf)] if chain.head else []
        pieces = (*chain.head, *chain.inner, *chain.tail)
        found = [values for piece in pieces for values in piece.transient]
        self.sizes = np.unique(np.concatenate(found)) if found else np.zeros(1)
        self.inner_least = self._least(chain.inner) if self.blocks else 0.0

    @staticmethod
    def _least(pieces: Sequence[Piece]) -> float:
        """Transient bytes that some operator needs under every choice."""
        return min((piece.least_transient for piece in pieces), default=0.0)

    def run(self) -> NDArray[np.bool_]:
        setting = self.setting
        if setting.unlike(self.chain):
            return self._with_free_chunks()
        flights = [setting.flights(rank) for rank in range(setting.ranks)]
        distinct = sorted(set(flights))
        places = {round(place * (len(distinct) - 1) / max(1, _FLIGHTS - 1)) for place in range(_FLIGHTS)}
        rooms = {distinct[place]: self._rooms(((distinct[place], 1.0),)) for place in sorted(places)}
        total = np.zeros((len(self.counts), *self.chain.shape))
        for rank, own in enumerate(flights):
            known = max((flight for flight in rooms if flight <= own), default=None)
            if known is None:
                return np.zeros(self.chain.shape, dtype=bool)
            room = np.clip(rooms[known][rank == 0, rank == setting.ranks - 1], -NEVER, NEVER / setting.ranks / 2)
            if setting.shares_equally:
                room = np.where(room[0] < self.blocks / setting.ranks, -NEVER, room)
            total = total + room
        found: NDArray[np.bool_] = np.any(total < self.counts, axis=0)
        return found

    def _with_free_chunks(self) -> NDArray[np.bool_]:
        """The same if chunks run unlike each other: excludes states in which some rank cannot hold its share of the
        blocks. Chunks with similar numbers of micro-batches in flight are grouped, and counted with the fewest of the
        group."""
        setting, found = self.setting, np.zeros(self.chain.shape, dtype=np.bool_)
        for rank in sorted({0, setting.ranks // 2, setting.ranks - 1}):
            groups = np.array_split(np.array(setting.in_flight[rank]), min(_FLIGHTS, setting.chunks))
            flights = tuple((float(group.min()), len(group) / setting.chunks) for group in groups)
            room = self._rooms(flights)[rank == 0, rank == setting.ranks - 1][0]
            found |= room < self.blocks / setting.ranks
        return found

    def _rooms(self, flights: _Flights) -> dict[tuple[bool, bool], Array]:
        """Inner blocks (any kind, then each kind by itself; *states) that a rank can hold, by whether it is the first
        and whether it is the last; minus infinity where its ends alone do not fit."""
        setting = self.setting
        kinds = dict.fromkeys((rank == 0, rank == setting.ranks - 1) for rank in range(setting.ranks))
        intervals = [self._interval(flights, 0.0, float(self.sizes[-1]))]
        for _ in range(_HALVINGS):
            allowing = max(intervals, key=lambda one: max(float(self._room(one, *kind)[0].max()) for kind in kinds))
            inside = self.sizes[(self.sizes > allowing.low) & (self.sizes < allowing.high)]
            enough = max(float(self._room(allowing, *kind)[0].max()) for kind in kinds) >= self.share
            if not len(inside) or not enough:
                break
            middle = float(inside[len(inside) // 2])
            intervals.remove(allowing)
            intervals += [
                self._interval(flights, allowing.low, middle),
                replace(allowing, low=float(self.sizes[np.searchsorted(self.sizes, middle) + 1])),
            ]
        return {kind: np.max([self._room(one, *kind) for one in intervals], axis=0) for kind in kinds}

    def _interval(self, flights: _Flights, low: float, high: float) -> _Interval:
        found = []
        leanest = self.multipliers.leanest(
            [number for number, _ in flights], high, [parts for parts, _ in self.counted]
        )
        for every, (_, most) in zip(leanest, self.counted, strict=True):
            head, tail = every[0][0], every[-1][2]
            inner = [
                values if share == 1 else values * share
                for (_, values, _), (_, share) in zip(every, flights, strict=True)
            ]
            blocks = functools.reduce(np.add, inner)
            least = blocks.min(axis=0) if len(blocks) else np.zeros(self.chain.shape)
            found.append((head, np.stack((least, *(blocks if len(blocks) > 1 else ()))), tail, most))
        return _Interval(low=low, high=high, leanest=tuple(found))

    def _room(self, interval: _Interval, first: bool, last: bool) -> Array:
        """Inner blocks that a rank can hold in plans of an interval; infinity beyond the number of blocks for which the
        average of interiors holds."""
        setting, chain = self.setting, self.chain
        own = last and self.blocks and not chain.blocks_in_tail
        less = np.minimum(chain.ending, 0.0) * setting.in_flight[-1][-1] if own else 0.0
        here = (chain.head if first else (), chain.tail if last else ())
        none = setting.may_hold_none(chain, 0 if first else setting.ranks - 1 if last else 1)
        low = max(interval.low, 0.0 if none else self.inner_least, *map(self._least, here))
        found = np.full((len(self.counts), *chain.shape), math.inf)
        for head, inner, tail, most in interval.leanest:
            ends = (head if first else 0.0) + (tail if last else 0.0) + less
            left = setting.capacity * (1 + _ROUNDING) - low - ends
            with np.errstate(invalid="ignore"):
                blocks = np.floor(left / np.maximum(inner, 1e-30) + 1e-9) if self.blocks else np.zeros(inner.shape)
            found = np.minimum(found, np.where(left < 0, -math.inf, np.where(blocks >= most, math.inf, blocks)))
        return found
