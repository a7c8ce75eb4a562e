"""Experts on processes: whatever the plan, what is computed is what the plain model computes."""

import pytest

from tests.long_lists import first

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("sizes", "stages", "recomputation"), first(1, [((2, 2), (), "full"), ((2,), (1, 1), "none")]), ids=str
)
def test_loads_are_counted_over_the_whole_batch(
    pool, sizes: tuple[int, ...], stages: tuple[int, ...], recomputation: str
) -> None:
    """Biases that choose move after each step, and a loss evens out loads, on however many devices tokens are."""
    for errors in pool.run("tasks_experts", "balanced", sizes, stages, [0, 1], recomputation):
        assert max(errors) < TOLERANCE, errors
