"""Combinations of what plans with layers in fp8 say, drawn from seeds: each computes what the unsharded model does.

Nothing in these models is computed in float32, so that no cast to fp8 tells sums in another order apart: weights after
three steps agree to twelve digits. (Losses are returned in float32.)
"""

import pytest

from tests.distributed.drawing import STAGES, Drawn, drawn

LOSSES, WEIGHTS = 1e-6, 1e-12
SEEDS = range(180)


@pytest.mark.slow
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_plan_is_the_plain_model(pool, seed: int) -> None:
    for losses, weights in pool.run("tasks_drawn", "compared", seed):
        assert losses < LOSSES, drawn(seed)
        assert weights < WEIGHTS, drawn(seed)


CLIPPED = {"sizes": (2,), "clip_norm": 0.05}


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("kind", ["zero1", "zero3"])
def test_gradients_in_float64_are_clipped_to_a_norm_in_float64(pool, kind: str) -> None:
    """Of stages, too, that have all of it from others."""
    one = Drawn(model="llama4", kind=kind, settings={**STAGES, "schedule": "1f1b"}, **CLIPPED)
    for _, weights in pool.run("tasks_drawn", "compared", one):
        assert weights < WEIGHTS
