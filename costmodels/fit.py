"""Fitting the parameters of kernels to measured times: robust least squares on the relative error.

    minimise over log p    sum_i  rho( f_i(p) / t_i - 1 )        rho: Huber's, linear beyond `_OUTLIER`

by `costmodels.descent`. Each parameter is on a log scale, so that none turns negative and steps are relative. With
Huber's loss, the few kernels for which a library chose badly (five times slower than their neighbours) do not pull the
others along. The relative error is what the mean absolute percentage error counts. The kinks of ceilings do no harm,
because no parameter stands inside a ceiling.

A dozen parameters and a few hundred rows take a few dozen evaluations of the formula per start, some 50 ms. Starts are
few and fixed, so a fit is deterministic. Not good for: parameters that the rows do not determine (they stay near their
start).

Source: Huber, Ann. Math. Statist. 35(1), 1964.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.descent import Loss, Pace, least_loss
from costmodels.errors import CostModelError
from costmodels.kernels.attention import AttentionShape, attention_preparation, attention_time
from costmodels.kernels.matmul import matmul_time
from costmodels.units import Array, Seconds
from hardware_profiles import AttentionKernel, Device, MatmulKernel

_OUTLIER = 0.06
"""Relative error above which Huber's loss is linear: about the error of a typical row."""

_PACE = Pace(difference=1e-3, longest=0.7, steps=60, tries=20, enough=1e-6, ridge=1e-9)
"""In logarithms: a step changes a parameter by a factor of 2 at most."""

SOFTMAX = 180.0  # FLOP per score if all rows have one head_dim: it cannot be told from the products then
SOFTMAX_START = 300.0  # else

Predict = Callable[[Mapping[str, float]], Array]
"""Takes the parameters by name, returns the predicted seconds of every row, (N,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted values by name, the residuals log(measured / predicted), (N,), and the Huber loss."""

    values: Mapping[str, float]
    residuals: tuple[float, ...]
    loss: float

    @property
    def spread(self) -> float:
        """Standard deviation of a log-normal with these residuals; it uses the middle two thirds, so outliers do not
        count."""
        return float(np.quantile(np.abs(self.residuals), 0.683))


def fit_parameters(
    predict: Predict,
    measured: Array,
    start: Mapping[str, float],
    most: Mapping[str, float] | None = None,
    *,
    logarithmic: bool = False,
) -> Fit:
    """The values near `start` that bring `predict` closest to the measured seconds.

    Args:
        predict: seconds of every row, (N,), from the parameters.
        measured: measured seconds, (N,).
        start: start value of each parameter, positive.
        most: upper limits by name; a parameter that is not in it has none.
        logarithmic: the error is the logarithm of predicted over measured. If times scatter by factors, a relative
            error
            prefers predictions that are too short, because their error is below one.

    Raises:
        CostModelError: no rows, fewer rows than parameters, or a measured time that is not positive.
    """
    if len(measured) < len(start):
        raise CostModelError(f"{len(measured)} measured times are too few for {len(start)} parameters")
    if measured.min() <= 0:
        raise CostModelError(f"a measured time of {measured.min()} s: times are positive")
    names = list(start)
    limit = np.log([(most or {}).get(name, np.inf) for name in names])

    def errors(point: Array) -> Array:
        ratio = predict(dict(zip(names, np.exp(point), strict=True))) / measured
        return np.asarray(np.log(ratio)) if logarithmic else ratio - 1.0

    found = least_loss(
        errors,
        np.log([start[name] for name in names]),
        Loss(value=_huber, weights=_huber_weights),
        pace=_PACE,
        most=limit,
    )
    values = {name: float(value) for name, value in zip(names, np.exp(found.point), strict=True)}
    residuals = -found.errors if logarithmic else -np.log1p(found.errors)
    return Fit(values=values, residuals=tuple(float(r) for r in residuals), loss=found.loss)


