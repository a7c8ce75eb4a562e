"""Experts on processes: whatever the plan, what is computed is what the plain model computes."""

import pytest

from tests.long_lists import first

TOLERANCE = 1e-5
WAYS = ["samples", "zero3", "tensor inside", "folded", "folded samples", "alone", "alone and exchanged"]
UNCUT = [way for way in WAYS if way != "folded"]  # an expert with a capacity wants whole samples


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("model", "ways", "parts", "recomputation"),
    first(
        1,
        [
            ("mixture", ["tensor inside", "folded", "alone"], 1, "none"),
            ("mixture", WAYS, 1, "none"),
            ("mixture", ["tensor inside", "folded", "alone"], 2, "full"),
            ("mixture", ["tensor inside", "folded"], 1, "full"),
            ("mixture", ["samples", "zero3", "folded"], 1, "selective"),
            ("balanced", WAYS, 1, "none"),
            ("balanced", ["tensor inside", "folded"], 2, "selective"),
            ("capped", UNCUT, 1, "none"),
            ("capped", ["tensor inside", "alone"], 2, "full"),
        ],
    ),
    ids=str,
)
def test_ways_to_divide_experts(pool, model: str, ways: list[str], parts: int, recomputation: str) -> None:
    """Over devices that split samples; with tensor parallelism inside of each; over those that attention splits its
    heads on, by samples or by tokens; with all tokens everywhere."""
    for errors in pool.run("tasks_experts", "divided", model, ways, (2, 2), (), parts, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize(
    ("ways", "sizes", "settings"),
    [
        (["tensor inside", "folded", "alone", "zero3"], (2, 2), {}),
        (["tensor inside", "folded"], (2, 2), {"micro_batches": 2, "recomputation": "full"}),
        (["zero2", "folded samples", "alone and exchanged"], (2, 2), {"recomputation": "selective"}),
        (["tensor inside", "alone"], (1, 2), {"stages": (1, 1), "micro_batches": 2, "schedule": "zb_h1"}),
    ],
    ids=str,
)
def test_experts_without_a_gate(pool, ways: list[str], sizes: tuple[int, ...], settings: dict[str, object]) -> None:
    """However they are divided, in a pipeline that takes the backward pass apart, too."""
    arguments = {"stages": (), "micro_batches": 1, "recomputation": "none", **settings}
    for errors in pool.run("tasks_experts", "ungated", ways, sizes, arguments):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("model", "ways", "sizes", "settings"),
    [
        ("mixture", ["samples"], (2, 2), {}),
        ("mixture", ["tensor inside", "folded", "folded samples", "alone", "alone and exchanged"], (2, 2), {}),
        ("balanced", ["samples", "zero3"], (2, 2), {"recomputation": "full"}),
        ("ungated", ["samples", "folded"], (2, 2), {}),
        (
            "mixture",
            ["samples", "folded"],
            (1, 2),
            {"stages": (1, 1), "micro_batches": 2, "recomputation": "selective"},
        ),
    ],
    ids=str,
)
def test_tokens_that_are_sent_once(
    pool, model: str, ways: list[str], sizes: tuple[int, ...], settings: dict[str, object]
) -> None:
    """Over one axis, and two of which the first is that of the nodes; where tensor parallelism cuts experts, too."""
    for errors in pool.run("tasks_experts", "sent_once", model, ways, sizes, settings):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("recomputation", ["none", "full"])
@pytest.mark.parametrize("model", ["mixture", "balanced", "capped"])
def test_experts_in_a_pipeline(pool, model: str, recomputation: str) -> None:
    ways = ["tensor inside", "folded samples", "alone"]
    for errors in pool.run("tasks_experts", "divided", model, ways, (1, 2), (1, 1), 2, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(2, 2), (4,)], ids=str)
@pytest.mark.parametrize("model", ["balanced", "capped"])
def test_random_plans_of_other_experts(pool, model: str, sizes: tuple[int, ...]) -> None:
    for errors in pool.run("tasks", "parity", model, sizes, [*range(6)], 1, "none"):
        assert max(errors) < TOLERANCE, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "stages", "recomputation"), first(1, [((2, 2), (), "full"), ((2,), (1, 1), "none")]), ids=str
)
def test_loads_are_counted_over_the_whole_batch(
    pool, sizes: tuple[int, ...], stages: tuple[int, ...], recomputation: str
) -> None:
    """Biases that choose move after each step, and a loss evens out loads, on however many devices tokens are."""
    for errors in pool.run("tasks_experts", "balanced", sizes, stages, [0], recomputation):
        assert max(errors) < TOLERANCE, errors
