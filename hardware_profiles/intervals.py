"""How far measured steps lie from predicted ones, by what is known of the machine.

Of the published runs that the cost model was compared with, the errors log(measured / predicted) of each class of runs
have quantiles; an interval is the prediction times their exponentials. A class is a family of machines, with or without
experts; machines that nobody published a run of get the class "other", which is that of all runs together, twice as
wide. No distribution is assumed (Vovk, Gammerman, Shafer, "Algorithmic learning in a random world", 2005, section 4.5:
Mondrian conformal prediction); that the intervals hold for runs that were left out is measured by
`tests/benchmarks/bench_accuracy.py`.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from math import exp, floor

COVERAGE = 0.8
"""How often an interval should hold."""

TAIL = 0.08
"""Share of the runs beyond each end. Runs of one model on one machine err together, so that with a tenth beyond each
end 76 of 100 runs of models that were left out lie inside; with this, 80."""

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


def spreads_of(errors: Iterable[tuple[str, bool, float]]) -> dict[tuple[str, bool], Spread]:
    """Quantiles of errors log(measured / predicted), given with the profile and whether there are experts."""
    classes: dict[tuple[str, bool], list[float]] = {}
    every: list[float] = []
    for profile, experts, error in errors:
        classes.setdefault((machines_of(profile), experts), []).append(error)
        every.append(error)
    found = {key: _spread(values) for key, values in classes.items() if len(values) >= FEWEST and key[0] != OTHER}
    everywhere = _spread(every)
    found[OTHER, False] = Spread(low=everywhere.low**2, high=everywhere.high**2, runs=0)
    return found


def _spread(values: list[float]) -> Spread:
    ordered = sorted(values)
    place = max(0, floor((len(ordered) + 1) * TAIL) - 1)
    ends = min(0.0, ordered[place]), max(0.0, ordered[-1 - place])  # a prediction is in its own interval
    return Spread(low=exp(ends[0]), high=exp(ends[1]), runs=len(ordered))


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
