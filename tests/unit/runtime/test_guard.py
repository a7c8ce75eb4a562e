"""When a loss leaps, and what is refused."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from pydantic import TypeAdapter

import runtime
from planner.errors import RequestError
from runtime.guard_settings import GuardSettings, GuardState
from runtime.step.guard import LossGuard
from tests.distributed import plans
from tests.refusals import refused

CPU = torch.device("cpu")
FINE = [torch.ones(3)]


def judged(guard: LossGuard, losses: list[float]) -> list[bool]:
    return [guard.judge(number, loss, FINE) is None for number, loss in enumerate(losses, start=1)]


def test_a_leap_is_measured_by_the_median_of_the_steps_that_were_made() -> None:
    guard = LossGuard(GuardSettings(on_spike="skip", spike_factor=2.0, spike_window=3), CPU)
    assert judged(guard, [1.0, 9.0, 1.0]) == [True] * 3, "too few to compare with"
    assert judged(guard, [2.5, 2.0, 100.0, 4.0, 4.1]) == [False, True, False, True, False]


def test_nothing_leaps_from_a_median_that_is_not_positive() -> None:
    guard = LossGuard(GuardSettings(on_spike="skip", spike_window=1), CPU)
    assert judged(guard, [-1.0, 5.0, 11.0]) == [True, True, False]


def test_what_was_remembered_goes_on() -> None:
    settings = GuardSettings(on_spike="skip", on_nonfinite="skip", spike_window=2)
    first, second = LossGuard(settings, CPU), LossGuard(settings, CPU)
    judged(first, [1.0, 1.0, math.nan])
    kept = TypeAdapter(GuardState).validate_json(json.dumps(asdict(first.state())))
    second.load_state(kept)
    assert second.state() == kept == GuardState(losses=(1.0, 1.0), in_a_row=1)
    assert judged(second, [3.0]) == [False]
    second.load_state(None)
    assert judged(second, [1.0, 3.0]) == [True, True], (
        "a checkpoint of a run without a guard has nothing to compare with"
    )
    assert LossGuard(GuardSettings(), CPU).state() is None


def test_gradients_are_looked_at_where_that_is_asked_for() -> None:
    bad = [torch.ones(2), torch.tensor([1.0, math.inf])]
    found = LossGuard(GuardSettings(on_nonfinite="skip"), CPU).judge(1, 1.0, bad)
    assert found is not None
    assert (found.action, found.message) == ("skip", "the loss is 1, and a gradient is not finite")
    assert LossGuard(GuardSettings(on_spike="skip"), CPU).judge(1, 1.0, bad) is None


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"on_nonfinite": "skips"}, ("--on-nonfinite", "skips", "skip")),
        ({"on_spike": "drop"}, ("--on-spike", "drop")),
        ({"spike_factor": 1.0}, ("--spike-factor 1", 1)),
        ({"spike_window": 0}, ("--spike-window 0",)),
    ],
)
def test_what_cannot_be_asked_for(settings: dict[str, object], facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        GuardSettings(**settings)  # type: ignore[arg-type]


def test_a_way_back_and_a_flush_are_needed() -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(1))
    with refused(RequestError, "guard", "rollback="):
        runtime.parallelize(plans.build("llama"), plan, guard=GuardSettings(on_spike="rollback"))
    with refused(RequestError, "--on-nonfinite skip", "pipedream", "1f1b"):
        GuardSettings(on_nonfinite="skip").check_schedule("pipedream")
