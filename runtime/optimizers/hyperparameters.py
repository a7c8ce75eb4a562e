"""Hyperparameters that may change during training."""

import math
from collections.abc import Callable
from typing import SupportsFloat

from planner.errors import RequestError
from runtime.optimizers.optimizers import OptimizerSettings

Schedule = Callable[[int], float]
"""The learning rate of a step, as a function of the number of steps before it."""


class RunningOptimizer:
    """`learning_rate` may be changed between steps, to a number or to a schedule; every rank sets the same.

    step.optimizer.learning_rate = 3e-4
    step.optimizer.learning_rate = lambda number: 3e-4 * min(1.0, (number + 1) / 100)
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.learning_rate: float | Schedule = settings.learning_rate

    def rate(self, number: int) -> float:
        """The learning rate of the step after `number` steps. Raises RequestError where it is not a valid number."""
        given: object = self.learning_rate(number) if callable(self.learning_rate) else self.learning_rate
        rate = float(given) if isinstance(given, SupportsFloat) else math.nan
        if not (math.isfinite(rate) and rate >= 0):
            raise RequestError(
                f"the learning rate of step {number + 1} is {given!r:.40}; it must be a number of 0 or more"
            )
        return rate
