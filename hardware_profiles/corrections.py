"""A profile file with some of its numbers corrected; everything else stays as it is written, except comments.

    compute    rates of all kernels but the optimizer's up, and their fixed times down, by one factor
    update     rates of the optimizer
    messages   bandwidth of every level up, and latencies down

If a share of a peak would exceed 1, the peak is raised instead. The source of every changed number says so and keeps
the old source; a profile that was corrected several times has all of its rounds there.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hardware_profiles.errors import UnknownProfileError
from hardware_profiles.foreign import SETTINGS, ForeignTextError, decoded, parse_toml, read_bytes
from hardware_profiles.load import parse_profile, profile_names
from hardware_profiles.write import dump_tables

_RATES = {
    "compute": (
        r"device\.efficiency\.(?!optimizer\.)\w+\.(compute|bandwidth)",
        r"device\.matmul\.\w+\.(compute|bandwidth|feed_gb_per_s|convert_gb_per_s)",
        r"device\.attention\.\w+\.compute",
    ),
    "update": (r"device\.efficiency\.optimizer\.(compute|bandwidth)",),
    "messages": (r"level\.\d+\.bandwidth_gb_per_s",),
}
_TIMES = {
    "compute": (
        r"device\.(launch|host)_latency_us",
        r"device\.matmul\.\w+\.(launch|split)_us",
        r"device\.attention\.\w+\.preparation_us",
    ),
    "messages": (r"level\.\d+\.(protocol\.\d+|in_network)\.(latency|setup)_us",),
}
_SHARES = r"device\.(efficiency|matmul|attention)\.\w+\.(compute|bandwidth)"
_PEAKS = r"device\.(peak_tflops\.\w+|memory_bandwidth_gb_per_s)"
FACTORS = tuple(_RATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """`factors` by the names in `FACTORS`: how many times faster than the profile says; and the `source` of the
    factors."""

    factors: Mapping[str, float]
    source: str


def corrected_profile(profile: str, corrections: Corrections, name: str, comment: str) -> str:
    """The text of a profile called `name`, made from another profile, given by its id or its file.

    Raises: as `load_profile`.
    """
    table = _table(profile)
    table["id"] = name
    facts = dict(_facts("", table))
    for factor in FACTORS:
        by = corrections.factors.get(factor, 1.0)
        for patterns, scale in ((_RATES[factor], by), (_TIMES.get(factor, ()), 1 / by)):
            _scale(facts, patterns, scale, corrections.source)
    most = max((fact["value"] for path, fact in facts.items() if re.fullmatch(_SHARES, path)), default=0.0)
    if most > 1:
        why = f"{corrections.source}: kernels are faster than the peak that was known"
        _scale(facts, (_PEAKS,), most, why)
        _scale(facts, (_SHARES,), 1 / most, why)
    text = dump_tables(table, comment)
    parse_profile(text.encode(), name)
    return text


def _table(profile: str) -> dict[str, Any]:
    if profile in profile_names():
        content = resources.files("hardware_profiles").joinpath(f"{profile}.toml").read_bytes()
    else:
        try:
            content = read_bytes(Path(profile), SETTINGS.size)
        except ForeignTextError as error:
            raise UnknownProfileError(
                f"{profile}: {error}; give --hardware the id or the file of the profile that was measured"
            ) from error
    parse_profile(content, profile)
    return parse_toml(decoded(content))


def _facts(path: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number of a profile file: its path, and the table that has its value, source and kind."""
    if isinstance(value, dict) and "value" in value:
        yield path, value
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from _facts(f"{path}.{key}" if path else str(key), item)


def _scale(facts: Mapping[str, dict[str, Any]], patterns: tuple[str, ...], by: float, source: str) -> None:
    if by == 1:
        return
    for path, fact in facts.items():
        if any(re.fullmatch(pattern, path) for pattern in patterns):
            _set(fact, fact["value"] * by, f"{source}, x {by:.3g}")


def _set(fact: dict[str, Any], value: float, source: str) -> None:
    fact.update(value=float(f"{value:.6g}"), source=f"{source} [was: {fact['source']}]", kind="fitted")
