"""Optimizer states offloaded change nothing but where they are: training is equal, bit for bit."""

from dataclasses import replace

import pytest

from planner.sharding.update import PLAIN, Update
from tests.long_lists import first

CASES = (
    ("llama", "zero1", (4,), "host", {}, PLAIN),
    ("llama", "zero3", (2, 2), "disk", {"micro_batches": 2, "recomputation": "full"}, PLAIN),
    ("llama4", "megatron", (1, 2), "mixed", {"stages": (2, 2), "micro_batches": 2}, PLAIN),
    ("gpt", "zero2", (4,), "mixed", {"optimizer": "sgd"}, Update(buckets="none", clip_norm=0.5)),
    ("gpt4", "zero1", (2,), "host", {"stages": (2, 2), "micro_batches": 2}, Update(buckets=4096)),
    ("llama", "zero1", (4,), "disk", {}, Update(buckets=4096, clip_norm=0.5)),
    ("llama", 11, (2, 2), "host", {}, PLAIN),
    ("gpt", 12, (2, 2), "mixed", {"micro_batches": 2, "optimizer": "sgd"}, PLAIN),
)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("model", "kind", "sizes", "home", "settings", "update"), first(2, CASES), ids=str)
def test_offloaded_states_change_nothing(pool, model, kind, sizes, home, settings, update) -> None:  # type: ignore[no-untyped-def]
    for difference, outside, inside in pool.run(
        "tasks_offload", "same_training", model, kind, sizes, home, settings, update
    ):
        assert difference == 0
        assert outside > 0
        assert (inside == 0) == (home != "mixed")


ACTIVATIONS = (
    ("llama4", "zero1", (4,), "device", {"micro_batches": 2, "global_batch": 8, "recomputation": "full"}, "host"),
    ("llama4", "zero3", (2,), "disk", {"stages": (2, 2), "micro_batches": 4, "recomputation": "full"}, "disk"),
    (
        "gpt4", 21, (2,), "device",
        {"stages": (1, 3), "micro_batches": 4, "recomputation": "selective", "kept": ("linear", "gelu")}, "host",
    ),
    (
        "llama4", 22, (2,), "host",
        {"stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "interleaved_1f1b", "micro_batches": 4,
         "recomputation": "full"}, "disk",
    ),
    ("llama4", 23, (2, 2), "device", {"recomputation": ("full", "none", "full", "full")}, "host"),
    (
        "llama4", "zero1", (2,), "device",
        {"stages": (2, 2), "micro_batches": 4, "global_batch": 8, "interleave": 2, "recomputation": "full"}, "host",
    ),
    (
        "llama4", "zero1", (2,), "device",
        {"stages": (2, 2), "micro_batches": 2, "schedule": "seqpipe", "slices": 2, "recomputation": "full"}, "host",
    ),
    ("llama4", "zero2", (2,), "device", {"stages": (2, 2), "micro_batches": 4, "schedule": "zb_h1",
     "recomputation": "full"}, "disk"),
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "kind", "sizes", "home", "settings", "activations"), first(2, ACTIVATIONS), ids=str)
def test_offloaded_activations_change_nothing(pool, model, kind, sizes, home, settings, activations) -> None:  # type: ignore[no-untyped-def]
    """What flows into recomputed blocks is on the host or a disk until their backward pass."""
    for difference, outside, _ in pool.run(
        "tasks_offload", "same_training", model, kind, sizes, home, settings, PLAIN, activations
    ):
        assert difference == 0
        assert outside > 0


