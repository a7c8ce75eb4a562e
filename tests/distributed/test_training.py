"""Optimizer steps under plans that people know by name, against torch's optimizers on the unsharded model."""

import pytest

from tests.long_lists import first, rarely

TOLERANCE = 1e-5


USUAL = [
    ("megatron", (2, 2), 2),
    ("zero1", (4,), 1),
    ("zero2", (2, 2), 2),
    ("zero3", (4,), 2),
    ("random7", (2, 2), 2),
]
MORE = [("megatron", (2, 2), 1), ("zero1", (2, 2), 2), ("zero2", (4,), 1), ("zero3", (2, 2), 1)]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("kind", "sizes", "micro_batches", "optimizer"),
    [
        *first(len(USUAL), ((*case, "adamw") for case in (*USUAL, *MORE))),
        *first(0, ((*case, "sgd") for case in USUAL)),
        *rarely((*case, "sgd") for case in MORE),
    ],
    ids=str,
)
def test_five_steps_equal_the_unsharded_optimizer(
    pool, kind: str, sizes: tuple[int, ...], micro_batches: int, optimizer: str
) -> None:
    assert max(pool.run("tasks", "train", "llama", kind, sizes, optimizer, micro_batches)) < TOLERANCE


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_tied_weights_and_biases(pool, kind: str) -> None:
    assert max(pool.run("tasks", "train", "gpt", kind, (2, 2), "sgd", 1)) < TOLERANCE


@pytest.mark.cases(1)
@pytest.mark.parametrize("recomputation", ["none", "full", "selective"])
def test_zero2_reduces_the_gradient_of_every_micro_batch(pool, recomputation: str) -> None:
    """As ZeRO-1 but earlier: 21 gradients in the backward pass, nothing but the weights in the update."""
    found = pool.run("tasks", "communication", "zero2", (4,), recomputation)[0]
    assert found["forward"].get("all_gather", 0) == 0
    assert found["backward"] == {"reduce_scatter": 21}
    assert found["update"] == {"all_gather": 21}


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("recomputation", ["none", "full", "selective"])
@pytest.mark.parametrize("model", first(1, ["gpt", "llama"]))
def test_zero2_accumulates_what_the_plain_model_does(pool, model: str, recomputation: str) -> None:
    """Two micro-batches; the embedding of a GPT is used at both ends."""
    for errors in pool.run("tasks", "parity", model, (2, 2), ["zero2"], 2, recomputation):
        assert max(errors) < TOLERANCE


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("stages", [(2, 2), (1, 1, 1, 1)], ids=str)
def test_zero2_in_stages_that_share_a_parameter(pool, stages: tuple[int, ...]) -> None:
    """The embedding is on the first and on the last stage, and each adds up pieces of its gradient."""
    sizes = (4 // len(stages),)
    for errors, _ in pool.run("tasks", "pipelined", "gpt4", sizes, stages, ["zero2"], 2, "full"):
        assert max(errors) < TOLERANCE


@pytest.mark.exhaustive
def test_half_precision_keeps_float32_masters(pool) -> None:
    worst, narrow = pool.run("tasks", "half_precision", 1)[0]
    assert worst < 2e-2
    assert narrow


def test_a_megatron_plan_communicates_as_megatron_does(pool) -> None:
    found = pool.run("tasks", "communication", "megatron", (2, 2), "none")[0]
    # One sum after the embedding, two per block, two in the loss, one each for the count and the result.
    assert found["forward"] == {"all_reduce": 1 + 2 * 2 + 2 + 1 + 1, "all_reduce_max": 1}
    # Two per block and one for the head; nothing moves for the weights.
    assert found["backward"] == {"all_reduce": 2 * 2 + 1}
    # Gradients are summed over the data axis once a step: 2 blocks of 9 weights, embedding, norm, head.
    assert found["update"] == {"all_reduce": 2 * 9 + 3}


def test_zero1_reduces_once_a_step_and_gathers_the_weights(pool) -> None:
    found = pool.run("tasks", "communication", "zero1", (4,), "none")[0]
    assert found["backward"] == {}
    assert found["update"] == {"reduce_scatter": 21, "all_gather": 21}


@pytest.mark.cases(1)
@pytest.mark.parametrize("recomputation", ["none", "full"])
def test_zero3_gathers_weights_again_in_the_backward_pass(pool, recomputation: str) -> None:
    found = pool.run("tasks", "communication", "zero3", (4,), recomputation)[0]
    assert found["forward"]["all_gather"] == 21
    # All but the embedding's, which its gradient does not need.
    assert found["backward"] == {"all_gather": 20, "reduce_scatter": 21}
    assert found["update"] == {}
