"""Steps whose loss or gradients are not finite, or whose loss leaps: all ranks decide alike, and what is skipped leaves
weights, optimizer states and buffers bit for bit."""

import pytest

from tests.long_lists import first

PLANS = (
    ((2, 2), 7, {"micro_batches": 2, "buckets": 4096}),
    ((2,), 1, {"micro_batches": 2, "stages": (1, 1), "recomputation": "full"}),
)
WORDS = {"loss": "the loss is nan", "gradient": "and a gradient is not finite", "spike": "more than 3 times"}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("trouble", first(1, list(WORDS)))
@pytest.mark.parametrize(("sizes", "seed", "settings"), PLANS, ids=str)
def test_a_step_that_is_skipped_leaves_no_trace(
    pool, trouble: str, sizes: tuple[int, ...], seed: int, settings: dict[str, object]
) -> None:
    found = pool.run("tasks_checking", "left_alone", trouble, "skip", sizes, seed, settings)
    said, *_ = found[0]
    assert said[:3] + said[4:] == [None] * 4
    assert WORDS[trouble] in said[3], said
    for own, same, as_without, steps, back in found:
        assert own == said, "all ranks say the same"
        assert same
        assert as_without
        assert (steps, back) == (4, [])


@pytest.mark.exhaustive
def test_rolling_back_is_asked_for_once_on_every_rank(pool) -> None:
    for said, same, as_without, steps, back in pool.run("tasks_checking", "left_alone", "loss", "rollback", *PLANS[0]):
        assert "the loss is nan" in said[3]
        assert same
        assert as_without
        assert (steps, back) == (4, [3])


@pytest.mark.thorough
def test_many_in_a_row_end_the_run(pool) -> None:
    for message, number in pool.run("tasks_checking", "too_many", 3):
        assert (message, number) == ("step 1: 3 batches in a row made no update, the last because the loss is nan", 3)


@pytest.mark.thorough
def test_a_leap_that_stops(pool) -> None:
    for message, same in pool.run("tasks_checking", "stops_at_a_leap"):
        assert message.startswith("step 3: the loss is "), message
        assert "more than 2 times" in message
        assert message.endswith("of the last 2 steps; this step has changed no weight"), message
        assert same
