"""The least bound over all states is that of asking for all, and few are asked."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.strategy_search.decomposition import state_bounds
from planner.strategy_search.decomposition.priced import States
from planner.strategy_search.decomposition.state_bounds import StateBounds

SHAPE = (6, 5, 4)


class Rising:
    """Bounds that rise with every price; counts for how many states it was asked."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.bounds = 1 + self.random.random(SHAPE)
        self.known = self.bounds * self.random.uniform(0.5, 1, SHAPE)
        self.asked = 0

    def another_price(self) -> None:
        """Some states take longer than was known."""
        self.bounds = self.bounds * np.where(self.random.random(SHAPE) < 0.3, self.random.uniform(1, 1.2, SHAPE), 1.0)

    def __call__(self, some: States | None) -> NDArray[np.float64]:
        found = self.bounds if some is None else self.bounds[some]
        self.asked += found.size
        return found


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_bounds, "_AT_ONCE", 4)


def test_what_is_no_number_ends_the_search() -> None:
    known = np.ones(SHAPE)
    bounds = StateBounds(lambda some: known if some is None else known[some], np.where(known > 0, math.nan, known))
    with pytest.raises(AssertionError, match="is a number"):
        bounds.least()


@pytest.mark.parametrize("seed", range(5))
def test_the_least_is_that_of_all(seed: int) -> None:
    rising = Rising(seed)
    bounds, closed = StateBounds(rising, rising.known), np.zeros(SHAPE, dtype=np.bool_)
    for _ in range(12):
        opened = np.where(closed, math.inf, rising.bounds)
        state, least = bounds.least()
        assert least == opened.min() == opened[state]
        assert bounds.value(state) == least
        if rising.random.random() < 0.5:
            bounds.close(state)
            closed[state] = True
        else:
            rising.another_price()
            bounds.outdate()
    bounds.reopen()
    assert bounds.least()[1] == rising.bounds.min()


def test_few_are_asked() -> None:
    rising = Rising(7)
    bounds = StateBounds(rising, rising.bounds * 0.99)
    bounds.least()
    assert 0 < rising.asked <= 8


def test_none_is_asked_beyond_the_limit() -> None:
    rising = Rising(8)
    bounds = StateBounds(rising, rising.known)
    limit = float(rising.known.min())
    state, least = bounds.least(limit)
    assert least == limit == rising.known[state]
    assert rising.asked == 0


def test_what_else_is_proved_counts_for_closed_states_too() -> None:
    rising = Rising(9)
    bounds = StateBounds(rising, rising.known)
    state, _ = bounds.least()
    bounds.close(state)
    bounds.raise_to(np.full(SHAPE, math.inf))
    bounds.reopen()
    assert bounds.least()[1] == math.inf


def test_a_chain_without_a_boundary_has_one_state() -> None:
    bounds = StateBounds(lambda _: np.array(3.0), np.array(2.0))
    assert bounds.least() == ((), 3.0)


def test_where_some_take_as_long_as_all_these_are_asked_once() -> None:
    rising = Rising(10)
    bounds = StateBounds(rising, rising.bounds * 0.5, apart=False)
    for price in range(1, 4):
        state, least = bounds.least()
        assert least == rising.bounds.min() == bounds.value(state)
        assert rising.asked == price * rising.bounds.size
        bounds.outdate()
