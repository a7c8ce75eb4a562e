"""THE property of the runtime: under any legal plan it computes what the unsharded model computes.

Every operator gets a random legal strategy, every parameter random legal stored layouts, every input a random layout.
Loss and every gradient agree with the plain model to 1e-5 of the largest magnitude (float32; about 1e-6 is observed).
"""

import pytest

from tests.long_lists import first

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=pytest.mark.exhaustive if chunk else ()) for chunk in range(5)]
)
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_random_plans_on_a_square_mesh(pool, model: str, chunk: int) -> None:
    seeds = list(range(10 * chunk, 10 * chunk + 10))
    (errors, *others) = pool.run("tasks", "parity", model, (2, 2), seeds, 1, "none")
    assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))
    assert all(max(other) < TOLERANCE for other in others)


@pytest.mark.parametrize(
    ("sizes", "micro_batches", "recomputation"),
    [
        ((1, 4), 1, "none"),
        ((4, 1), 1, "none"),
        ((4,), 1, "full"),
        ((2, 2), 2, "none"),
        ((2, 2), 2, "full"),
        ((2, 2), 2, "selective"),
        ((4,), 1, ("selective", "none")),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", first(1, ["gpt", "llama"]))
def test_other_meshes_micro_batches_and_recomputation(
    pool, model: str, sizes: tuple[int, ...], micro_batches: int, recomputation: str | tuple[str, ...]
) -> None:
    seeds = [100, 101, 102]
    for errors in pool.run("tasks", "parity", model, sizes, seeds, micro_batches, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.parametrize(
    ("sizes", "recomputation"), first(1, [((2, 2), "none"), ((4,), "full"), ((2, 2), "selective")]), ids=str
)
def test_experts(pool, sizes: tuple[int, ...], recomputation: str) -> None:
    seeds = list(range(6))
    for errors in pool.run("tasks", "parity", "mixture", sizes, seeds, 1, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((4,), marks=pytest.mark.thorough)], ids=str)
def test_operators_that_language_models_lack(pool, sizes: tuple[int, ...]) -> None:
    seeds = list(range(16))
    for errors in pool.run("tasks", "parity", "assorted", sizes, seeds, 1, "none"):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.parametrize(
    ("model", "sizes", "micro_batches", "recomputation"),
    [
        ("resnet64", (2, 2), 2, "full"),
        ("vit", (4,), 1, "none"),
        ("dlrm", (2, 2), 2, "none"),
        ("wide-deep", (1, 4), 1, "none"),
    ],
    ids=str,
)
def test_images_and_clicks(pool, model: str, sizes: tuple[int, ...], micro_batches: int, recomputation: str) -> None:
    """Convolutions, synchronised batch norm, embedding tables. Running statistics are compared too."""
    seeds = [0, 1]
    for errors in pool.run("tasks", "parity", model, sizes, seeds, micro_batches, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


def test_rules_found_by_trial(pool) -> None:
    """Each rank searches for the rules by itself: what one of them found otherwise would not fit together."""
    seeds = list(range(8))
    for errors in pool.run("tasks", "parity", "gated", (2, 2), seeds, 1, "none"):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "micro_batches", "recomputation"),
    [((2, 2), 1, "none"), ((4,), 1, "full"), ((1, 4), 2, "none"), ((2, 2), 2, "full"), ((4,), 2, "selective")],
    ids=str,
)
@pytest.mark.parametrize("model", ["resnet64", "vit", "dlrm", "wide-deep", "bags"])
def test_more_images_and_clicks(
    pool, model: str, sizes: tuple[int, ...], micro_batches: int, recomputation: str
) -> None:
    seeds = list(range(10, 20))
    for errors in pool.run("tasks", "parity", model, sizes, seeds, micro_batches, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.thorough
def test_residual_networks_in_single_precision(pool) -> None:
    """Rounding alone changes gradients of the plain model by 5e-6."""
    for errors in pool.run("tasks", "parity", "resnet", (2, 2), [0, 1], 1, "none"):
        assert max(errors) < 2 * TOLERANCE, errors


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(2, 2), (4,)], ids=str)
def test_nineteen_operators_whose_rules_were_found_by_trial(pool, sizes: tuple[int, ...]) -> None:
    seeds = list(range(16))
    for errors in pool.run("tasks", "parity", "unusual", sizes, seeds, 1, "none"):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))
