"""Tensor parallelism under its products, on real ranks: loss and gradients are those of the unsharded model, whatever
the chunks, and both executors agree to the bit."""

from typing import Any

import pytest

from tests.long_lists import first, rarely

FULL = {"recomputation": "full"}
SELECTIVE = {"recomputation": "selective", "kept": ("scaled_dot_product_attention", "silu", "gelu", "norm")}
SOME_PRODUCTS = {"recomputation": "selective", "kept": ("q_proj/linear", "gate_proj/linear")}
PRODUCTS = {"recomputation": "selective", "kept": tuple(f"{one}_proj/linear" for one in ("q", "k", "v", "gate", "up"))}
TWO = {"micro_batches": 2}
PIPELINE = {"stages": (2, 2), "micro_batches": 4, "global_batch": 8}
TOLERANCE = 1e-5

CASES = [
    ("llama", "sequence", (2, 2), (2, 2), FULL),
    ("llama", "megatron", (1, 4), (2, 4, 1), {}),
    ("llama4", "sequence", (1, 2), (2, 1), PIPELINE),
    ("llama", "sequence", (1, 4), (2, 1), {}),
    ("llama", "sequence_zero3", (2, 2), (2, 2, 1), {"gathers": "ahead"}),
    ("llama", "sequence_zero3", (2, 2), (1, 2), {"gathers": "block", **FULL}),
    ("llama", "sequence_zero3", (2, 2), (2, 2), {"gathers": "each", **TWO}),
    ("llama", "megatron", (2, 2), (2, 2, 2), SELECTIVE),
    ("llama", "megatron", (2, 2), (1, 1), TWO),
    ("llama4", "megatron", (1, 2), (4, 2), {**PIPELINE, **FULL}),
    ("llama4", "sequence", (1, 2), (2, 2), {**PIPELINE, "schedule": "gpipe", **SELECTIVE}),
    ("llama4", "sequence", (1, 2), (2, 2), {**PIPELINE, "schedule": "interleaved_1f1b", "stages": (1,) * 4,
                                            "virtual_stages": 2}),
    ("mixture", 1, (2, 2), (2, 2), {}),
    *(("gpt", seed, (4,), (2, 2), {}) for seed in range(3, 6)),
    *(("gpt", seed, (2, 2), (2, 1), FULL) for seed in range(5, 8)),
    *(("llama", seed, (2, 2), (1, 2), TWO) for seed in range(4)),
    *rarely(("gpt", seed, (2, 2), (2, 2), SELECTIVE) for seed in range(8, 16)),
    *rarely(("llama", seed, (4,), (2, 2), FULL) for seed in range(8, 16)),
]  # fmt: skip
PAIRS = [
    ("llama", "sequence", (1, 2), (4, 2, 1), {}),
    ("adapted64", "sequence", (1, 2), (2, 2, 1), {}),
    ("adapted64", "sequence", (1, 2), (2, 2), SOME_PRODUCTS),
    ("llama", "megatron", (1, 2), (2, 2), {**TWO, **FULL}),
    ("llama", "sequence", (1, 2), (2, 4, 1), SOME_PRODUCTS),
    ("llama", "sequence", (1, 2), (2, 2), {**TWO, **PRODUCTS}),
    ("llama", "sequence", (1, 2), (2, 4), FULL),
    ("dropping", 3, (2,), (2, 2), {}),
    ("gpt", 3, (2,), (2, 2), {}),
]


def held(answers: list[Any], kind: int | str) -> None:
    for lowered, general, found in answers:
        assert max(lowered, general) < TOLERANCE
        assert lowered == general
        if isinstance(kind, str):
            assert found["operand"] >= 2
            assert found["result"] >= 2


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize(("model", "kind", "sizes", "chunks", "settings"), CASES, ids=str)
def test_four(
    pool, model: str, kind: int | str, sizes: tuple[int, ...], chunks: tuple[int, ...], settings: dict
) -> None:
    held(pool.run("tasks_overlap", "parity", model, kind, sizes, chunks, settings), kind)


@pytest.mark.parametrize(("model", "kind", "sizes", "chunks", "settings"), first(1, PAIRS), ids=str)
def test_two(
    pair, model: str, kind: int | str, sizes: tuple[int, ...], chunks: tuple[int, ...], settings: dict
) -> None:
    held(pair.run("tasks_overlap", "parity", model, kind, sizes, chunks, settings), kind)


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, FULL, {**TWO, "gathers": "ahead"}], ids=str)
def test_steps_weights_and_evaluation_are_those_without(pair, settings: dict) -> None:
    """And who compares all operators over ranks in the first step finds what each of them promises."""
    kind = "sequence_zero3" if "gathers" in settings else "sequence"
    for worst, checked in pair.run("tasks_overlap", "trained", "llama", kind, (1, 2), (2, 2), settings):
        assert worst < TOLERANCE
        assert checked


@pytest.mark.exhaustive
@pytest.mark.slow
def test_chains_are_fused_beside_overlaps(pair) -> None:
    for worst, chains in pair.run("tasks_overlap", "compiled", "llama", "sequence", (1, 2), (2, 2), FULL):
        assert worst < TOLERANCE
        assert chains > 0
