"""A loss that is not finite is refused on every rank, with the first operator that made it, before the update."""

import pytest
import torch

from tests.long_lists import first, rarely

PLANS = (
    ((2, 2), 0, {"micro_batches": 2}),
    ((2,), 1, {"micro_batches": 2, "stages": (1, 1), "recomputation": "full"}),
)
MESHES = (((4,), {"recomputation": "full"}), ((2, 2), {}), ((2,), {"stages": (1, 1)}))
MORE = (
    *first(0, ((sizes, 2, settings) for sizes, settings in MESHES)),
    *rarely((sizes, seed, settings) for seed in range(3, 8) for sizes, settings in MESHES),
)


def same(answers: list) -> object:
    """The answer that all ranks give."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("sizes", "seed", "settings"), [*PLANS, *MORE], ids=str)
def test_a_logarithm_of_a_negative_number(pool, sizes: tuple[int, ...], seed: int, settings: dict[str, object]) -> None:
    message = same(pool.run("tasks_checking", "breakdown", torch.float32, -20.0, sizes, seed, settings))
    assert message.startswith("the loss of step 3 is nan: "), message
    last = settings.get("micro_batches", 1) - 1
    words = [
        f"in micro-batch {last} ",
        "operator 'blocks.1/log' (aten.log.default in module blocks.1)",
        "NaN among the",
    ]
    assert all(word in message for word in [*words, "this step has changed no weight"]), message


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("dtype", "offset"), [(torch.float16, 13.0), (torch.bfloat16, 100.0)], ids=str)
@pytest.mark.parametrize(("sizes", "seed", "settings"), [PLANS[0], *MORE[:6]], ids=str)
def test_an_overflow(
    pool, dtype: torch.dtype, offset: float, sizes: tuple[int, ...], seed: int, settings: dict[str, object]
) -> None:
    message = same(pool.run("tasks_checking", "breakdown", dtype, offset, sizes, seed, settings))
    assert "operator 'blocks.0/exp' (aten.exp.default in module blocks.0)" in message, message
    assert "infinite among the" in message, message


@pytest.mark.cases(0, 0)
@pytest.mark.parametrize(("sizes", "seed", "settings"), [*PLANS, *MORE[:6]], ids=str)
def test_a_weight_that_is_not_finite(pool, sizes: tuple[int, ...], seed: int, settings: dict[str, object]) -> None:
    message = same(pool.run("tasks_checking", "broken_weight", sizes, seed, settings))
    assert message.startswith("the loss of step 2 is nan: "), message
    assert "parameter 'blocks.1.linear.weight' holds 1 NaN among the" in message, message
    assert "before step 2, from the update of step 1" in message, message


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("sizes", "seed", "settings"), [*PLANS, ((2, 2), 7, {"micro_batches": 2, "buckets": 4096}), *MORE[:3]], ids=str
)
def test_a_gradient_that_is_not_finite(pool, sizes: tuple[int, ...], seed: int, settings: dict[str, object]) -> None:
    number, message = same(pool.run("tasks_checking", "broken_gradient", True, sizes, seed, settings))
    assert number == 2
    assert message.startswith("NonFiniteError: the loss of step 2 is finite, but the gradient of"), message
    assert "parameter 'blocks.0.root'" in message, message
    number, message = same(pool.run("tasks_checking", "broken_gradient", False, sizes, seed, settings))
    assert number == 3
    assert "parameter 'blocks.0.root'" in message, message
    assert "before step 3, from the update of step 2" in message, message
