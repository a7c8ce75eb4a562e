"""Amounts of cells are the same with the tables left out that are zero."""

import numpy as np
import pytest

from planner.strategy_search.decomposition.cells import Cells


@pytest.mark.parametrize("scale", [1, 5000], ids=["narrow", "wide"])
def test_tables_without_amounts_are_left_out_of_wide_pieces_alone(scale: int) -> None:
    generator = np.random.default_rng(scale)
    tables = [generator.random(scale), np.zeros((scale, 2)), 3 * scale, generator.random((scale, 3)), scale]
    every = np.concatenate([np.zeros(one) if isinstance(one, int) else one.ravel() for one in tables])
    cells = Cells.of(tables)
    assert cells.any()
    assert cells.values.size == (4 * scale if scale > 1 else every.size)
    np.testing.assert_array_equal(cells.all(), every)
    total = np.ones_like(every)
    cells.add_to(total, -2.5)
    np.testing.assert_allclose(total, 1 - 2.5 * every)
    for some in ([0], [every.size - 1], [scale, scale - 1], [*range(0, every.size, 3)], []):
        assert cells.sum_of(np.array(some, dtype=np.intp)) == pytest.approx(every[np.array(some, dtype=np.intp)].sum())


def test_nothing_is_held_of_nothing() -> None:
    cells = Cells.of([20_000, np.zeros(20_000)])
    assert not cells.any()
    assert cells.values.size == 0
    assert cells.sum_of(np.array([0, 39_999])) == 0.0
    assert not cells.all().any()
