"""Redistribution moves every tensor to where its layout says, and its gradient back."""

import pytest


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("sizes", [(2, 2), (4,), (1, 4), (2, 1, 2)], ids=str)
def test_pieces_are_those_of_the_full_tensor_in_both_directions(pool, sizes: tuple[int, ...]) -> None:
    counts = pool.run("tasks", "redistributions", sizes, 7, 150)
    assert counts[0] > 150
    assert len(set(counts)) == 1, "all ranks must take the same path"


@pytest.mark.cases(1)
@pytest.mark.parametrize("sizes", [(2, 2), (4,)], ids=str)
def test_shards_of_parameters_are_padded_and_operators_get_them_without(pool, sizes: tuple[int, ...]) -> None:
    counts = pool.run("tasks", "redistributions", sizes, 7, 60, True)
    assert counts[0] > 40
    assert len(set(counts)) == 1
