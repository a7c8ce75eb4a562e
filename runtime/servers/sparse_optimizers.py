"""Optimizers that update only the rows of a table that a step has touched.

    sgd         w -= lr g
    adagrad     s += g^2;                    w -= lr / (1 + (t - 1) decay) g / (sqrt(s) + eps)   (Duchi et al. 2011)
    adam        m += (1 - b1) (g - m);
                v += (1 - b2) (g^2 - v);     w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)

These are torch.optim.SGD, Adagrad and SparseAdam on sparse gradients, operation by operation in the same precision:
moments of untouched rows do not decay. t counts the updates of the table, as in SparseAdam, or with `row_steps` those
of the row, so that the first updates of a rare row are as large as those of any other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import RequestError, unknown_name

Array = NDArray[Any]
State = Mapping[str, Array]

SPARSE_OPTIMIZERS: Mapping[str, Sequence[str]] = {"adagrad": ("sum",), "adam": ("first", "second"), "sgd": ()}
"""The states per number of a table, for each optimizer."""

ROW_STEPS = "steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizer:
    """An optimizer by name, and its hyperparameters; hyperparameters of other optimizers are ignored."""

    name: str = "adagrad"
    learning_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float | None = None
    decay: float = 0.0
    initial_sum: float = 0.0
    row_steps: bool = False

    def __post_init__(self) -> None:
        if self.name not in SPARSE_OPTIMIZERS:
            raise RequestError(unknown_name("sparse optimizer", self.name, SPARSE_OPTIMIZERS))
        if not 0 <= self.learning_rate < math.inf or not all(0 <= beta < 1 for beta in self.betas):
            raise RequestError(f"learning rate {self.learning_rate:g} and betas {self.betas}: not negative, below 1")
        for name, value in (("epsilon", self.eps), ("decay", self.decay), ("initial sum", self.initial_sum)):
            if not 0 <= value < math.inf:
                raise RequestError(f"{name} {value:g} of '{self.name}': give 0 or more")
        if self.row_steps and self.name != "adam":
            raise RequestError(f"row_steps is for adam alone: '{self.name}' has no bias correction")

    @property
    def eps(self) -> float:
        """The given epsilon, or the default of torch's optimizer of that name."""
        return self.epsilon if self.epsilon is not None else 1e-10 if self.name == "adagrad" else 1e-8

    def new_state(self, rows: int, width: int, dtype: str) -> dict[str, Array]:
        """The state of `rows` rows before their first update."""
        first = self.initial_sum if self.name == "adagrad" else 0.0
        state = {name: np.full((rows, width), first, dtype) for name in SPARSE_OPTIMIZERS[self.name]}
        return {**state, ROW_STEPS: np.zeros(rows, np.int64)} if self.row_steps else state

    def update(self, weight: Array, state: State, rows: Array, gradient: Array, step: int, rate: float) -> None:
        """Update `rows` of `weight` and `state` in place from their gradients, (rows, width). Each row occurs once;
        `step` is the number of the update, from 1."""
        if len(rows):
            _UPDATES[self.name](self, weight, state, rows, gradient.astype(weight.dtype, copy=False), step, rate)


def _sgd(o: SparseOptimizer, weight: Array, state: State, rows: Array, gradient: Array, step: int, rate: float) -> None:
    weight[rows] += gradient * -rate


def _adagrad(
    o: SparseOptimizer, weight: Array, state: State, rows: Array, gradient: Array, step: int, rate: float
) -> None:
    sums = state["sum"][rows] + gradient * gradient
    state["sum"][rows] = sums
    np.sqrt(sums, out=sums)
    sums += o.eps
    weight[rows] += gradient / sums * (-rate / (1.0 + (step - 1) * o.decay))


def _adam(
    o: SparseOptimizer, weight: Array, state: State, rows: Array, gradient: Array, step: int, rate: float
) -> None:
    first, second = state["first"][rows], state["second"][rows]
    first = (gradient - first) * (1.0 - o.betas[0]) + first
    second = (gradient * gradient - second) * (1.0 - o.betas[1]) + second
    state["first"][rows], state["second"][rows] = first, second
    size: Any = _step_size(o, step, rate)
    if o.row_steps:
        state[ROW_STEPS][rows] += 1
        sizes = {count: _step_size(o, count, rate) for count in np.unique(state[ROW_STEPS][rows]).tolist()}
        size = np.array([sizes[count] for count in state[ROW_STEPS][rows].tolist()], weight.dtype)[:, None]
    denominator = np.sqrt(second)
    denominator += o.eps
    weight[rows] += first / denominator * -size


def _step_size(o: SparseOptimizer, step: int, rate: float) -> float:
    return rate * math.sqrt(1.0 - o.betas[1] ** step) / (1.0 - o.betas[0] ** step)


_UPDATES = {"adagrad": _adagrad, "adam": _adam, "sgd": _sgd}
