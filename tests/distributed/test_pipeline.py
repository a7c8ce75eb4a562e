"""Pipeline stages on real processes: parity under random plans, uneven stages, tied weights, and the 1F1B order."""

import pytest

from costmodels import order_1f1b
from tests.long_lists import first

TOLERANCE = 1e-5


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("sizes", "stages", "micro_batches", "recomputation"),
    [
        ((2,), (2, 2), 2, "none"),
        ((2,), (1, 3), 4, "full"),
        ((), (1, 1, 1, 1), 4, "none"),
        ((), (1, 1, 1, 1), 1, "full"),
        ((2,), (3, 1), 1, "none"),
        ((2,), (2, 2), 4, ("selective", "none", "full", "selective")),
        ((), (0, 2, 2, 0), 4, "none"),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", first(1, ["gpt4", "llama4"]))
def test_random_plans_with_stages(
    pool,
    model: str,
    sizes: tuple[int, ...],
    stages: tuple[int, ...],
    micro_batches: int,
    recomputation: str | tuple[str, ...],
) -> None:
    seeds = [0, 1]
    answers = pool.run("tasks", "pipelined", model, sizes, stages, seeds, micro_batches, recomputation)
    for rank, (errors, turns) in enumerate(answers):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))
        stage = rank // (4 // len(stages))
        expected = order_1f1b(stage, len(stages), micro_batches)
        assert turns == [(turn.kind, turn.micro_batch) for turn in expected]


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("model", ["llama4", "gpt4"])
@pytest.mark.parametrize(
    ("sizes", "stages"), [((2,), (2, 2)), ((), (1, 1, 1, 1)), ((), (0, 2, 2, 0)), ((2,), (4, 0))], ids=str
)
def test_training_with_stages(pool, model: str, sizes: tuple[int, ...], stages: tuple[int, ...]) -> None:
    assert max(pool.run("tasks", "train_pipelined", model, sizes, stages, 7)) < TOLERANCE
