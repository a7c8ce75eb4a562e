"""Lower bounds of the states of the boundary, recomputed only for the states with the least bounds.

    proved    the bound of every state; bounds from before the last price still hold
    fresh     states whose bound uses everything solved so far

The search asks for the least bound over all states. A stale bound is at most the fresh one, so the least bound is known
as soon as the state that has it is fresh. Most of the hundreds of thousands of states of a wide model (T5) are never
recomputed (lazy evaluation of priorities: Minoux, "Accelerated greedy algorithms", 1978).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline, step_bounds
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.priced import State, States
from planner.strategy_search.decomposition.setting import Setting

Array = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

_AT_ONCE = 2**11
"""States whose bounds are recomputed together at first: fewer take about as long."""

_MORE = 4
"""Factor by which that number grows each time, until another price is solved."""


class StateBounds:
    """The lower bound of every state.

    Args:
        ask: returns the bounds of some states, or of all (*states), by everything solved so far.
        known: the bounds before anything is asked, (*states).
        apart: whether asking for some states is cheaper than asking for all."""

    def __init__(self, ask: Callable[[States | None], Array], known: Array, *, apart: bool = True) -> None:
        self._ask, self._apart = ask, apart
        self._proved = np.array(known)  # bounds of open states; infinity for closed ones
        self._closed: dict[State, float] = {}
        self._fresh = np.zeros(known.shape, dtype=np.bool_)
        self._at_once = _AT_ONCE

    @classmethod
    def of(
        cls,
        pipeline_of_kinds: HeterogeneousPipeline,
        multipliers: Sequence[Multipliers],
        setting: Setting,
        *,
        known: Array | None = None,
        limit: float = math.inf,
    ) -> Self:
        """The bounds that multipliers prove of a pipeline (`step_bounds`). The bounds before anything is asked are
        `known`, or else those for free memory."""
        if known is None and len(multipliers) == 1:
            known = multipliers[0].where_free(setting)
        known = np.zeros(pipeline_of_kinds.chain.shape) if known is None else known
        ask = partial(step_bounds, pipeline_of_kinds, multipliers, setting, limit=limit)
        return cls(ask, known, apart=len(multipliers) == 1)

    def outdate(self) -> None:
        """Mark all bounds as stale, since more was solved."""
        self._fresh[...] = False
        self._at_once = _AT_ONCE

    def raise_to(self, least: Array) -> None:
        """Raise the bounds to others that are proved, (*states)."""
        np.maximum(self._proved, least, out=self._proved)
        self._closed = {state: max(known, float(least[state])) for state, known in self._closed.items()}

    def raise_at(self, state: State, least: float) -> None:
        """Raise the bound of an open state."""
        self._proved[state] = max(float(self._proved[state]), least)

    def close(self, state: State) -> None:
        """Remove a state from the open ones."""
        self._closed[state] = float(self._proved[state])
        self._proved[state] = math.inf

    def reopen(self) -> None:
        """Open all closed states."""
        for state, known in self._closed.items():
            self._proved[state] = known
        self._closed.clear()

    def least(self, limit: float = math.inf) -> tuple[State, float]:
        """The open state with the least bound, and that bound. A bound that reaches `limit` may be stale."""
        while True:
            state = tuple(int(i) for i in np.unravel_index(int(self._proved.argmin()), self._proved.shape))
            found = float(self._proved[state])
            assert not math.isnan(found), "what is proved of a state is a number, else it would be asked for ever"
            if found >= limit or self._fresh[state]:
                return state, found
            asked = (self._proved < limit) & ~self._fresh
            values = self._proved[asked]
            if values.size > 2 * self._at_once:
                asked &= self._proved <= np.partition(values, self._at_once)[self._at_once]
                self._at_once *= _MORE
            self._make_good(asked)

    def value(self, state: State) -> float:
        """The bound of an open state, by everything solved so far."""
        if not self._fresh[state]:
            self._make_good((self._proved <= self._proved[state]) & ~self._fresh)
        return float(self._proved[state])

    def _make_good(self, asked: Mask) -> None:
        if not self._apart or 2 * np.count_nonzero(asked) > asked.size:
            self.raise_to(self._ask(None))
            self._fresh[...] = True
            return
        some = np.nonzero(asked)
        self._proved[some] = np.maximum(self._proved[some], self._ask(some))
        self._fresh[some] = True
