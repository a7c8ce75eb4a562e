"""Under any plan the elements are dropped that the unsharded model drops: losses and gradients agree.

The model drops whole channels, results of layers and hidden units, and probabilities of causal attention with shared
keys, each with probability 0.1.
"""

import pytest

from tests.long_lists import rarely

TOLERANCE = 1e-5
thorough = pytest.mark.thorough


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "micro_batches", "recomputation", "seeds"),
    [
        ((2, 2), 2, "full", range(3)),
        pytest.param((2, 2), 1, "none", range(8), marks=thorough),
        pytest.param((2, 2), 2, "none", range(4), marks=thorough),
        pytest.param((2, 2), 1, "full", range(4), marks=thorough),
        pytest.param((2, 2), 2, ("selective", "none"), range(4), marks=thorough),
        pytest.param((4,), 1, "full", range(4), marks=thorough),
        pytest.param((4,), 2, "selective", range(4), marks=thorough),
        *rarely(
            [
                ((2, 2), 1, "none", range(8, 30)),
                ((2, 2), 2, "none", range(4, 10)),
                ((2, 2), 1, "full", range(4, 10)),
                ((2, 2), 2, ("selective", "none"), range(4, 10)),
                ((4,), 1, "full", range(4, 10)),
                ((4,), 2, "selective", range(4, 10)),
            ]
        ),
    ],
    ids=str,
)
def test_random_plans(
    pool, sizes: tuple[int, ...], micro_batches: int, recomputation: str | tuple[str, ...], seeds: range
) -> None:
    for errors in pool.run("tasks", "parity", "dropping", sizes, list(seeds), micro_batches, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("model", "sizes", "stages", "micro_batches", "recomputation"),
    [
        ("dropping", (2,), (1, 1), 2, "full"),
        pytest.param("dropping", (2,), (1, 1), 1, "none", marks=thorough),
        pytest.param("dropping", (2,), (1, 1), 4, "selective", marks=thorough),
        pytest.param("dropping4", (1,), (1, 1, 1, 1), 4, "full", marks=thorough),
        pytest.param("dropping4", (1,), (1, 1, 1, 1), 2, "none", marks=thorough),
    ],
    ids=str,
)
def test_pipelines(
    pool, model: str, sizes: tuple[int, ...], stages: tuple[int, ...], micro_batches: int, recomputation: str
) -> None:
    seeds = [0, 1, 2]
    for errors, _ in pool.run("tasks", "pipelined", model, sizes, stages, seeds, micro_batches, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.exhaustive
def test_training_draws_anew_in_every_step_and_micro_batch_and_for_every_seed(pool) -> None:
    for worst, masks in pool.run("tasks", "train_dropping"):
        assert worst < TOLERANCE
        assert len(set(masks)) == len(masks), "one micro-batch dropped as another did"
