"""Settings for a loss or gradient that is not finite, and for a loss spike (`runtime.step.guard`). Needs no torch."""

import math
from dataclasses import dataclass
from typing import ClassVar

from costmodels import SCHEDULES
from planner.errors import RequestError, unknown_name

ON_NONFINITE = ("stop", "skip", "rollback")
ON_SPIKE = ("ignore", "stop", "skip", "rollback")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """The state of a guard, as a checkpoint stores it: the losses of the last completed steps, oldest first, and the
    number of consecutive batches that made no step."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    losses: tuple[float, ...]
    in_a_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """What to do with a step whose loss or gradients are not finite (`ON_NONFINITE`) and with one whose loss spikes
    (`ON_SPIKE`). After `in_a_row` consecutive steps that were not made, the run stops in any case.

    Raises RequestError for unknown words and invalid numbers.
    """

    on_nonfinite: str = "stop"
    on_spike: str = "ignore"
    spike_factor: float = 2.0
    spike_window: int = 32
    in_a_row: int = 10

    def __post_init__(self) -> None:
        for name, word, known in (("nonfinite", self.on_nonfinite, ON_NONFINITE), ("spike", self.on_spike, ON_SPIKE)):
            if word not in known:
                raise RequestError(unknown_name(f"answer of --on-{name}", word, known))
        if not self.spike_factor > 1 or not math.isfinite(self.spike_factor):
            raise RequestError(f"--spike-factor {self.spike_factor:g}: give a number above 1")
        if self.spike_window < 1 or self.in_a_row < 1:
            raise RequestError(f"--spike-window {self.spike_window}: give a number of steps, 1 or more")

    @property
    def looks(self) -> bool:
        """Whether anything is requested beyond stopping before an update with a loss that is not finite."""
        return self.on_nonfinite != "stop" or self.on_spike != "ignore"

    @property
    def rolls_back(self) -> bool:
        """Whether a rollback may be needed."""
        return "rollback" in (self.on_nonfinite, self.on_spike)

    def check_schedule(self, schedule: str) -> None:
        """Raise RequestError for a schedule that updates weights before the loss of a batch is known."""
        if self.looks and not SCHEDULES[schedule].flushes:
            raise RequestError(
                f"--on-nonfinite {self.on_nonfinite}, --on-spike {self.on_spike}: with schedule '{schedule}' weights"
                " are updated before the loss of a batch is known, so no update can be undone; use the schedule '1f1b'"
            )
