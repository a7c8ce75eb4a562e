"""Experts that are exchanged under other work, on real ranks: loss and gradients are those of the unsharded model,
whatever runs meanwhile, and both executors agree to the bit."""

from typing import Any

import pytest

from planner.graph.fp8 import Fp8
from tests.long_lists import rarely

FULL = {"recomputation": "full"}
SELECTIVE = {"recomputation": "selective"}
TWO = {"micro_batches": 2}
PIPELINE = {"stages": (1, 1), "micro_batches": 2}
TURNS = {"micro_batches": 4, "global_batch": 8, "interleave": 2}
IN_PAIRS = {"stages": (1,) * 4, "virtual_stages": 2, "schedule": "dualpipe_v", "micro_batches": 6, "global_batch": 12}
"""Forward turns run together with backward turns."""
TOLERANCE = 1e-5

PAIRS: list[Any] = [
    ("mixture", "samples", (2, 1), 3, FULL),
    pytest.param("mixture-frozen", "samples", (2, 1), 3, FULL, marks=pytest.mark.thorough),
    pytest.param("mixture64", "samples", (2, 1), 3, {"fp8": Fp8(recipe="rowwise"), **FULL}, marks=pytest.mark.thorough),
    pytest.param("mixtures", "samples", (2, 1), 3, FULL, marks=pytest.mark.thorough),
    pytest.param("beside", "folded", (1, 2), 6, {"chunks": 2, **FULL}, marks=pytest.mark.thorough),
    *rarely(
        [
            ("mixtures", "samples", (2, 1), 4, {}),
            ("mixture", "samples", (2, 1), 4, {}),
            ("balanced", "samples", (2, 1), 0, {**TWO, **SELECTIVE}),
            ("capped", "samples", (2, 1), 1, FULL),
            ("ungated", "samples", (2, 1), 3, {}),
            ("ungated64", "samples", (2, 1), 3, {"fp8": Fp8(recipe="rowwise", experts=True), **FULL}),
            ("mixture", "folded", (1, 2), 4, {"chunks": 1}),
            ("mixture", "zero3", (2, 1), 3, {"gathers": "ahead"}),
            ("mixture", "samples", (2, 1), 0, {**TURNS, **FULL}),
            ("mixture-frozen", "samples", (2, 1), 3, {}),
            ("mixture64", "samples", (2, 1), 3, {"fp8": Fp8(recipe="tensorwise")}),
            ("mixture64", "zero3", (2, 1), 2, {"fp8": Fp8(recipe="rowwise"), **SELECTIVE}),
            ("deepseek-direct", "samples", (2, 1), 0, {**TURNS, **SELECTIVE}),
        ]
    ),
]
FOURS: list[tuple[str, str, tuple[int, ...], int, dict[str, Any]]] = [
    ("mixture", "samples", (2, 2), 3, {"once": True, **FULL}),
    ("mixture", "tensor inside", (2, 2), 0, TURNS),
    *rarely(
        [
            ("mixture4", "samples", (2, 1), 3, IN_PAIRS),
            ("mixture4", "samples", (2, 1), 0, {**IN_PAIRS, **FULL}),
            ("mixture4", "zero3", (2, 1), 2, {**IN_PAIRS, **SELECTIVE}),
            ("mixture4", "zero3", (2, 1), 2, {**IN_PAIRS, **FULL, "gathers": "ahead"}),
            ("mixture4", "zero3", (2, 1), 2, {**IN_PAIRS, "gathers": "block"}),
            ("mixture", "zero3", (2, 2), 3, {"gathers": "ahead", **FULL}),
            ("mixture", "tensor inside", (2, 2), 4, {"chunks": 2}),
            ("mixture", "folded", (2, 2), 99, {}),
            ("deepseek", "samples", (2, 2), 3, {}),
            ("mixture", "alone and exchanged", (2, 2), 2, SELECTIVE),
            ("mixture", "samples", (2, 1), 3, PIPELINE),
            ("mixture", "samples", (2, 1), 3, {**PIPELINE, "schedule": "zb_h1"}),
            ("mixture", "samples", (2, 1), 3, {**PIPELINE, "schedule": "zb_h1", **FULL}),
            ("capped", "tensor inside", (2, 2), 2, SELECTIVE),
            ("balanced", "zero3", (2, 2), 0, FULL),
        ]
    ),
]


def held(answers: list[Any]) -> None:
    for lowered, general, count in answers:
        assert max(lowered, general) < TOLERANCE
        assert lowered == general
        assert count


@pytest.mark.parametrize(("model", "way", "sizes", "there", "settings"), PAIRS, ids=str)
def test_two(pair, model: str, way: str, sizes: tuple[int, ...], there: int, settings: dict) -> None:
    held(pair.run("tasks_exchange", "parity", model, way, sizes, there, settings))


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "way", "sizes", "there", "settings"), FOURS, ids=str)
def test_four(pool, model: str, way: str, sizes: tuple[int, ...], there: int, settings: dict) -> None:
    held(pool.run("tasks_exchange", "parity", model, way, sizes, there, settings))


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [FULL, *rarely([{}])], ids=str)
def test_steps_weights_and_evaluation_are_those_without(pair, settings: dict) -> None:
    """And who compares all operators over ranks in the first step finds what each of them promises."""
    for worst, checked in pair.run("tasks_exchange", "trained", "mixture", "samples", (2, 1), 3, settings):
        assert worst < TOLERANCE
        assert checked


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, TURNS], ids=str)
def test_others_compute_while_rows_are_on_their_way(pair, settings: dict) -> None:
    """There the first products of shared experts, back the last; backward those in turn, and gradients of weights. Or
    those of another micro-batch."""
    for forward, backward in pair.run("tasks_exchange", "meanwhile", "mixture", "samples", (2, 1), 4, settings):
        for between in (forward, backward):
            assert len(between) == 2 * 2 * settings.get("interleave", 1)  # there and back in two blocks
            assert min(between) > 0, (forward, backward)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_forward_pass_runs_beside_the_backward_pass_of_another_micro_batch(pool) -> None:
    """And goes on whenever that waits for rows, and the other way round."""
    for switches, turns, loss, expected in pool.run(
        "tasks_exchange", "in_pairs", "mixture4", "samples", (2, 1), IN_PAIRS
    ):
        assert turns > 0
        assert switches > 4 * turns
        assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.thorough
def test_nobody_computes_where_experts_are_waited_for(pair) -> None:
    for forward, backward in pair.run("tasks_exchange", "meanwhile", "mixture", "samples", (2, 1), -1, {}):
        assert set(forward) == set(backward) == {0}
