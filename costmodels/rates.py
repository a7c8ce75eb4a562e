"""The rate that no kernel of an op class exceeds: what lower bounds are made of."""

from collections.abc import Callable, Mapping

from costmodels.attention import attention_rate
from costmodels.matmul import matmul_rate
from costmodels.units import FlopsPerSecond
from hardware_profiles import Device


def _fp32_rate(_: str, device: Device) -> FlopsPerSecond:
    """No matrix is multiplied: whatever the operands are, it is computed in float32."""
    return device.peak("fp32") * device.efficiency("elementwise").compute


_RATES: Mapping[str, Callable[[str, Device], FlopsPerSecond]] = {
    "attention": attention_rate,
    "delta_rule": matmul_rate,
    "experts": matmul_rate,
    "index_scores": matmul_rate,
    "matmul": matmul_rate,
    "recurrent": matmul_rate,
    "selective_scan": _fp32_rate,
    "state_space": matmul_rate,
}


def best_rate(op_class: str, dtype: str, device: Device) -> FlopsPerSecond:
    """FLOP/s such that every formula of this package says flops / rate or more for a kernel of the class.

    Raises `hardware_profiles.UnknownKeyError` where the device has no figure for the class or the dtype.
    """
    rate = _RATES.get(op_class)
    if rate is not None:
        return rate(dtype, device)
    return device.peak(dtype) * device.efficiency(op_class).compute
