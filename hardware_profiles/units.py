"""Units: every quantity inside the code is an SI base unit; only this file converts.

Human units (GiB, GB/s, TFLOP/s, µs) appear only in the keys of profile files and in reports. GB is 1e9 bytes and GIB is
2**30 bytes; the two never share a name.
"""

from typing import TypeAlias

Seconds: TypeAlias = float
Bytes: TypeAlias = float
Flops: TypeAlias = float
BytesPerSecond: TypeAlias = float
FlopsPerSecond: TypeAlias = float

KIB = 2**10
MIB = 2**20
GIB = 2**30
KB = 1e3
MB = 1e6
GB = 1e9
TERA = 1e12
MICROSECOND = 1e-6


def digits_text(value: float) -> str:
    """0.0125, 29.1, 1,024: three significant digits, and never fewer than those of the whole part."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def bytes_text(nbytes: Bytes) -> str:
    """77.2 GiB, 3.1 MiB, 512 B."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes:,.0f} B"


def bytes_from_gib(value: float) -> Bytes:
    """Binary gigabytes (2**30 bytes), the unit of memory sizes."""
    return value * GIB


def gib_from_bytes(value: Bytes) -> float:
    """The inverse of `bytes_from_gib`."""
    return value / GIB


def bytes_per_second_from_gb_per_s(value: float) -> BytesPerSecond:
    """Decimal gigabytes per second (1e9 bytes/s), the unit of bandwidths."""
    return value * GB


def gb_per_s_from_bytes_per_second(value: BytesPerSecond) -> float:
    """The inverse of `bytes_per_second_from_gb_per_s`."""
    return value / GB


def flops_per_second_from_tflops(value: float) -> FlopsPerSecond:
    """TFLOP/s (1e12 FLOP/s), the unit of datasheet peaks."""
    return value * TERA


def seconds_from_us(value: float) -> Seconds:
    """Microseconds, the unit of latencies."""
    return value * MICROSECOND


def us_from_seconds(value: Seconds) -> float:
    """The inverse of `seconds_from_us`."""
    return value / MICROSECOND
