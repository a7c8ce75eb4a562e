"""How far measured steps lie from predicted ones, by what is known of the machine.

Of the published runs that the cost model was compared with, the errors log(measured / predicted) of each class of runs
have quantiles; an interval is the prediction times their exponentials. A class is a family of machines, with or without
experts; machines that nobody published a run of get the class "other", which is that of all runs together, twice as
wide. No distribution is assumed (Vovk, Gammerman, Shafer, "Algorithmic learning in a random world", 2005, section 4.5:
Mondrian conformal prediction). Runs of one source err together, and whoever asks has a source that nobody has seen: a
source with n runs counts as much as n^1/2, not as n. How often intervals hold in sources that were left out is counted
by `tests/benchmarks/bench_sources.py`.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from math import exp

COVERAGE = 0.8
"""How often an interval should hold."""

TAIL = 0.07
"""Share of the weight beyond each end. Runs of one source err together: with 0.07 beyond each end 83 of 100 runs of
sources that were left out lie inside, with 0.06 86, with 0.08 82, and with 0.09 81 (710 runs, 23 November 2026)."""

FEWEST = 12
"""Runs below which a class says nothing of its own."""

_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "ampere": ("a100", "a800"),
    "hopper": ("h100", "h200", "h800", "gh200"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
    "ascend": ("ascend-910b", "ascend-910c"),
}
OTHER = "other"
_TABLE = "intervals.csv"
_COLUMNS = ("machines", "experts", "runs", "low", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What a prediction is multiplied by at the ends of its interval, and how many runs say so."""

    low: float
    high: float
    runs: int


Spreads = Mapping[tuple[str, bool], Spread]


def machines_of(profile: str) -> str:
    """The class of a profile, by its name; "other" for machines without published runs, and for people's own."""
    return next((name for name, starts in _FAMILIES.items() if profile.startswith(starts)), OTHER)


def spread_of(profile: str, experts: bool, spreads: Spreads | None = None) -> Spread:
    """That of the class, else that of all others."""
    known = table() if spreads is None else spreads
    return known.get((machines_of(profile), experts), known[OTHER, False])


def spreads_of(errors: Iterable[tuple[str, bool, float, str]]) -> dict[tuple[str, bool], Spread]:
    """Quantiles of errors log(measured / predicted), given with profile, whether there are experts, and source."""
    classes: dict[tuple[str, bool], list[tuple[float, str]]] = {}
    every: list[tuple[float, str]] = []
    for profile, experts, error, source in errors:
        classes.setdefault((machines_of(profile), experts), []).append((error, source))
        every.append((error, source))
    found = {key: _spread(values) for key, values in classes.items() if len(values) >= FEWEST and key[0] != OTHER}
    everywhere = _spread(every)
    found[OTHER, False] = Spread(low=everywhere.low**2, high=everywhere.high**2, runs=0)
    return found


def _spread(errors: list[tuple[float, str]]) -> Spread:
    runs = Counter(source for _, source in errors)
    weighted = sorted((error, runs[source] ** -0.5) for error, source in errors)
    ends = min(0.0, _end(weighted)), max(0.0, _end(weighted[::-1]))  # a prediction is in its own interval
    return Spread(low=exp(ends[0]), high=exp(ends[1]), runs=len(errors))


def _end(weighted: list[tuple[float, float]]) -> float:
    """The first error with `TAIL` of the weight up to it."""
    beyond = TAIL * sum(weight for _, weight in weighted)
    for error, weight in weighted:
        beyond -= weight
        if beyond <= 0:
            return error
    return weighted[-1][0]


@lru_cache(maxsize=1)
def table() -> Spreads:
    """The packaged spreads."""
    text = resources.files("hardware_profiles").joinpath(_TABLE).read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        (row["machines"], row["experts"] == "yes"): Spread(
            low=float(row["low"]), high=float(row["high"]), runs=int(row["runs"])
        )
        for row in rows
    }


def dump_spreads(spreads: Spreads) -> str:
    """The content of the packaged table."""
    lines = [",".join(_COLUMNS)]
    for (machines, experts), one in sorted(spreads.items()):
        lines.append(f"{machines},{'yes' if experts else 'no'},{one.runs},{one.low:.4g},{one.high:.4g}")
    return "\n".join(lines) + "\n"