SAVED = (
    ("llama4", "zero3", (2,), "device", {"stages": (2, 2), "micro_batches": 4, "global_batch": 8}, "host", "device"),
    ("gpt4", "megatron", (2, 2), "host", {"micro_batches": 2, "global_batch": 8}, "disk", "device"),
    ("llama4", "zero1", (2,), "device", {"stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "interleaved_1f1b",
     "micro_batches": 4, "global_batch": 8}, "host", "host"),
    ("llama4", "zero2", (2,), "device", {"stages": (2, 2), "micro_batches": 4, "global_batch": 8,
     "schedule": "zb_h1"}, "host", "device"),
    ("llama4", "zero1", (2,), "device", {"stages": (2, 2), "micro_batches": 4, "global_batch": 8, "interleave": 2},
     "host", "device"),
    ("llama4", 24, (2, 2), "device", {"recomputation": ("full", "none", "none", "full")}, "host", "device"),
    ("gpt4", 25, (2, 2), "mixed", {"micro_batches": 2, "optimizer": "sgd"}, "disk", "host"),
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "kind", "sizes", "home", "settings", "saved", "weights"), first(1, SAVED), ids=str)
def test_what_is_saved_elsewhere_changes_nothing(pool, model, kind, sizes, home, settings, saved, weights) -> None:  # type: ignore[no-untyped-def]
    """What blocks that are not recomputed save is on the host or a disk until their backward pass; where some are, what
    flows into those."""
    for difference, outside, _ in pool.run(
        "tasks_offload", "same_training", model, kind, sizes, home, settings, PLAIN, saved, (weights, ""), saved
    ):
        assert difference == 0
        assert outside > 0


MICRO = {"micro_batches": 4, "global_batch": 8}
WEIGHTS = (
    ("llama4", "zero1", (4,), "host", {"micro_batches": 2, "global_batch": 8}, PLAIN, ("host", "")),
    ("llama4", "zero3", (2,), "device", {**MICRO, "stages": (1, 3), "recomputation": "full"}, PLAIN, ("disk", "")),
    ("gpt4", "zero2", (4,), "mixed", {"micro_batches": 2, "global_batch": 8}, replace(PLAIN, clip_norm=0.5),
     ("host", "")),
    ("llama4", "megatron", (2, 2), "device", {"recomputation": "full"}, PLAIN, ("host", r"\.[03]\.")),
    ("llama4", "zero1", (2,), "host", {**MICRO, "stages": (1, 1, 1, 1), "virtual_stages": 2,
     "schedule": "interleaved_1f1b"}, PLAIN, ("host", "")),
    ("gpt4", "zero1", (2,), "device", {**MICRO, "stages": (2, 2), "schedule": "zb_h1"}, PLAIN, ("disk", "")),
    ("llama4", "zero3", (2,), "device", {**MICRO, "stages": (2, 2), "schedule": "zb_h1", "recomputation": "full"},
     PLAIN, ("host", "")),
    ("llama4", "zero1", (2,), "device", {"micro_batches": 2, "stages": (2, 2), "schedule": "seqpipe", "slices": 2},
     PLAIN, ("host", "")),
    ("llama4", "zero1", (2,), "device", {**MICRO, "stages": (2, 2), "interleave": 2, "recomputation": "full"}, PLAIN,
     ("host", "")),
    ("gpt4", "zero3", (2,), "device", {**MICRO, "stages": (2, 2), "interleave": 2}, PLAIN, ("host", "")),
    ("llama4", "zero1", (4,), "host", {"recomputation": "selective", "kept": ("linear", "gelu")},
     Update(buckets=4096), ("host", "")),
    ("llama4", "zero1", (4,), "device", {}, Update(buckets=4096), ("disk", "mlp")),
    ("llama4", "zero3", (2, 2), "device", {"micro_batches": 2, "recomputation": ("full", "none", "full", "none")},
     PLAIN, ("host", "")),
    ("gpt4", 32, (2, 2), "mixed", {"micro_batches": 2, "optimizer": "sgd"}, replace(PLAIN, master_weights=False),
     ("host", "")),
    ("gpt4", "zero2", (4,), "mixed", {"micro_batches": 2}, replace(PLAIN, moment_dtype="bf16"), ("host", "")),
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "kind", "sizes", "home", "settings", "update", "weights"), first(2, WEIGHTS), ids=str
)
def test_offloaded_weights_change_nothing(pool, model, kind, sizes, home, settings, update, weights) -> None:  # type: ignore[no-untyped-def]
    """Those of blocks are on the host or a disk but while their block runs."""
    for difference, outside, _ in pool.run(
        "tasks_offload", "same_training", model, kind, sizes, home, settings, update, "device", weights
    ):
        assert difference == 0
        assert outside > 0
