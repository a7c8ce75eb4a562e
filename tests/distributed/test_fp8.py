"""Linear layers in fp8: under any legal plan they compute what the unsharded model computes under the same recipe.

Casting to fp8 rounds to three bits, so that the least difference before a cast may become a large one behind it. The
models compute in float64, in which sums in another order differ by so little that no cast notices; loss and gradients
agree to the bar of all plans.
"""

from collections.abc import Mapping

import pytest

from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import GATHERED

TOLERANCE = 1e-5
NOW = [name for name, recipe in RECIPES.items() if not recipe.delayed]
"""Recipes whose scales are those of the tensors as they are."""

SQUARE = [
    ((2, 2), ["megatron", "zero1", "zero3", 0, 1], {}),
    ((4,), ["zero2", 2, 3], {"recomputation": "full", "micro_batches": 2}),
    ((2, 2), [4, 5], {"recomputation": "selective"}),
    ((2,), [6, 7], {"stages": (1, 1), "micro_batches": 2}),
    ((2,), [8], {"stages": (1, 1), "micro_batches": 4, "schedule": "zb_h1"}),
]
"""Mesh, plans by hand or drawn with a seed, and settings: 13 plans for each recipe on four processes."""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("recipe", NOW)
@pytest.mark.parametrize(("sizes", "seeds", "settings"), SQUARE, ids=lambda value: str(value)[:40])
def test_plans_on_four_processes(
    pool, recipe: str, sizes: tuple[int, ...], seeds: list[int | str], settings: Mapping[str, object]
) -> None:
    for errors in pool.run("tasks_fp8", "parity", "llama64", recipe, sizes, seeds, dict(settings)):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("recipe", NOW)
def test_layers_with_a_bias(pool, recipe: str) -> None:
    for errors in pool.run("tasks_fp8", "parity", "gpt64", recipe, (2, 2), [0, 1, 2, "zero3"], {}):
        assert max(errors) < TOLERANCE


BOTH = {"experts": True, "dispatch": True}
EXPERTS = [
    ((2, 2), ["samples", "tensor inside", "folded", "alone and exchanged"], {}, BOTH, False),
    ((2, 2), ["zero3", "folded samples", "alone"], {"recomputation": "full"}, {"experts": True}, False),
    ((2, 2), ["samples", "folded"], {"recomputation": "selective"}, {"dispatch": True}, True),
    ((1, 2), ["tensor inside", "samples"], {"stages": (1, 1), "micro_batches": 2}, BOTH, False),
]
"""Mesh, ways to divide experts, settings, what is in fp8, and whether tokens are sent once: 11 plans for each recipe on
four processes. Experts are 144 wide, sequences of 8 tokens: devices have parts of blocks and of lines."""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("recipe", NOW)
@pytest.mark.parametrize(("sizes", "ways", "settings", "fp8", "once"), EXPERTS, ids=lambda value: str(value)[:40])
def test_experts_on_four_processes(
    pool,
    recipe: str,
    sizes: tuple[int, ...],
    ways: list[str],
    settings: Mapping[str, object],
    fp8: Mapping[str, bool],
    once: bool,
) -> None:
    for errors in pool.run("tasks_fp8", "experts", recipe, sizes, ways, dict(settings), dict(fp8), once):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("recipe", NOW)
@pytest.mark.parametrize(
    ("ways", "settings"),
    [(["tensor inside", "samples"], {}), (["folded", "alone and exchanged"], {"recomputation": "full"})],
)
def test_experts_without_a_gate(pool, recipe: str, ways: list[str], settings: Mapping[str, object]) -> None:
    arguments = (recipe, (2, 2), ways, dict(settings), BOTH, False, "ungated64")
    for errors in pool.run("tasks_fp8", "experts", *arguments):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


WITHOUT = [
    ((0,), ["alone and exchanged"]),
    ((0,), ["alone", "folded samples"]),
    ((1,), ["tensor inside", "alone", "zero3"]),
]
"""Axes that lack the all-to-all, and ways that exchange rows on the other one alone."""


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize(("lacking", "ways"), WITHOUT)
def test_axes_without_the_alltoall(pool, recipe: str, lacking: tuple[int, ...], ways: list[str]) -> None:
    arguments = (recipe, (2, 2), ways, {}, BOTH, False, "wide64", lacking)
    for errors in pool.run("tasks_fp8", "experts", *arguments):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


LONELY = [["folded"], ["alone and exchanged", "tensor inside"]]
"""Ways in which devices have no other experts than those that get no token."""


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("recipe", NOW)
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("ways", LONELY, ids=str)
def test_experts_that_get_no_token(pool, recipe: str, ways: list[str], once: bool) -> None:
    arguments = (recipe, (2, 2), ways, {}, BOTH, once, "lonely64")
    for errors in pool.run("tasks_fp8", "experts", *arguments):
        assert max(errors) < TOLERANCE, dict(zip(ways, errors, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", NOW)
def test_of_layers_that_share_a_weight_some_are_not_in_fp8(pool, recipe: str) -> None:
    for errors in pool.run("tasks_fp8", "parity", "tied-linears64", recipe, (2, 2), ["zero1", 0, 1], {}):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.thorough)])
