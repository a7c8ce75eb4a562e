"""Numbers with units: the only place where seconds and bytes get units."""

from hardware_profiles.units import bytes_text, digits_text

__all__ = ["bytes_text", "count_text", "digits_text", "percent_text", "seconds_text", "turn_text"]

_ROUNDS_UP = 0.9995
"""Share of a unit from which three digits round to the whole unit: 999.7 ms are 1 s."""


def seconds_text(seconds: float) -> str:
    """29.1 s, 31.2 ms, 870 µs; -1.2 ms for saved time."""
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    if seconds >= _ROUNDS_UP:
        return f"{digits_text(seconds)} s"
    if seconds >= _ROUNDS_UP * 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def count_text(count: float) -> str:
    """15T, 70.6B, 124M, 3.2K."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= _ROUNDS_UP * unit:
            return f"{digits_text(count / unit)}{name}"
    return f"{count:.0f}"


def percent_text(share: float) -> str:
    """51.7%."""
    return f"{share * 100:.1f}%"


def turn_text(slices: int) -> str:
    """What passes go through a stage for, by the slices of a micro-batch."""
    return "per micro-batch" if slices == 1 else "per slice"
