"""Time of a kernel, or of several of one class: the roofline model.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

from typing import overload

import numpy as np

from costmodels.errors import CostModelError
from costmodels.units import Array, Quantity
from hardware_profiles import Device

FREE_OP_CLASS = "view"
"""The op class that moves no data and launches no kernel."""


@overload
def operator_time(
    *, op_class: str, flops: float, bytes_moved: float, dtype: str, device: Device, kernels: float = 1
) -> float: ...
@overload
def operator_time(
    *,
    op_class: str,
    flops: Quantity,
    bytes_moved: Quantity,
    dtype: str,
    device: Device,
    kernels: Quantity = 1,
) -> Quantity: ...
def operator_time(
    *,
    op_class: str,
    flops: Quantity,
    bytes_moved: Quantity,
    dtype: str,
    device: Device,
    kernels: Quantity = 1,
) -> Quantity:
    """Roofline time of work of one op class, element-wise over arrays.

        t = k L + max( F / (P e_c), B / (W e_b) )

    F FLOP and B bytes of memory traffic of all kernels together, k kernels, L launch latency, P dense peak of the
    dtype, W memory bandwidth. e_c and e_b are the fitted shares of P and W that large kernels of the class achieve.
    Holds for kernels that fill the device; small ones take longer than this, and not only by L.

    Work of no FLOP and no bytes still launches; only the class "view" is free.

    Args:
        op_class: one of `hardware_profiles.OP_CLASSES`, or "view".
        flops: FLOP, >= 0. A multiply-add counts two.
        bytes_moved: bytes read and written, >= 0.
        dtype: dtype of the computation; the device must have a peak for it.
        device: the device.
        kernels: number of kernels launched.

    Returns:
        Seconds.

    Raises:
        hardware_profiles.UnknownKeyError: the device has no figure for the dtype or the class.
        CostModelError: negative work.
    """
    if op_class == FREE_OP_CLASS:
        return 0.0 * (flops + bytes_moved)
    efficiency = device.efficiency(op_class)
    compute = flops * (1.0 / (device.peak(dtype) * efficiency.compute))
    memory = bytes_moved * (1.0 / (device.memory_bandwidth * efficiency.bandwidth))
    if isinstance(compute, np.ndarray) or isinstance(memory, np.ndarray):
        work: Quantity = np.maximum(compute, memory)
        _refuse_negative(op_class, np.minimum(compute, memory))
    else:
        work = compute if compute > memory else memory
        if compute < 0 or memory < 0:
            raise CostModelError(f"{op_class} of {flops} FLOP and {bytes_moved} bytes: work is never negative")
    return work + device.launch_latency * kernels


def _refuse_negative(op_class: str, least: Array) -> None:
    if least.size and least.min() < 0:
        raise CostModelError(
            f"{op_class} has negative FLOP or bytes at index {int(least.argmin())}: work is never negative"
        )