def test_devices_that_do_not_agree_on_scales_are_noticed(pool, recipe: str) -> None:
    assert pool.run("tasks_fp8", "without_agreement", "llama64", recipe, (2, 2))[0] > 100 * TOLERANCE


IN_TWO = {"stages": (1, 1), "micro_batches": 2}
STEPS = [
    ("gpt64", (2, 2), ["zero3"], {}, {}),
    ("gpt64", (2, 2), [1], {}, {}),
    ("wide64", (2, 2), ["experts: samples", "experts: tensor inside", "experts: alone and exchanged"], {}, BOTH),
    ("ungated64", (2, 2), ["experts: samples", "experts: tensor inside", "experts: zero3"], {}, BOTH),
    ("sharing64", (2,), ["zero3", 9], {"stages": (2, 2), "micro_batches": 2}, {}),
    ("sharing64", (2, 2), ["zero1", 10], {"recomputation": "full"}, {}),
    ("lonely64", (2, 2), ["experts: folded", "experts: alone"], {"micro_batches": 2}, {"experts": True}),
    ("wide64", (2, 2), ["experts: zero3", "experts: folded samples"], {"recomputation": "full"}, {"experts": True}),
    ("wide64", (1, 2), ["experts: samples"], IN_TWO, BOTH),
    ("llama64", (2, 2), ["megatron", "zero3", 0], {}, {}),
    ("llama64", (4,), ["zero2", 2], {"recomputation": "full", "micro_batches": 2}, {}),
    ("llama64", (2, 2), [4, 5], {"recomputation": "selective"}, {}),
    ("llama64", (2,), [6, 7], IN_TWO, {}),
    ("llama64", (2,), [8], {"stages": (1, 1), "micro_batches": 4, "schedule": "zb_h1"}, {}),
]
"""Model, mesh, plans, settings and what is in fp8 beside linear layers: 27 plans over four steps each, by the scales of
the two steps before; 11 with experts, of which some get no token, 4 with a weight that layers of several blocks share,
on other stages, too."""


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("model", "sizes", "seeds", "settings", "fp8"), STEPS, ids=lambda value: str(value)[:40])
def test_delayed_scales_are_those_of_the_plain_model_step_by_step(
    pool,
    model: str,
    sizes: tuple[int, ...],
    seeds: list[int | str],
    settings: Mapping[str, object],
    fp8: Mapping[str, bool],
) -> None:
    for found in pool.run("tasks_fp8", "steps_of", model, sizes, seeds, dict(settings), dict(fp8)):
        for seed, (error, far) in zip(seeds, found, strict=True):
            assert error < TOLERANCE < far, seed  # and fp8 tells


GATHERED_IN_FP8 = [
    ("llama64", (4,), ["zero3", 0], {"gathers": "block"}),
    ("llama64", (2, 2), ["megatron", "zero3", 1], {"gathers": "ahead"}),
    ("llama64", (4,), ["zero3", "zero2"], {"gathers": "ahead", "recomputation": "full", "micro_batches": 2}),
    ("gpt64", (2, 2), ["zero3", 2], {"gathers": "ahead", "recomputation": "selective"}),
    ("llama64", (2,), ["zero3", 3], {"gathers": "ahead", **IN_TWO}),
    ("sharing64", (2, 2), ["zero3", 4], {"gathers": "block"}),
]
"""Model, mesh, plans and settings: 13 plans whose weights are gathered in fp8, over four steps each, for each recipe.
Devices have parts of blocks of 128, and whole ones."""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("recipe", "model", "sizes", "seeds", "settings"),
    [(recipe, *one) for one in GATHERED_IN_FP8 for recipe in GATHERED],
    ids=lambda value: str(value)[:40],
)
def test_weights_that_are_gathered_in_fp8_are_those_of_the_plain_model(
    pool, recipe: str, model: str, sizes: tuple[int, ...], seeds: list[int | str], settings: Mapping[str, object]
) -> None:
    arguments = (model, sizes, seeds, dict(settings), {"gathered": True}, recipe)
    for found in pool.run("tasks_fp8", "steps_of", *arguments):
        for seed, (error, far) in zip(seeds, found, strict=True):
            assert error < TOLERANCE < far, seed


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_scales_of_weights_that_nobody_agrees_on_are_noticed(pool, recipe: str) -> None:
    assert pool.run("tasks_fp8", "weights_without_agreement", recipe)[0] > 100 * TOLERANCE


def test_delayed_scales_go_on_under_another_plan(pool, tmp_path) -> None:
    """With the histories of a checkpoint; without them the first step of the other plan would have scales of 1."""
    for error in pool.run("tasks_fp8", "handed_on", "llama64", str(tmp_path), "megatron", "zero3"):
        assert error < TOLERANCE
