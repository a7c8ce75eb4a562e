"""Edges of pieces on real processes: of one neighbour, and of several, which hand on what has come to them."""

import pytest


@pytest.mark.parametrize(
    ("before", "after", "length"),
    [(1, 1, 4), (2, 0, 2), (3, 2, 2), (5, 0, 2), (0, 6, 2), (6, 5, 2), (2, 3, 1)],
)
def test_what_is_around_a_piece_comes_and_goes_back(pool, before: int, after: int, length: int) -> None:
    assert pool.run("tasks_halo", "exchanged", before, after, length) == [(True, True)] * 4
