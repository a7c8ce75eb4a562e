"""THE property of the runtime: under any legal plan it computes what the unsharded model computes.

Every operator gets a random legal strategy, every parameter random legal stored layouts, every input a random layout.
Loss and every gradient agree with the plain model to 1e-5 of the largest magnitude (float32; about 1e-6 is observed).
"""

import pytest

from tests.long_lists import first, rarely

TOLERANCE = 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "seeds",
    first(
        1, [range(2), range(2, 5), range(5, 10), *rarely(range(10 * chunk, 10 * chunk + 10) for chunk in range(1, 5))]
    ),
)
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_random_plans_on_a_square_mesh(pool, model: str, seeds: range) -> None:
    (errors, *others) = pool.run("tasks", "parity", model, (2, 2), list(seeds), 1, "none")
    assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))
    assert all(max(other) < TOLERANCE for other in others)


OTHERS = [
    ((4, 1), 1, "none"),
    ((4,), 1, "full"),
    ((2, 2), 2, "selective"),
    ((4,), 1, ("selective", "none")),
    ((1, 4), 1, "none"),
    ((2, 2), 2, "none"),
    ((2, 2), 2, "full"),
]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("model", "sizes", "micro_batches", "recomputation"),
    [
        *first(4, (("gpt", *case) for case in OTHERS)),
        *first(0, (("llama", *case) for case in OTHERS[::2])),
        *rarely(("llama", *case) for case in OTHERS[1::2]),
    ],
    ids=str,
)
def test_other_meshes_micro_batches_and_recomputation(
    pool, model: str, sizes: tuple[int, ...], micro_batches: int, recomputation: str | tuple[str, ...]
) -> None:
    seeds = [100, 101]
    for errors in pool.run("tasks", "parity", model, sizes, seeds, micro_batches, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


UNEVEN = [((4,), 1, "none"), ((2, 2), 2, "selective")]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("sizes", "micro_batches", "recomputation"), UNEVEN, ids=str)
def test_parameters_that_devices_do_not_divide(
    pool, sizes: tuple[int, ...], micro_batches: int, recomputation: str
) -> None:
    """Of 34, 66 and 63 elements: their shards are padded."""
    seeds = [200, 201, 202]
    for errors in pool.run("tasks", "parity", "llama-uneven", sizes, seeds, micro_batches, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


EXPERTS = [((2, 2), "none"), ((4,), "full"), ((2, 2), "selective")]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("sizes", "recomputation", "seeds"),
    first(1, [*((*case, range(3)) for case in EXPERTS), *rarely((*case, range(3, 6)) for case in EXPERTS)]),
    ids=str,
)
def test_experts(pool, sizes: tuple[int, ...], recomputation: str, seeds: range) -> None:
    for errors in pool.run("tasks", "parity", "mixture", sizes, list(seeds), 1, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "seeds"),
    first(1, [((2, 2), range(8)), ((4,), range(8)), *rarely([((2, 2), range(8, 16)), ((4,), range(8, 16))])]),
)
def test_operators_that_language_models_lack(pool, sizes: tuple[int, ...], seeds: range) -> None:
    for errors in pool.run("tasks", "parity", "assorted", sizes, list(seeds), 1, "none"):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("model", "sizes", "micro_batches", "recomputation"),
    [
        ("dlrm", (2, 2), 2, "none"),
        ("vit", (4,), 1, "none"),
        ("resnet64", (2, 2), 2, "full"),
        ("wide-deep", (1, 4), 1, "none"),
    ],
    ids=str,
)
def test_images_and_clicks(pool, model: str, sizes: tuple[int, ...], micro_batches: int, recomputation: str) -> None:
    """Convolutions, synchronised batch norm, embedding tables. Running statistics are compared too."""
    seeds = [0, 1]
    for errors in pool.run("tasks", "parity", model, sizes, seeds, micro_batches, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


PIXELS = [
    ("pixels64", (2, 2), 2, "full"),
    ("pixels64", (4,), 1, "none"),
    ("pixels64", (2, 2), 1, "selective"),
    ("resnet64", (4,), 1, "full"),
]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("model", "sizes", "micro_batches", "recomputation"), [PIXELS[0], *rarely(PIXELS[1:])], ids=str
)
def test_images_cut_along_their_pixels(
    pool, model: str, sizes: tuple[int, ...], micro_batches: int, recomputation: str
) -> None:
    """Stencils that read the edges of their neighbours' pieces: by hand, and at random. Gradients, in float64, are off
    by 1e-14; the loss is told in float32."""
    seeds = ["pixels", 0, 1]
    for errors in pool.run("tasks", "parity", model, sizes, seeds, micro_batches, recomputation):
        assert max(errors) < 1e-6, dict(zip(seeds, errors, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["scan64", "associative64"])
def test_scans_along_time(pool, model: str) -> None:
    """As operators of PyTorch; samples and channels are cut."""
    for errors in pool.run("tasks", "parity", model, (2, 2), [0, 1, 2], 1, "none"):
        assert max(errors) < 1e-6, errors  # the loss is told in float32


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", [range(2), *rarely([range(2, 8)])])
def test_rules_found_by_trial(pool, seeds: range) -> None:
    """Each rank searches for the rules by itself: what one of them found otherwise would not fit together."""
    for errors in pool.run("tasks", "parity", "gated", (2, 2), list(seeds), 1, "none"):
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "seeds"),
    first(0, [((2, 2), range(8)), ((4,), range(8)), *rarely([((2, 2), range(8, 16)), ((4,), range(8, 16))])]),
)
def test_nineteen_operators_whose_rules_were_found_by_trial(pool, sizes: tuple[int, ...], seeds: range) -> None:
    for errors in pool.run("tasks", "parity", "unusual", sizes, list(seeds), 1, "none"):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))
