"""The first step checks that every tensor lies as the plan promises; the first that does not is named on every rank."""

import pytest

from tests.long_lists import first, rarely


def same(answers: list) -> object:
    """The answer that all ranks give."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


AGAIN = {"recomputation": "full", "micro_batches": 2}
SELECTIVE = {"recomputation": "selective"}
STAGES = {"stages": (1, 1), "recomputation": "full", "micro_batches": 2}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("sizes", "seeds", "settings"),
    [
        ((2, 2), range(2), {}),
        *first(0, [((2, 2), range(4), AGAIN), ((2, 2), range(4), SELECTIVE), ((2,), range(4), STAGES)]),
        *rarely([((2, 2), range(4, 8), AGAIN), ((2, 2), range(4, 8), SELECTIVE), ((2,), range(4, 8), STAGES)]),
    ],
    ids=str,
)
def test_healthy_plans_pass_bit_by_bit(pool, sizes: tuple[int, ...], seeds: range, settings: dict[str, object]) -> None:
    """So do all plans of test_parity.py, which take a checked step."""
    assert same(pool.run("tasks_checking", "healthy", "dropping", sizes, list(seeds), settings)) == []


def test_sums_of_gloo_are_the_same_bits_on_all_ranks(pool) -> None:
    sizes = [1, 2, 3, 5, 7, 16, 100, 1000, 4097, 65_536, 300_001]
    assert same(pool.run("tasks_checking", "reductions", sizes)) == []


def test_a_wrong_rule_is_named(pool) -> None:
    message = same(pool.run("tasks_checking", "wrong_rule"))
    words = ["operator 'amax'", "split None,d2", "micro-batch 0", "result 'amax' has layout R,R", "axis axis1"]
    assert all(word in message for word in [*words, "the rule of aten.amax.default is wrong"]), message


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["zero1", "megatron"])
def test_another_weight_on_one_rank_is_named(pool, kind: str) -> None:
    message = same(pool.run("tasks_checking", "other_weights", kind))
    assert "parameter 'model.layers.1.self_attn.q_proj.weight' has layout" in message, message
    assert "rank 3 has sum" in message, message
    assert "given different weights" in message, message


def test_a_weight_that_stages_share_must_be_the_same_in_each(pool) -> None:
    message = same(pool.run("tasks_checking", "other_shared_weight"))
    assert "parameter 'wte.weight' has layout R, so it must be the same on the ranks of the pipeline" in message, (
        message
    )


def test_a_gradient_that_one_rank_computes_otherwise_is_named(pool) -> None:
    message = same(pool.run("tasks_checking", "wrong_gradient"))
    assert "the gradient of operand 0 (" in message, message
    assert "operator 'h.1/gelu'" in message, message  # the last block comes first in the backward pass
    assert "rank 1" in message


def test_an_operator_that_gives_something_else_when_computed_again_is_named(pool) -> None:
    message = same(pool.run("tasks_checking", "not_deterministic"))
    assert "gelu' (" in message, message
    assert "when its block is recomputed" in message, message


@pytest.mark.exhaustive
def test_later_steps_send_what_they_would_without_a_check(pool) -> None:
    second, first = same(pool.run("tasks_checking", "later_steps", 5))
    assert second == first
    assert sum(first.values()) > 0