def _huber(error: Array) -> float:
    size = np.abs(error)
    return float(np.where(size < _OUTLIER, 0.5 * error * error, _OUTLIER * (size - 0.5 * _OUTLIER)).sum())


def _huber_weights(error: Array) -> Array:
    return np.asarray(np.minimum(1.0, _OUTLIER / np.maximum(np.abs(error), 1e-12)))


def _best(fits: Sequence[Fit]) -> Fit:
    return min(fits, key=lambda fit: fit.loss)


def fit_matmul(m: Array, n: Array, k: Array, measured: Array, dtype: str, device: Device) -> MatmulKernel:
    """The kernel of a dtype, fitted to measured products; `device` gives the datasheet figures.

    `m`, `n`, `k` and `measured` (seconds) are (N,) each. For fp8 the measured calls are taken to convert their operands
    from two bytes, as libraries that quantise on the fly do. Raises: as `fit_parameters` and `costmodels.matmul_time`.
    """
    converts = dtype == "fp8"
    fixed = MatmulKernel(
        compute=1, bandwidth=1, launch=0, feed=1, fill=0, quantisation=0, split=0, convert=None, spread=0
    )

    def kernel(values: Mapping[str, float]) -> MatmulKernel:
        return replace(fixed, **values)

    def predict(values: Mapping[str, float]) -> Array:
        return np.asarray(matmul_time(m, n, k, 1.0, dtype, _with_matmul(device, dtype, kernel(values))))

    fits = []
    for quantisation in (0.3, 0.9):
        start = {
            "compute": 0.8,
            "bandwidth": 0.8,
            "launch": float(measured.min()),
            "feed": device.peak(dtype) * (1 if converts else 2) / 150,  # bytes for 150 FLOP each
            "fill": 150.0,
            "quantisation": quantisation,
            "split": 2e-6,
            **({"convert": 2e12} if converts else {}),
        }
        most = {"compute": 1.0, "bandwidth": 1.0, "quantisation": 1.0}
        fits.append(fit_parameters(predict, measured, start, most))
    best = _best(fits)
    return replace(kernel(best.values), spread=best.spread)


def fit_attention(shape: AttentionShape, measured: Array, dtype: str, device: Device) -> AttentionKernel:
    """The kernel of a dtype, fitted to measured forward passes: extents and seconds of (N,) each.

    The measured calls include what `attention_preparation` describes. If all rows have one head_dim, `softmax` is not
    fitted (180 FLOP per score), because it cannot be told from the products. Raises: as `fit_parameters` and
    `attention_time`.
    """
    fixed = AttentionKernel(compute=1, softmax=SOFTMAX, fill=0, tail=0, preparation=0, passes=0, spread=0)

    def kernel(values: Mapping[str, float]) -> AttentionKernel:
        return replace(fixed, **values)

    def predict(values: Mapping[str, float]) -> Array:
        fitted = _with_attention(device, dtype, kernel(values))
        return np.asarray(attention_time(shape, dtype, fitted) + attention_preparation(shape, dtype, fitted))

    widths = np.unique(shape.head_dim)
    start = {"compute": 0.6, "fill": 200.0, "tail": 0.5, "preparation": 5e-6, "passes": 0.6}
    if len(widths) > 1:
        start["softmax"] = SOFTMAX_START
    best = fit_parameters(predict, measured, start, {"compute": 1.0})
    return replace(kernel(best.values), spread=best.spread)


def _with_matmul(device: Device, dtype: str, kernel: MatmulKernel) -> Device:
    return replace(device, matmul_kernels=((dtype, kernel),))


def _with_attention(device: Device, dtype: str, kernel: AttentionKernel) -> Device:
    return replace(device, attention_kernels=((dtype, kernel),))


def percentage_error(predicted: Array, measured: Array, least: Seconds = 0.0) -> float:
    """Mean of |predicted / measured - 1| over the rows that took `least` seconds or longer; nan if there are none."""
    kept = measured >= least
    return float(np.mean(np.abs(predicted[kept] / measured[kept] - 1.0))) if kept.any() else float("nan")
