"""Combinations of what plans with layers in fp8 say, drawn from seeds: each computes what the unsharded model does.

Nothing in these models is computed in float32, so that no cast to fp8 tells sums in another order apart: weights after
three steps agree to twelve digits. (Losses are returned in float32.)
"""

import pytest

from tests.distributed.drawing import drawn

LOSSES, WEIGHTS = 1e-6, 1e-12
SEEDS = range(120)


@pytest.mark.slow
@pytest.mark.cases(1, 9)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_plan_is_the_plain_model(pool, seed: int) -> None:
    for losses, weights in pool.run("tasks_drawn", "compared", seed):
        assert losses < LOSSES, drawn(seed)
        assert weights < WEIGHTS, drawn(seed)
