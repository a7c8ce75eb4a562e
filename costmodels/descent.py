"""The point at which a robust loss of many errors is least: Levenberg-Marquardt steps on reweighted rows.

    minimise over x    L(r(x))        r: errors of the rows, (N,);  L: a loss that grows slower than squares far out

    w = weights of the rows, so that  w r^2  stands for the loss near r             (reweighted least squares)
    A = J' W J,  g = J' W r           J: derivatives of r by differences, (N, parameters)
    x <- x + d,  (A + lambda diag A) d = -g       kept if L falls; lambda falls after a step and rises without one

No step is longer than `longest` in any parameter, and none leads over `most`. Deterministic. Each step takes one
evaluation per parameter and one per lambda. A library for this (scipy) would save about forty lines and add a
dependency. Not good for: starts that are far off, as L may have several minima; parameters that no row needs, which
stay near their start.

Sources: Levenberg, Quart. Appl. Math. 2, 1944; Marquardt, J. SIAM 11(2), 1963; Holland, Welsch, "Robust regression
using iteratively reweighted least-squares", Communications in Statistics 6(9), 1977.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodels.units import Array

_LEAST_DAMPING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What is minimised: `value` of the errors of all rows, (N,) -> number, and the `weights` of their squares, (N,) ->
    (N,)."""

    value: Callable[[Array], float]
    weights: Callable[[Array], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the search goes.

    Attributes:
        difference: of a parameter, for derivatives.
        longest: the most that a step changes a parameter by.
        steps: the most steps.
        tries: the most values of lambda for a step.
        enough: a step that lowers the loss by a smaller share is the last.
        ridge, damped_ridge: added to the diagonal of A, and lambda times, so that a parameter that no row needs stays.
    """

    difference: float
    longest: float
    steps: int
    tries: int
    enough: float
    ridge: float = 0.0
    damped_ridge: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """Where the loss is least: the parameters, (P,), the errors there, (N,), and the loss."""

    point: Array
    errors: Array
    loss: float


def least_loss(
    errors: Callable[[Array], Array],
    start: Array,
    loss: Loss,
    *,
    pace: Pace,
    most: Array | float = np.inf,
) -> Least:
    """The parameters near `start`, (P,), at which the loss of the errors is least.

    Args:
        errors: errors of the rows, (N,), from the parameters.
        start: where the search starts.
        loss: what is minimised.
        pace: of the search.
        most: upper limits of the parameters.
    """
    point = np.minimum(start, most)
    error, damping = errors(point), 1e-2
    value = loss.value(error)
    for _ in range(pace.steps):
        slopes = np.stack([errors(point + pace.difference * unit) - error for unit in np.eye(len(point))], axis=1)
        slopes /= pace.difference
        weights = loss.weights(error)
        normal, gradient = slopes.T @ (slopes * weights[:, None]), slopes.T @ (weights * error)
        gain = 0.0
        for _ in range(pace.tries):
            ridge = damping * (np.diag(normal) + pace.damped_ridge) + pace.ridge
            damped = normal + np.diag(ridge)
            step = np.clip(np.linalg.solve(damped, -gradient), -pace.longest, pace.longest)
            moved = np.minimum(point + step, most)
            tried = errors(moved)
            if loss.value(tried) < value:
                gain = 1.0 - loss.value(tried) / value
                point, error, value, damping = moved, tried, loss.value(tried), max(damping / 3, _LEAST_DAMPING)
                break
            damping *= 4
        if gain < pace.enough:
            break
    return Least(point=point, errors=error, loss=value)
