"""Masks, biases, lookups, inputs by name: under any legal plan they compute what the unsharded model computes."""

import pytest

from tests.long_lists import first

TOLERANCE = 1e-5
HUGGING_FACE = ("llama", "gpt2", "bert-hf", "t5-hf", "vit", "qwen3", "qwen2", "mistral")


@pytest.mark.cases(0, 0)
@pytest.mark.parametrize("model", first(2, ["t5", "user", "bert", "mistral"]))
def test_random_plans(pool, model: str) -> None:
    for errors in pool.run("language", "parity", model, (2, 2), [0, 1], "none"):
        assert max(errors) < TOLERANCE, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize(("sizes", "recomputation"), [((2, 2), "none"), ((4,), "full")], ids=str)
@pytest.mark.parametrize("model", ["bert", "t5", "user", *HUGGING_FACE])
def test_many_random_plans(pool, model: str, sizes: tuple[int, ...], recomputation: str) -> None:
    seeds = list(range(10)) if recomputation == "none" else [20, 21]
    for errors in pool.run("language", "parity", model, sizes, seeds, recomputation):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))
