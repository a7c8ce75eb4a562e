"""Losses and logits of the forward pass alone are those of the unsharded model, under every plan; nothing changes."""

from collections.abc import Mapping
from typing import Any

import pytest

TOLERANCE = 1e-5
FULL = {"recomputation": "full"}
SELECTIVE = {"recomputation": "selective", "kept": ("linear", "scaled_dot_product_attention", "gelu", "norm")}
TWO = {"micro_batches": 2}
PIPELINE = {"stages": (2, 2), "micro_batches": 4, "global_batch": 8}
LINE = {"stages": (1, 1, 1, 1), "micro_batches": 8, "global_batch": 8}
INTERLEAVED = {**PIPELINE, "schedule": "interleaved_1f1b", "stages": (1,) * 4, "virtual_stages": 2}
FORWARD = {"schedule": "forward"}
SLICED = {"micro_batches": 2, "global_batch": 8, "schedule": "seqpipe", "slices": 2, "stages": (2, 2)}

Case = tuple[str, str | int, tuple[int, ...], Mapping[str, Any]]
CASES: list[Case] = [
    ("dropping4", "zero3", (2,), {**INTERLEAVED, "gathers": "ahead"}),
    ("llama4", "megatron", (1, 2), {**PIPELINE, **FORWARD}),
    # tensor parallelism, recomputation, running statistics, experts, rings
    ("llama", "megatron", (2, 2), TWO),
    ("dropping", "zero3", (2, 2), {**FULL, **TWO}),
    ("resnet64", "zero3", (4,), {"gathers": "block"}),
    ("mixture", "experts: samples", (2, 2), {}),
    ("llama", "search", (), {"context": 4, "context_by": "ring", "micro_batches": 4}),
    # gathers
    ("llama", "zero3", (4,), {}),
    ("llama", "zero3", (4,), {"gathers": "block", **FULL}),
    ("llama", "outer", (2, 2), {"gathers": "ahead", **TWO}),
    ("gpt", "zero2", (4,), {**SELECTIVE, "gathers": "ahead"}),
    ("gpt", "zero1", (2, 2), {"lowered": False}),
    # layouts at random
    ("gpt", 3, (2, 2), TWO),
    ("llama", 1, (2, 2), {}),
    ("assorted", 4, (2, 2), {}),
    ("resnet64", 2, (2, 2), {}),
    ("vit", 5, (2, 2), TWO),
    ("dlrm", 1, (2, 2), TWO),
    ("towers", 2, (2, 2), {}),
    ("dropping", 1, (4,), {"lowered": False}),
    # pipelines
    ("llama4", "zero1", (2,), PIPELINE),
    ("gpt4", "zero3", (2,), {**PIPELINE, "schedule": "gpipe", "gathers": "ahead"}),
    ("llama4", "zero3", (2,), {**PIPELINE, "schedule": "zb_h1", **FULL}),
    ("mixture4", "zero2", (2,), {**INTERLEAVED, **SELECTIVE}),
    ("dropping4", "zero1", (), LINE),
    ("llama8", "zero1", (), {**LINE, "schedule": "zb_v", "stages": (1,) * 8, "virtual_stages": 2}),
    ("skipping", 1, (2,), PIPELINE),
    ("llama4", "zero3", (2,), {**PIPELINE, "schedule": "pipedream_2bw"}),
    ("llama4", "megatron", (1, 2), {**PIPELINE, "schedule": "pipedream"}),
    ("llama4", "zero3", (2,), {**PIPELINE, "interleave": 2}),
    # slices of the sequence
    ("llama4", "zero3", (2,), SLICED),
    ("llama4", "megatron", (1, 2), {**SLICED, "slices": 4, **FULL}),
    ("llama4", "zero1", (2,), {**SLICED, "slices": 4, "stages": (1, 1, 1, 1), "virtual_stages": 2}),
    ("llama4", "zero1", (2,), {**SLICED, "interleave": 2}),
    # contexts
    ("llama", "search", (), {"context": 4, "context_by": "hybrid", "ulysses": 2, "micro_batches": 2}),
    ("llama", "search", (), {"context": 2, "context_by": "ring", "tensor": 2, "sequence_parallel": True}),
    # experts
    ("mixture", "experts: folded", (2, 2), TWO),
    ("balanced", 3, (2, 2), {"optimizer": "sgd", **TWO}),
    ("deepseek", "experts: tensor inside", (2, 2), {"zero": 2, **TWO}),
    ("mixture4", "experts: zero3", (2, 1), {**PIPELINE, **FULL}),
    # outside of the devices
    ("llama", "zero3", (4,), {**FULL, "offload": ("host", "host")}),
    ("llama4", "zero3", (2,), {**PIPELINE, "gathers": "ahead", "offload": ("host", "device")}),
    ("dlrm", 0, (2, 2), {"placed": (("tables.*", "host"),)}),
    # plans that never train
    ("gpt", "zero3", (4,), {**FORWARD, "gathers": "ahead"}),
    ("resnet64", 4, (2, 2), {**FORWARD, **TWO}),
    ("dropping4", "zero1", (2,), {**PIPELINE, **FORWARD}),
    ("mixture4", "zero3", (), {**LINE, **FORWARD}),
    ("llama", "search", (), {**FORWARD, "context": 4, "context_by": "ring"}),
    ("dlrm", 2, (2, 2), {**FORWARD, "placed": (("tables.*", "host"),)}),
]


def check(found: list[tuple[float, float, bool, bool]]) -> None:
    for loss, logits, untouched, same in found:
        assert loss < TOLERANCE
        assert logits < TOLERANCE
        assert untouched
        assert same


@pytest.mark.slow
def test_loss_and_logits_are_those_of_the_unsharded_model(pool) -> None:
    usual = CASES[:2]
    answers = pool.run("tasks_evaluation", "all_evaluated", usual)
    for found in answers:
        check(found)
    for number in range(len(usual)):
        assert len({tuple(found[number][:2]) for found in answers}) == 1, "the same on every rank"


@pytest.mark.cases(0, 3)
@pytest.mark.parametrize("case", CASES[2:], ids=str)
def test_so_they_are_under_every_plan(pool, case: Case) -> None:
    for found in pool.run("tasks_evaluation", "evaluated", *case):
        check([found])


AS_IF = [
    ("dropping4", "zero2", (2,), PIPELINE),
    ("resnet64", 2, (2, 2), TWO),
    ("llama4", "zero3", (2,), {**PIPELINE, "gathers": "ahead"}),
    ("dlrm", 0, (2, 2), {"placed": (("tables.*", "host"),)}),
]


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize(("model", "how", "sizes", "settings"), AS_IF, ids=str)
def test_training_goes_on_as_if_nobody_had_looked(
    pool, model: str, how: str | int, sizes: tuple[int, ...], settings: Mapping[str, Any]
) -> None:
    assert all(pool.run("tasks_evaluation", "trained_the_same", model, how, sizes, settings))
