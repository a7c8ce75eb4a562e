"""Time of the optimizer step: limited by the memory bandwidth for the bytes that it reads and writes."""

from typing import overload

import numpy as np

from costmodels.kernels.compute import operator_time
from costmodels.memory import PLAIN_UPDATE, UpdateVariant, optimizer_traffic
from costmodels.units import Array, Quantity
from hardware_profiles import Device


@overload
def optimizer_time(
    parameters: float,
    precision: str,
    optimizer: str,
    device: Device,
    variant: UpdateVariant = ...,
    *,
    foreach: bool = ...,
    widened: bool = ...,
) -> float: ...
@overload
def optimizer_time(
    parameters: Array,
    precision: str,
    optimizer: str,
    device: Device,
    variant: UpdateVariant = ...,
    *,
    foreach: bool = ...,
    widened: bool = ...,
) -> Array: ...
@overload
def optimizer_time(
    parameters: Quantity,
    precision: str,
    optimizer: str,
    device: Device,
    variant: UpdateVariant = ...,
    *,
    foreach: bool = ...,
    widened: bool = ...,
) -> Quantity: ...
def optimizer_time(
    parameters: Quantity,
    precision: str,
    optimizer: str,
    device: Device,
    variant: UpdateVariant = PLAIN_UPDATE,
    *,
    foreach: bool = False,
    widened: bool = False,
) -> Quantity:
    """Seconds for one update of `parameters` parameters (a count, or an array of counts) that one device holds.

        t = L + N T / (W e)        N parameters, T bytes per parameter from `optimizer_traffic`,
                                   L, W, e launch latency, bandwidth and efficiency of the class "optimizer"

    No parameters take no time. Holds for multi-tensor (foreach or fused) optimizers, whose number of kernels does not
    grow with the parameters. `variant`, `foreach` and `widened` are as in `optimizer_traffic`.

    Raises:
        CostModelError: an unknown precision, optimizer or moment dtype.
        hardware_profiles.UnknownKeyError: the device has no figure for "fp32" or for the class "optimizer".
    """
    traffic = parameters * optimizer_traffic(precision, optimizer, variant, foreach=foreach, widened=widened)
    time = operator_time(op_class="optimizer", flops=0.0, bytes_moved=traffic, dtype="fp32", device=device)
    if isinstance(parameters, np.ndarray):
        return np.where(parameters > 0, time, 0.0)
    return time if parameters else 0.0
