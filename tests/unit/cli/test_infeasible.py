"""What does not fit says how much is missing and where, and what would help at what cost: all of it true."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import says

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--global-batch", "8", "--offload", "none")


def refused(plan: Any, *arguments: str) -> dict[str, Any]:
    outcome = plan(*arguments, "--json")
    assert outcome.code == 3
    assert outcome.err.count("\n") == 1
    error = json.loads(outcome.out)["error"]
    assert isinstance(error, dict)
    return error


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_change_makes_it_fit_at_the_cost_that_is_told(plan: Any, here: Path) -> None:
    """A request with decisions that do not fit: each change, given on the command line, is the plan that was told."""
    pins = ("--devices", "2", "--data", "2", "--micro-batch", "4", "--zero", "0", "--recompute", "none")
    limit = ("--memory-limit", "595MiB")
    error = refused(plan, *TINY, *pins, *limit)
    changes = {one["change"]: one for one in error["changes"]}
    assert {"--zero 1", "--recompute left out", "--micro-batch 2", "--memory-limit left out"} <= set(changes)
    costs = [one["devices"] / one["tokens_per_second_per_device"] / one["devices"] for one in error["changes"]]
    assert costs == sorted(costs)
    edited = {
        "--zero 1": [*(word if word != "0" else "1" for word in pins), *limit],
        "--recompute left out": [*pins[:-2], *limit],
        "--memory-limit left out": list(pins),
    }
    for change, options in edited.items():
        found = plan.json(*TINY, *options)
        assert found["step_seconds"] == pytest.approx(changes[change]["step_seconds"], rel=1e-9), change
        assert found["peak_bytes"] == pytest.approx(changes[change]["peak_bytes"], rel=1e-9)
    for change in changes:
        assert change.partition(" (")[0] in error["message"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_says_at_which_rank_the_bytes_are_missing(plan: Any, here: Path) -> None:
    pins = ("--devices", "4", "--pipeline", "4", "--micro-batches", "8")
    error = refused(plan, *TINY, *pins, "--memory-limit", "515MiB", "--time-limit", "20")
    assert "at pipeline rank " in error["message"]
    assert "of 4" in error["message"]
    assert error["missing_bytes"] == pytest.approx(error["needed_bytes"] - 515 * 2**20)


def test_without_time_nothing_is_looked_for(plan: Any, here: Path) -> None:
    outcome = plan(*TINY, "--devices", "2", "--memory-limit", "1MiB", "--time-limit", "0")
    assert outcome.code == 3
    assert "would fit" not in outcome.err


def test_the_memory_of_the_planner_itself_is_limited(plan: Any, here: Path) -> None:
    error = refused(plan, *TINY, "--devices", "2", "--planner-memory", "1MiB")
    assert error["kind"] == "limit reached"
    says(error["message"], "1.0 MiB")


def test_a_limit_of_time_that_is_over_is_no_proof_that_nothing_fits(plan: Any, here: Path) -> None:
    assert refused(plan, *TINY, "--devices", "2", "--time-limit", "0")["kind"] == "limit reached"
