"""What the solved prices prove about pipeline ranks: how busy a rank with some blocks is, and how many it can hold."""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.crossings import crossing_seconds
from planner.strategy_search.decomposition.in_order import Reach
from planner.strategy_search.decomposition.lines import Lines
from planner.strategy_search.decomposition.priced import Priced, States, of_all_blocks, picked
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.decomposition.usable_prices import Usable, combined, usable_prices

Array = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

_Alike: TypeAlias = tuple[Usable, bool, bool, tuple[int, ...]]

_SUGGESTING = 4
"""The number of prices that suggest units: the last ones, and the first one in addition."""


class RankBounds:
    """Bounds for the ranks of a pipeline. Arguments as for `Multipliers`; `priced` holds what was solved so far, and
    grows."""

    def __init__(
        self, chain: Chain, priced: list[Priced], weight: float, parts: int, *, most: int, holds: float
    ) -> None:
        self.chain, self.priced, self.weight, self.parts = chain, priced, weight, parts
        self.most, self.holds = most, holds
        self.blocks, self.counts = chain.block_ranges.blocks, chain.block_ranges.totals
        self._transient: dict[tuple[bool, bool, bool], float] = {}

    def units(self, possible: Mask, some: States | None = None) -> list[Array]:
        """Units to measure blocks in, each (kinds, *states): ones for a single kind; for several kinds the values of
        the blocks at each suggesting price, and ones in states that a price leaves without a choice, as one that
        excludes candidates with many transient bytes may."""
        shape = (len(self.counts), *possible.shape)
        if len(self.counts) < 2:
            return [np.ones(shape)]
        known = self.priced[:1] + self.priced[1:][-_SUGGESTING:]
        found = []
        for priced in known:
            values = np.maximum(picked(priced.values[1], some), 1e-30)
            values = np.where(possible & np.isfinite(values).all(axis=0), values, 1.0)
            found.append(values * (self.blocks / of_all_blocks(self.counts, values)))
        return found

    def lines(
        self,
        setting: Setting,
        possible: Mask,
        units: Array,
        among: Sequence[int] | None = None,
        some: States | None = None,
    ) -> list[Lines]:
        """Bounds with blocks measured in units, for the ranks, or for those in `among`, and for all states or those of
        `some`. Ranks with the same bounds share one entry."""
        every = range(setting.ranks) if among is None else among
        alike: dict[_Alike, list[int]] = {}
        for rank in every:
            alike.setdefault(self._alike(setting, rank), []).append(rank)
        most = self.units_of_most(units) if len(units) else np.full(possible.shape, math.inf)
        return [
            self._line(self._reach(setting, possible, usable, ranks, some), possible, units, most)
            for (usable, *_), ranks in alike.items()
        ]

    def reaches(self, setting: Setting, possible: Mask, some: States | None = None) -> list[Reach]:
        """Bounds for the ranks in their order, for all states or those of `some`. Neighbours with the same bounds share
        one entry."""
        return [
            self._reach(setting, possible, usable, list(ranks), some)
            for (usable, *_), ranks in itertools.groupby(
                range(setting.ranks), key=lambda rank: self._alike(setting, rank)
            )
        ]

    def _alike(self, setting: Setting, rank: int) -> _Alike:
        """A key of the bounds of a rank: its usable prices, whether it is first or last, and its links. Ranks with
        equal keys have equal bounds."""
        usable = usable_prices(self.priced, setting, rank, unlike=setting.unlike(self.chain))
        between = tuple(map(id, self.chain.crossing.between[max(0, rank - 1) : rank + 1]))
        return usable, rank == 0, rank == setting.ranks - 1, between

    def _reach(
        self, setting: Setting, possible: Mask, usable: Usable, ranks: Sequence[int], some: States | None
    ) -> Reach:
        """The bounds that the `usable` prices prove for equal ranks."""
        rank = ranks[0]
        first, last = rank == 0, rank == setting.ranks - 1
        crossing = picked(crossing_seconds(self.chain, setting, rank), some) * (self.weight / self.parts)
        at_once = self.least_transient(first, last, inner=not setting.may_hold_none(self.chain, rank))
        own = last and self.blocks and not self.chain.blocks_in_tail  # the last block is an inner one and may hold less
        ending = np.minimum(picked(self.chain.ending, some), 0.0)
        less = ending * setting.in_flight[-1][-1] if own else np.zeros(possible.shape)
        ends, inner, left, leanest = list[Array](), list[Array](), list[Array](), list[Array]()
        for inside, begun in usable:
            priced = self.priced[inside[-1][0]]
            capacity = setting.capacity - at_once * (1 - priced.at_tail if last else 1.0)
            blocks = combined(self.priced, inside, 1, some)
            value = (combined(self.priced, begun, 0, some) if first else 0.0) + (
                picked(priced.values[2], some) if last else 0.0
            )
            value = value + less * (1.0 if math.isinf(priced.price) else priced.price)
            blocks = np.where(possible, np.maximum(blocks, 1e-30), 1.0)
            if math.isinf(priced.price):
                left.append(np.where(possible, capacity + 1e-9 * setting.capacity - value, 0.0))
                leanest.append(blocks)
            else:
                value = crossing + value - (priced.price * capacity if priced.price else 0.0)
                ends.append(np.where(possible, value, 0.0))
                inner.append(blocks)
        kinds = (len(self.counts), *possible.shape)
        return Reach(
            ends=np.array(ends),
            inner=np.array(inner).reshape(len(inner), *kinds),
            most=self.most,
            left=np.array(left).reshape(len(left), *possible.shape),
            leanest=np.array(leanest).reshape(len(leanest), *kinds),
            ranks=len(ranks),
        )

    def _line(self, reach: Reach, possible: Mask, units: Array, most: Array) -> Lines:
        """The bounds of a `Reach` with blocks measured in units; `most` are the `units_of_most`."""

        def slope(blocks: Array) -> Array:
            found: Array = (blocks / units).min(axis=0) if len(blocks) else np.full(possible.shape, 1.0)
            return found

        one_kind = len(self.counts) < 2
        room = np.full(possible.shape, self.holds if one_kind else math.inf)
        for left, blocks in zip(reach.left, reach.leanest, strict=True):
            fitting = left / slope(blocks) + 1e-6
            room = np.minimum(room, np.where(left < 0, -math.inf, np.floor(fitting) if one_kind else fitting))
        return Lines(
            ends=reach.ends,
            slopes=np.array([slope(blocks) for blocks in reach.inner]),
            wholes=np.array([of_all_blocks(self.counts, blocks) for blocks in reach.inner]),
            most=most,
            room=room,
            ranks=reach.ranks,
            whole_blocks=one_kind,
        )

    def units_of_most(self, units: Array) -> Array:
        """The least units of `most` inner blocks, for every state: the smallest blocks of the model are counted
        first."""
        by_size = np.argsort(units, axis=0)
        counts = np.asarray(self.counts)[by_size]
        before = np.cumsum(counts, axis=0) - counts
        found: Array = (np.clip(self.most - before, 0, counts) * np.take_along_axis(units, by_size, axis=0)).sum(axis=0)
        return found

    def least_transient(self, first: bool, last: bool, *, inner: bool = True) -> float:
        """Transient bytes that a rank needs under every choice, with `inner` blocks or without any."""
        if (first, last, inner) not in self._transient:
            sides = ((self.chain.head, first), (self.chain.inner, inner and self.blocks > 0), (self.chain.tail, last))
            held = [min(piece.least_transient for piece in pieces) for pieces, here in sides if here and pieces]
            self._transient[first, last, inner] = max(held, default=0.0) / self.parts
        return self._transient[first, last, inner]
