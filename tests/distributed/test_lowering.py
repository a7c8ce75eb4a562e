"""Lowered programs and the general executor make the same, bit for bit, on four real ranks."""

import pytest

from tests.long_lists import first, rarely

KEPT = ("linear", "scaled_dot_product_attention", "gelu", "norm")
FULL = {"recomputation": "full"}
SELECTIVE = {"recomputation": "selective", "kept": KEPT}
PIPELINE = {"stages": (2, 2), "micro_batches": 4, "global_batch": 8}

CASES = [
    ("llama", "megatron", (2, 2), {}),
    ("llama4", "megatron", (1, 2), {**PIPELINE, "interleave": 2, "micro_batches": 2, "global_batch": 16}),
    ("mixture4", "zero2", (2,), {**PIPELINE, **SELECTIVE, "schedule": "zb_h1"}),
    ("dropping", 3, (2, 2), {"micro_batches": 2, **FULL}),
    ("resnet64", 1, (2, 2), {"micro_batches": 2, **FULL}),
    ("llama", "zero3", (4,), {"micro_batches": 2}),
    ("llama", "zero3", (4,), FULL),
    ("gpt", 7, (2, 2), SELECTIVE),
    ("mixture", 2, (2, 2), {}),
    ("assorted", 4, (2, 2), {}),
    ("dlrm", 0, (2, 2), {"micro_batches": 2}),
    ("gpt4", "zero2", (2,), {**PIPELINE, **FULL}),
    ("llama4", "zero3", (2,), {**PIPELINE, "schedule": "interleaved_1f1b", "stages": (1,) * 4, "virtual_stages": 2}),
    ("skipping", 6, (2,), {**PIPELINE, **SELECTIVE}),
    *(("llama", seed, (2, 2), {"micro_batches": 2}) for seed in range(20, 22)),
    *rarely(("llama", seed, (2, 2), {"micro_batches": 2}) for seed in range(22, 28)),
]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("model", "kind", "sizes", "settings"), first(6, CASES), ids=str)
def test_the_same_bit_for_bit(pool, model: str, kind: int | str, sizes: tuple[int, ...], settings: dict) -> None:
    for different, tensors in pool.run("tasks_lowering", "same", model, kind, sizes, settings):
        assert different == 0, f"{different} of {tensors} tensors"
        assert tensors > 4
