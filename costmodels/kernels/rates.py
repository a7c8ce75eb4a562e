"""The rate that no kernel of an op class exceeds, for lower bounds."""

from collections.abc import Callable, Mapping

from costmodels.kernels.attention import attention_rate
from costmodels.kernels.matmul import matmul_rate
from costmodels.units import FlopsPerSecond
from hardware_profiles import Device


def _fp32_rate(_: str, device: Device) -> FlopsPerSecond:
    """FLOP/s of kernels without matrix products, which compute in float32 whatever their operands are."""
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
    """The largest FLOP/s of an op class: every formula of this package gives its kernels flops / rate seconds or more.

    Raises `hardware_profiles.UnknownKeyError` if the device has no figure for the class or the dtype.
    """
    rate = _RATES.get(op_class)
    if rate is not None:
        return rate(dtype, device)
    return device.peak(dtype) * device.efficiency(op_class).compute
