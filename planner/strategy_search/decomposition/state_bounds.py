"""Bounds of the states of the boundary, made good only where they are least.

    proved    what is known of every state; what was known before another price was asked still holds
    fresh     states whose bound counts all that was asked since

The search asks for the least bound over all states. A bound that is not fresh is no more than it would be, so the least
of all is known as soon as the least one is fresh, and most of the hundreds of thousands of states of a wide model (T5)
are never looked at again (lazy evaluation of priorities: Minoux, "Accelerated greedy algorithms", 1978).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline, step_bounds
from planner.strategy_search.decomposition.lagrangian import Multipliers, State, States
from planner.strategy_search.decomposition.setting import Setting

Array = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

_AT_ONCE = 2**11
"""States whose bounds are made good together at first: a few take about as long as that many."""

_MORE = 4
"""Times as many the next time, before another price is asked."""


class StateBounds:
    """What is proved of every state. `ask` bounds some states, as many, or all, (*states), by all that is known by now;
    `known`: what is proved before anything is asked, (*states); `apart`: whether some take less than all to ask."""

    def __init__(self, ask: Callable[[States | None], Array], known: Array, *, apart: bool = True) -> None:
        self._ask, self._apart = ask, apart
        self._proved = np.array(known)  # of what is open; infinite where it is closed
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
        """What multipliers prove of a pipeline (`step_bounds`): before they are asked what they know where memory is
        free, if nothing else is `known`."""
        if known is None and len(multipliers) == 1:
            known = multipliers[0].where_free(setting)
        known = np.zeros(pipeline_of_kinds.chain.shape) if known is None else known
        ask = partial(step_bounds, pipeline_of_kinds, multipliers, setting, limit=limit)
        return cls(ask, known, apart=len(multipliers) == 1)

    def outdate(self) -> None:
        """More is known than was asked for."""
        self._fresh[...] = False
        self._at_once = _AT_ONCE

    def raise_to(self, least: Array) -> None:
        """Note what else is proved, (*states)."""
        np.maximum(self._proved, least, out=self._proved)
        self._closed = {state: max(known, float(least[state])) for state, known in self._closed.items()}

    def raise_at(self, state: State, least: float) -> None:
        """Note what else is proved of an open state."""
        self._proved[state] = max(float(self._proved[state]), least)

    def close(self, state: State) -> None:
        """Leave a state out of what is open."""
        self._closed[state] = float(self._proved[state])
        self._proved[state] = math.inf

    def reopen(self) -> None:
        """Leave nothing out any more."""
        for state, known in self._closed.items():
            self._proved[state] = known
        self._closed.clear()

    def least(self, limit: float = math.inf) -> tuple[State, float]:
        """The open state that is bounded by least, and its bound. Bounds that reach the `limit` may be less than they
        would be."""
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
        """What all that is known proves of an open state."""
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
