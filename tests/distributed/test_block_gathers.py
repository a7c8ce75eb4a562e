"""Weights of a block that are gathered together make what those make that are gathered one by one, on real ranks."""

import pytest

from tests.long_lists import first, rarely

FULL = {"recomputation": "full"}
SELECTIVE = {"recomputation": "selective", "kept": ("linear", "scaled_dot_product_attention", "gelu", "norm")}
PIPELINE = {"stages": (2, 2), "micro_batches": 4, "global_batch": 8}
TWO = {"micro_batches": 2}

CASES = [
    ("llama", "zero3", (4,), TWO),
    ("llama", "outer", (2, 2), {}),
    ("llama", "zero2", (4,), FULL),
    ("llama", "zero3", (4,), FULL),
    ("gpt", "zero3", (2, 2), SELECTIVE),
    ("mixture4", "zero3", (2,), {**PIPELINE, **SELECTIVE, "schedule": "zb_h1"}),
    ("llama4", "zero3", (2,), PIPELINE),
    ("llama4", "zero3", (2,), {**PIPELINE, "schedule": "interleaved_1f1b", "stages": (1,) * 4, "virtual_stages": 2}),
    ("llama4", "zero3", (2,), {**PIPELINE, "schedule": "pipedream_2bw"}),
    ("mixture", "zero3", (4,), {}),
    ("llama-one", "zero3", (4,), TWO),
    ("dropping", "zero3", (2, 2), {**FULL, **TWO}),
    ("resnet64", "zero3", (4,), {}),
    ("assorted", 4, (2, 2), {}),
    *(("llama", seed, (2, 2), TWO) for seed in range(2)),
    *(("gpt", seed, (2, 2), FULL) for seed in range(4, 6)),
    *rarely(("llama", seed, (2, 2), TWO) for seed in range(2, 4)),
    *rarely(("gpt", seed, (2, 2), FULL) for seed in range(6, 8)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "kind", "sizes", "settings"), first(7, CASES), ids=str)
def test_together_is_as_one_by_one(pool, model: str, kind: int | str, sizes: tuple[int, ...], settings: dict) -> None:
    for worst, alone, together in pool.run("tasks_gathers", "together", model, kind, sizes, settings):
        assert worst < 1e-5
        assert together <= alone
        if kind in ("outer", "zero2", "zero3"):
            assert together < alone
