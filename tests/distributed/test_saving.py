"""Checkpoints on real processes: what is resumed goes on bit by bit, under any plan it goes on."""

from pathlib import Path

import pytest

CASES = {
    "dense": ("llama", 3, (2, 2), {}),
    "zero1": ("llama", "zero1", (4,), {}),
    "zero2": ("llama", "zero2", (4,), {"micro_batches": 2}),
    "zero3": ("llama", "zero3", (4,), {}),
    "megatron": ("llama", "megatron", (2, 2), {"optimizer": "lamb", "update": {"clip_norm": 0.5}}),
    "mixture": ("mixture", 5, (2, 2), {}),
    "buffers after a step": ("balanced", 2, (2,), {"stages": (1, 1)}),
    "running statistics": ("resnet", 1, (2, 2), {"optimizer": "sgd"}),
    "dropout": ("dropping", 4, (2, 2), {"micro_batches": 2}),
    "uneven pipeline": ("llama4", 7, (2,), {"stages": (3, 1), "micro_batches": 4}),
    "virtual stages": (
        "llama4", 8, (2,),
        {"stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "interleaved_1f1b", "micro_batches": 4},
    ),
    "tied over stages": ("llama-one", 9, (2,), {"stages": (1, 1), "micro_batches": 2}),
    "narrow with masters": ("llama", "zero1", (4,), {"half": True}),
    "narrow without masters": ("llama", "zero3", (4,), {"half": True, "update": {"master_weights": False}}),
    "parked": ("llama", "zero1", (4,), {"parked": True, "half": True}),
    "parked without masters": (
        "llama4", 6, (2,),
        {"parked": True, "stages": (2, 2), "half": True, "optimizer": "sgd", "update": {"master_weights": False}},
    ),
    "own parameters": ("llama", "own norms", (4,), {"update": {"local_parameters": ("*norm*",)}}),
    "stale weights": ("llama4", 6, (2,), {"stages": (2, 2), "schedule": "pipedream_2bw", "micro_batches": 4}),
    "stashed weights": ("llama4", 6, (2,), {"stages": (2, 2), "schedule": "pipedream", "micro_batches": 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_resumed_goes_on_bit_by_bit(pool, tmp_path: Path, case: str) -> None:
    model, kind, sizes, settings = CASES[case]
    for wanted, found, unequal in pool.run(
        "tasks_saving", "resumed", model, kind, sizes, settings, str(tmp_path), True
    ):
        assert found == wanted
        assert unequal == []


MOVES = {
    "ZeRO to pipeline": ("llama4", ("zero3", (4,), {}), (3, (2,), {"stages": (3, 1), "micro_batches": 2})),
    "pipeline to tensor": ("llama4", (5, (2,), {"stages": (1, 3)}), ("megatron", (2, 2), {})),
    "experts": ("mixture", (2, (4,), {}), (9, (2, 2), {})),
    "tied over stages": ("llama-one", (4, (2,), {"stages": (1, 1)}), (1, (2, 2), {})),
    "sums in other orders": (
        "llama4", ("zero1", (4,), {"optimizer": "sgd"}),
        (6, (2,), {"stages": (2, 2), "optimizer": "sgd", "micro_batches": 2}),
    ),
    "parked to device": ("llama", ("zero1", (4,), {"parked": True}), ("zero3", (2, 2), {})),
    "with masters": ("llama", ("zero1", (4,), {"half": True}), ("zero3", (2, 2), {"half": True})),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVES)
def test_another_plan_goes_on_from_the_same_weights(pool, tmp_path: Path, case: str) -> None:
    model, first, then = MOVES[case]
    allowed = 2e-2 if first[2].get("half") else 1e-5
    for wanted, found, apart in pool.run("tasks_saving", "moved", model, first, then, str(tmp_path)):
        assert apart == 0.0
        assert found == pytest.approx(wanted, rel=allowed)
