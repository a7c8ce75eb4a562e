"""Runs that go back to an earlier state where a batch breaks: what follows is, bit by bit, training without the batches
since then."""

import math
from pathlib import Path

import pytest

from tests.long_lists import first

PLANS = {
    "split": ((2, 2), 7, {"micro_batches": 2}),
    "pipeline": ((2,), 1, {"micro_batches": 2, "stages": (1, 1), "recomputation": "full"}),
}
NAN, LEAP = -100.0, 5.5


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("beside", first(1, ["alone", "beside the unsharded model"]))
@pytest.mark.parametrize("kept", ["saved", "in memory"])
@pytest.mark.parametrize("plan", first(1, list(PLANS)))
def test_what_follows_is_training_without_the_batches_since(
    pool, tmp_path: Path, plan: str, kept: str, beside: str
) -> None:
    """Batch 4 (of steps 1, 2, ..) breaks, the state behind step 2 was kept: batches 3 and 4 are gone."""
    settings = {"steps": 5, "save_every": 2, "on_nonfinite": "rollback", "check": beside != "alone"}
    folders = [{"save": str(tmp_path / name)} if kept == "saved" else {} for name in ("bad", "good")]
    bad = {number: NAN if number == 4 else 0.0 for number in range(1, 8)}
    good = {number: 0.0 for number in bad if number not in (3, 4)}
    for (found, said, state), (wanted, _, other) in zip(
        pool.run("tasks_rollback", "run", bad, PLANS[plan], {**settings, **folders[0]}),
        pool.run("tasks_rollback", "run", good, PLANS[plan], {**settings, **folders[1]}),
        strict=True,
    ):
        assert not said, said
        assert [(step, back) for step, _, back in found] == [(1, None), (2, None), (3, None), (4, 2), *(
            (step, None) for step in (3, 4, 5)
        )]  # fmt: skip
        assert math.isnan(found[3][1])
        assert found[:2] + found[4:] == wanted
        assert state == other


@pytest.mark.exhaustive
def test_a_leap_before_anything_was_saved_goes_back_to_the_start(pool, tmp_path: Path) -> None:
    settings = {"steps": 4, "on_spike": "rollback", "spike_window": 2, "check": False, "save": str(tmp_path)}
    batches = {number: LEAP if number == 4 else 0.0 for number in range(1, 9)}
    for found, said, _ in pool.run("tasks_rollback", "run", batches, PLANS["split"], settings):
        assert not said, said
        assert [(step, back) for step, _, back in found] == [
            (1, None), (2, None), (3, None), (4, 0), (1, None), (2, None), (3, None), (4, None),
        ]  # fmt: skip


@pytest.mark.exhaustive
def test_too_many_in_a_row_end_the_run(pool) -> None:
    """A step between two of them does not count, as long as it is none beyond the furthest."""
    settings = {"steps": 9, "save_every": 2, "on_nonfinite": "rollback", "check": False, "rollbacks": 2}
    batches = {number: NAN if number in (4, 5, 7) else 0.0 for number in range(1, 12)}
    for found, said, _ in pool.run("tasks_rollback", "run", batches, PLANS["split"], settings):
        assert [back for _, _, back in found] == [None, None, None, 2, 2, None]
        assert said.startswith("NonFiniteError: step 4: the loss is nan; 2 rollbacks made no progress beyond step 3")
        assert "--resume" in said


@pytest.mark.exhaustive
def test_a_run_that_is_resumed_decides_as_one_that_was_not(pool, tmp_path: Path) -> None:
    """The losses that a leap is measured by are in the checkpoint: with a window of three the second batch after it
    would not leap otherwise."""
    settings = {
        "steps": 6, "save_every": 3, "on_spike": "skip", "spike_window": 3, "check": False, "save": str(tmp_path),
    }  # fmt: skip
    batches = {number: LEAP if number == 5 else 0.0 for number in range(1, 10)}
    for whole, again in pool.run("tasks_rollback", "resumed", batches, PLANS["split"], settings, 3):
        assert [step for step, *_ in whole] == [1, 2, 3, 4, 5, 5, 6], "batch 5 was left out"
        assert again == whole[3:]
