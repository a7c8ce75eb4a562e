"""Lower bounds for a configuration from whole blocks.

Prices of memory bound stages with any fraction of a block, any fraction of it recomputed. But stages hold whole blocks,
and engines recompute equally many of every stage. So each piece gets one *ideal* way to run it, and one to recompute
it: the least of any choice in seconds, in bytes that stay and in bytes per micro-batch, each by itself. No stage is
faster or leaner than one that is filled with these, so no plan is faster than the result:

    ideal ways ─ fill, with c recomputed blocks in every stage ─▶ prices of all ranges of blocks ─ divide ─▶ seconds
    the least of these over all c is a bound; c ends where more free memory no longer helps

If operators have one pattern, little is left to choose in a block, and the ideal ways are nearly real ones. If they
have many strategies, this proves less than prices do, and is not used.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.division import least_seconds
from planner.strategy_search.decomposition.pieces import Amounts, Asked, Column, Piece, Weights, solve
from planner.strategy_search.decomposition.priced import State, over
from planner.strategy_search.decomposition.stage_filling import Filled, Rank, Way, fill_best
from planner.strategy_search.engine.composition import Composition

Array = NDArray[np.float64]

_TIE = 1e-30
"""Weight of a second if something else is minimised: impossible choices stay infinite."""

_BELOW = 1 - 1e-12
"""Sums of the same numbers in another order, and ties, exceed the least by no more than this."""

_ASKED: dict[str, Weights] = {
    "part": Weights(part=1.0),
    "step": Weights(part=_TIE, step=1.0, reduction=1.0),
    "fixed": Weights(part=_TIE, fixed=1.0),
    "live": Weights(part=_TIE, live=1.0),
    "replay": Weights(part=_TIE, replay=1.0),
}
_TRAVELLING: dict[str, Weights] = {
    "under": Weights(part=_TIE, under=(1.0, 1.0)),
    "excess_forward": Weights(part=_TIE, excess=(1.0, 0.0)),
    "excess_backward": Weights(part=_TIE, excess=(0.0, 1.0)),
}


class WholeBlocks:
    """Lower bounds for the plans of a configuration on one kind of devices, state by state."""

    def __init__(self, composition: Composition) -> None:
        self.composition, self.chain, self.setting = composition, composition.chain, composition.setting
        self.block_ranges, self.capacity = composition.block_ranges, composition.capacity(0)

    def step_seconds(self, state: State, limit: float) -> float:
        """A lower bound on the seconds of a step at a state, infinite if nothing fits; about the limit if the bound
        reaches it."""
        pool = self._pool(state)
        if not self.block_ranges.blocks or pool is None:
            return 0.0
        ranks = [self._variants(rank, state) for rank in range(self.setting.ranks)]
        if self.setting.counts == "any":
            ways = [tuple(way) for way in itertools.product(*zip(*pool, strict=True))]
            return self._seconds(ranks, list(dict.fromkeys(ways)), None, free=pool[:1])
        most, best = int(self.block_ranges.lengths.max()), math.inf
        if self._seconds(ranks, pool, most) == math.inf:
            return math.inf
        for count in range(most + 1):
            best = min(best, self._seconds(ranks, pool, count))
            if best < math.inf and self._seconds(ranks, pool, count + 1, room=math.inf) >= min(best, limit):
                break  # more recomputed blocks only take longer
        return best

    def _seconds(
        self,
        ranks: Sequence[tuple[Rank, ...]],
        pool: Sequence[Way],
        count: int | None,
        *,
        room: float | None = None,
        free: Sequence[Way] | None = None,
    ) -> float:
        """A lower bound on the step with `count` recomputed blocks in every stage, or any number, and `room` bytes;
        `free` are the ways that take the least seconds per micro-batch, whatever the memory."""
        filled = self._filled(ranks, pool, count, self.capacity if room is None else room)
        least = filled if free is None else self._filled(ranks, free, None, math.inf)
        return least_seconds(
            filled,
            [one.part for one in least],
            self.composition.fewest(),
            self.block_ranges,
            micro_batches=self.setting.micro_batches,
            chunks=self.setting.chunks,
            given=self.composition.given,
        )

    def _filled(
        self, ranks: Sequence[tuple[Rank, ...]], pool: Sequence[Way], count: int | None, room: float
    ) -> list[Filled]:
        distinct = list(dict.fromkeys(ranks))
        found = fill_best(distinct, pool, self.block_ranges, self.setting.micro_batches, room, None, count)
        known = dict(zip(distinct, found, strict=True))
        return [known[rank] for rank in ranks]

    def _pool(self, state: State) -> list[Way] | None:
        """The ideal ways to run blocks of each kind, kept and recomputed; None if recomputing saves memory without
        losing time, where nothing is proved."""
        kept = tuple(self._ideal(pieces, state, recompute=False) for pieces in self.chain.kinds)
        again = tuple(self._ideal(pieces, state, recompute=True) for pieces in self.chain.kinds)
        if any(column is None for column in kept):
            return [tuple(c for c in again if c is not None)] if all(again) else None
        if any(column is None for column in again):
            return [tuple(c for c in kept if c is not None)] if not any(again) else None
        pairs = [(one, other) for one, other in zip(kept, again, strict=True) if one is not None and other is not None]
        leaner = tuple(_no_larger(other, one) for one, other in pairs)
        faster = tuple(_no_slower(one, other) for one, other in pairs)
        weight = self.setting.micro_batches
        for one, other in zip(faster, leaner, strict=True):
            saves = other.amounts.fixed < one.amounts.fixed or other.amounts.live < one.amounts.live
            longer = weight * (other.amounts.part - one.amounts.part) + other.amounts.step - one.amounts.step
            if saves and longer <= 0:
                return None
        return [faster, leaner]

    def _variants(self, rank: int, state: State) -> tuple[Rank, ...]:
        """A rank with what it holds besides inner blocks."""
        heads = self._ends(self.chain.head, state) if rank == 0 else [None]
        tails = self._ends(self.chain.tail, state) if rank == self.setting.ranks - 1 else [None]
        return tuple(
            dict.fromkeys(
                self.composition.rank(rank, state, head, tail) for head, tail in itertools.product(heads, tails)
            )
        )

    def _ends(self, pieces: Sequence[Piece], state: State) -> list[Column | None]:
        found = [self._ideal(pieces, state, recompute=again) for again in (False, True)]
        return [column for column in found if column is not None] or [None]

    def _ideal(self, pieces: Iterable[Piece], state: State, *, recompute: bool) -> Column | None:
        """The least of every amount over the pieces at a state, for those that are recomputed, or those that are
        not."""
        own = [piece for piece in pieces if piece.recompute == recompute]
        if not own:
            return None
        amounts = [self._amounts(piece, state) for piece in own]
        least = Amounts(**{name: min(one[name] for one in amounts) for name in amounts[0]})
        return Column(recompute=recompute, candidates={}, kept=frozenset(), amounts=least, kind=own[0].kind)

    def _amounts(self, piece: Piece, state: State) -> dict[str, float]:
        known = {name: _below(float(values[state])) for name, values in self._least[id(piece)].items()}
        return {**known, "transient": piece.least_transient}

    @cached_property
    def _least(self) -> dict[int, dict[str, Array]]:
        """For every piece the least of each amount, by itself, at every state."""
        pieces = (*self.chain.head, *self.chain.inner, *self.chain.tail)
        weights = {**_ASKED, **(_TRAVELLING if self.chain.travels else {})}
        asked = [(piece, name, Asked(piece=piece, weights=own)) for name, own in weights.items() for piece in pieces]
        found: dict[int, dict[str, Array]] = {id(piece): {} for piece in pieces}
        for (piece, name, _), solved in zip(asked, solve([one for *_, one in asked]), strict=True):
            found[id(piece)][name] = over(self.chain, solved)
        return found


def _below(value: float) -> float:
    """Slightly below a value, whatever its sign, to allow for rounding."""
    return value * _BELOW if value > 0 else value / _BELOW


def _no_larger(column: Column, than: Column) -> Column:
    """The column with no more bytes than another."""
    own, other = column.amounts, than.amounts
    least = {"fixed": min(own.fixed, other.fixed), "live": min(own.live, other.live)}
    return replace(column, amounts=replace(own, **least))


def _no_slower(column: Column, than: Column) -> Column:
    """The column with no more seconds than another."""
    own, other = column.amounts, than.amounts
    least = {"part": min(own.part, other.part), "step": min(own.step, other.step)}
    return replace(column, amounts=replace(own, **least))
