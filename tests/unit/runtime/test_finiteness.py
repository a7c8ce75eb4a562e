"""Which operator is named for what is not finite, on one device."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner.errors import LossSpikeError, NonFiniteError
from planner.graph.trace import trace
from runtime.guard_settings import GuardSettings
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.refusals import refused

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Calls(nn.Module):
    """A function of an input and a weight; a buffer of infinities, as of a mask, is among what it may read."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("mask", torch.full((8,), -torch.inf))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masked = torch.where(x > 100, self.mask, torch.zeros(8))
        return self.function(x + masked, self.weight).sum()


class Normed(nn.Module):
    """What may not be finite runs through a batch norm, whose running statistics it would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.log(x * self.weight)).pow(2).sum()


def step_of(function: Function) -> TrainingStep:
    return step_with(Calls(function))


def step_with(
    module: nn.Module, guard: GuardSettings | None = None, rollback: Callable[[TrainingStep], None] | None = None
) -> TrainingStep:
    x = (torch.ones(4, 8),)
    graph = trace(module, x)
    plan = plans.plan_of_one("calls", graph, samples=4)
    return parallelize(
        module, plan, example=x, traced=graph, device=torch.device("cpu"), guard=guard, rollback=rollback
    )


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        (lambda x, w: torch.log(x * w - 2), ("log", 32, "NaN", 32)),
        (lambda x, w: torch.exp(x * w * 100), ("inf", "exp", 32, "infinite")),
        (lambda x, w: torch.exp(x * w * 100) * 0, ("nan", "exp", 32, "infinite")),
        (lambda x, w: torch.sqrt(-x).detach() * w, ("sqrt", 32, "NaN")),
        (
            lambda x, w: torch.softmax((x * w).masked_fill(x > 0, -torch.inf), -1),
            ("softmax", 32, "NaN"),
        ),
        (lambda x, w: (x * w).masked_fill(x > 0, -torch.inf) * 0, ("mul_2", 32, "NaN")),
    ],
)
def test_the_first_operator_is_named_and_infinities_on_purpose_are_not(
    function: Function, facts: tuple[object, ...]
) -> None:
    step = step_of(function)
    with refused(NonFiniteError, "step 1", "micro-batch 0", *facts):
        step(torch.ones(4, 8))
    assert step.steps == 0
    assert step.rank.parameters["weight"].piece.equal(torch.ones(8))


def test_what_is_given_is_named() -> None:
    bad = torch.ones(4, 8)
    bad[1, 2] = torch.nan
    with refused(NonFiniteError, "micro-batch 0", "args_0", 1, "NaN", 32):
        step_of(lambda x, w: x * w)(bad)
    step = step_of(lambda x, w: x * w)
    step(torch.ones(4, 8))
    with torch.no_grad():
        step.rank.parameters["weight"].piece[3] = torch.inf
    with refused(NonFiniteError, "weight", 1, 8, "step 2", "step 2", "step 1"):
        step(torch.ones(4, 8))


def test_running_statistics_stay_as_they_were() -> None:
    """They change in the forward pass: what has spoiled them is named, not they, and a good batch trains on."""
    step, good = step_with(Normed()), torch.arange(1.0, 33.0).reshape(4, 8)
    step(good)
    before = {name: tensor.clone() for name, tensor in step.changed_buffers().items()}
    with refused(NonFiniteError, "micro-batch 0", "log", 32, "NaN"):
        step(-good)
    after = step.changed_buffers()
    assert {"norm.running_mean", "norm.running_var"} <= after.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    step(good)


def test_what_does_not_come_again_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(lambda x, w: x * w)
    monkeypatch.setattr(step.rank, "accumulate", lambda *args: torch.tensor(torch.nan))
    with refused(NonFiniteError, "step 1", "nan", "deterministic"):
        step(torch.ones(4, 8))


def test_gradients_are_looked_at_where_that_is_asked_for() -> None:
    step = step_of(lambda x, w: torch.sqrt(x * w - 1))
    step.rank.check_gradients = True
    with refused(NonFiniteError, "step 1", "weight", 8, 8):
        step(torch.ones(4, 8))
    assert step.rank.parameters["weight"].piece.equal(torch.ones(8))


def test_a_batch_with_bad_gradients_leaves_none_for_the_next_one() -> None:
    step = step_of(lambda x, w: torch.sqrt(x * w - 1))
    step.rank.check_gradients = True
    with refused(NonFiniteError, "step 1", "weight", 8, 8):
        step(torch.ones(4, 8))
    step(torch.full((4, 8), 2.0))
    assert step.steps == 1, "else the infinite gradients of the first batch would be added to its own"


def test_running_statistics_of_a_batch_whose_loss_spikes_are_dropped() -> None:
    step, good = step_with(Normed(), GuardSettings(on_spike="stop", spike_window=1)), torch.full((4, 8), 2.0)
    good[:, 0] = torch.arange(1.0, 5.0)  # normalised, it is an eighth of the loss of the batch below
    step(good)
    before = {name: tensor.clone() for name, tensor in step.changed_buffers().items()}
    with refused(LossSpikeError, "step 2"):
        step(torch.arange(1.0, 33.0).reshape(4, 8))
    assert all(before[name].equal(tensor) for name, tensor in step.changed_buffers().items())


def test_a_bad_batch_of_a_window_rolls_back_and_takes_no_learning_rate() -> None:
    back: list[int] = []
    guard = GuardSettings(on_nonfinite="rollback")
    step = step_with(Calls(lambda x, w: torch.log(x * w)), guard, lambda step: back.append(step.steps))
    rates = {0: 0.5, 1: 0.25}
    step.optimizer.learning_rate = rates.__getitem__  # of the first two steps, and no more
    good = torch.ones(4, 8)
    assert len(step.window([good, -good, good])) == 3
    assert (back, step.steps) == ([1], 2)
