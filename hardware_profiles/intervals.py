"""How far measured step times lie from predicted ones, by what is known of a run's source and machine.

The runs of one source have errors in common (one cluster, one version, one way to measure), and differ among
themselves:

    log(measured / predicted)  =  b + r

    b    mean of a source. Sources are of two kinds (dense on GPUs; experts or NPUs); each source counts once. A mean
         of n runs varies by w / n from chance alone, w being the variance of r. So it is shrunk to the mean m of all:
             b = m + (mean - m) v / (v + w / n),     v = variance of the means - mean of w / n
         (James, Stein 1961, "Estimation with quadratic loss"; Efron, Morris 1975)
         Sources that were used to improve the model tell little about other sources. Only runs of a known source
         (`known_sources.csv`) are predicted with these b
    r    deviations of runs from the mean of their source, by class: a family of machines, with or without experts.
         Sources weigh the same; those of fewer than `SCATTERING` runs are left out

An interval is the prediction times the exponentials of quantiles of b + r, over all pairs of a source and a deviation.
No distribution is assumed for either.

Any other run, and every plan, counts as one of a source that was predicted before anybody had looked at it; those
predictions are kept as they were made (tests/benchmarks/data/unseen_runs.csv.gz). Sources are exchangeable, runs of one
source are not, so sources are counted. The interval of the class "new" is the shortest one that holds the share `MOST`
of the runs in the share `SOURCES` of the sources, and the share `COVERAGE` on average over the sources (after Dunn,
Wasserman, Ramdas 2023, "Distribution-free prediction sets for two-layer hierarchical models"). To find it, two ends
move over the sorted errors, and neither goes back.

Machines without published runs get the class "other", which is all runs together, twice as wide, if that is wider than
"new". `tests/benchmarks/bench_sources.py` counts how often intervals hold in sources that were left out.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from math import exp
from statistics import fmean, pvariance

COVERAGE = 0.8
"""Share of runs that an interval should hold."""

TAIL = 0.085
"""Share of b + r beyond each end. Of 741 runs (24 November 2026), 85 of 100 lie inside the intervals that other sources
make. With 0.1 it is 81, but two sources of four runs and more have half of theirs outside. Chosen on these runs."""

MOST = 0.6
SOURCES = 0.9
"""The interval for unknown sources holds the share `MOST` of the runs in at least the share `SOURCES` of the
sources."""

FEWEST = 12
"""Classes with fewer runs have no interval of their own."""

_ROUNDING = 1e-9

SCATTERING = 3
"""Sources with fewer runs are not used for the deviations r."""

_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "ampere": ("a100", "a800"),
    "hopper": ("h100", "h200", "h800", "gh200"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
    "ascend": ("ascend-910b", "ascend-910c"),
}
OTHER = "other"
NEW = "new"
_TABLE = "intervals.csv"
_SOURCES = "known_sources.csv"
_COLUMNS = ("machines", "experts", "runs", "low", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Factors on a prediction at the ends of its interval, and the number of runs that they are made of."""

    low: float
    high: float
    runs: int


Spreads = Mapping[tuple[str, bool], Spread]
_Error = tuple[float, str]
"""log(measured / predicted) of a run, and its source."""


def machines_of(profile: str) -> str:
    """The family of a profile, by its name; "other" for machines without published runs, and for users' own
    profiles."""
    return next((name for name, starts in _FAMILIES.items() if profile.startswith(starts)), OTHER)


def spread_of(profile: str, experts: bool, spreads: Spreads | None = None, *, known: bool = False) -> Spread:
    """The interval of a prediction for a profile, with or without experts.

    If the source of the run is `known`, it is the interval of the machine's class. Else it is that of the class "new";
    for machines without published runs, or with too few, the wider one at each end of "new" and "other". `spreads`
    defaults to the packaged table.
    """
    said = table() if spreads is None else spreads
    own = said.get((machines_of(profile), experts), said[OTHER, False])
    new = said.get((NEW, experts or machines_of(profile) == "ascend"))
    if known or new is None:
        return own
    if own.runs:
        return new
    return Spread(low=min(own.low, new.low), high=max(own.high, new.high), runs=0)


def spreads_of(
    errors: Iterable[tuple[str, bool, float, str]], first: Iterable[tuple[str, bool, float, str]] = ()
) -> dict[tuple[str, bool], Spread]:
    """Intervals by class, from the errors of runs.

    An error is (profile, whether it has experts, log(measured / predicted), source). `first` has the errors of sources
    as they were before the sources were known. Few of them have experts or are on NPUs, so the class "new" of that kind
    is made of all of them.
    """
    classes: dict[tuple[str, bool], list[_Error]] = {}
    kinds: dict[bool, list[_Error]] = {}
    every: list[_Error] = []
    for profile, experts, error, source in errors:
        key = machines_of(profile), experts
        for group in (classes.setdefault(key, []), kinds.setdefault(_hard(key), []), every):
            group.append((error, source))
    found = {
        key: _spread(_means(kinds[_hard(key)]), runs)
        for key, runs in classes.items()
        if len(runs) >= FEWEST and key[0] != OTHER
    }
    everywhere = _spread(_means(every), every)
    found[OTHER, False] = Spread(low=everywhere.low**2, high=everywhere.high**2, runs=0)
    unseen = [((machines_of(profile), experts), (error, source)) for profile, experts, error, source in first]
    for hard in (False, True):
        runs = [one for key, one in unseen if hard or not _hard(key)]
        if runs:
            found[NEW, hard] = _shortest(runs)
    return found


def _hard(key: tuple[str, bool]) -> bool:
    """Whether a class has experts or is on NPUs; means of such sources differ more."""
    return key[1] or key[0] == "ascend"


def _of_sources(runs: Iterable[_Error]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for error, source in runs:
        found.setdefault(source, []).append(error)
    return found


def _deviations(runs: Iterable[_Error]) -> list[tuple[float, float]]:
    """The deviations r (see the top of this file), each with its weight."""
    return [
        (error - fmean(some), 1 / len(some))
        for some in _of_sources(runs).values()
        if len(some) >= SCATTERING
        for error in some
    ]


def _means(runs: Sequence[_Error]) -> list[float]:
    """The means b of the sources (see the top of this file)."""
    sources = _of_sources(runs)
    means = {name: fmean(some) for name, some in sources.items()}
    centre = fmean(means.values())
    scattered = [some for some in sources.values() if len(some) >= SCATTERING]
    within = sum(pvariance(some) * len(some) for some in scattered) / max(1, sum(len(some) - 1 for some in scattered))
    chance = {name: within / len(some) for name, some in sources.items()}
    between = max(0.0, pvariance(means.values()) - fmean(chance.values()))
    return [
        centre + (mean - centre) * (between / (between + chance[name]) if between else 0.0)
        for name, mean in means.items()
    ]


def _spread(means: Sequence[float], runs: Sequence[_Error]) -> Spread:
    scattered = _deviations(runs) or [(0.0, 1.0)]
    pairs = sorted((mean + r, weight) for mean in means for r, weight in scattered)
    ends = min(0.0, _end(pairs)), max(0.0, _end(pairs[::-1]))  # a prediction is in its own interval
    return Spread(low=exp(ends[0]), high=exp(ends[1]), runs=len(runs))


def _shortest(runs: Sequence[_Error]) -> Spread:
    """The interval of the class "new" (see the top of this file)."""
    errors, sizes = sorted(runs), {name: len(some) for name, some in _of_sources(runs).items()}
    inside = dict.fromkeys(sizes, 0)

    def enough() -> bool:
        shares = [inside[name] / size for name, size in sizes.items()]
        held = sum(share >= MOST for share in shares) / len(shares)
        return held >= SOURCES - _ROUNDING and fmean(shares) >= COVERAGE - _ROUNDING

    ends, last = (min(0.0, errors[0][0]), max(0.0, errors[-1][0])), 0
    for low, source in errors:
        while last < len(errors) and not enough():
            inside[errors[last][1]] += 1
            last += 1
        if not enough():
            break
        found = min(0.0, low), max(0.0, errors[last - 1][0])  # a prediction is in its own interval
        if found[1] - found[0] < ends[1] - ends[0]:
            ends = found
        inside[source] -= 1
    return Spread(low=exp(ends[0]), high=exp(ends[1]), runs=len(runs))


def _end(weighted: Sequence[tuple[float, float]]) -> float:
    """The first error at which the weight up to it reaches the share `TAIL`."""
    beyond = TAIL * sum(weight for _, weight in weighted)
    for error, weight in weighted:
        beyond -= weight
        if beyond <= 0:
            return error
    return weighted[-1][0]


def is_known(source: str) -> bool:
    """Whether the intervals for known sources use runs of this source."""
    return source.strip().lower() in known_sources()


@lru_cache(maxsize=1)
def known_sources() -> frozenset[str]:
    """Sources of the published runs that intervals are made of, in lower case."""
    text = resources.files("hardware_profiles").joinpath(_SOURCES).read_text(encoding="utf-8")
    return frozenset(row["source"].lower() for row in csv.DictReader(text.splitlines()))


@lru_cache(maxsize=1)
def table() -> Spreads:
    """The packaged intervals by (machine family, whether with experts)."""
    text = resources.files("hardware_profiles").joinpath(_TABLE).read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        (row["machines"], row["experts"] == "yes"): Spread(
            low=float(row["low"]), high=float(row["high"]), runs=int(row["runs"])
        )
        for row in rows
    }


def dump_spreads(spreads: Spreads) -> str:
    """The text of the packaged table for these intervals."""
    lines = [",".join(_COLUMNS)]
    for (machines, experts), one in sorted(spreads.items()):
        lines.append(f"{machines},{'yes' if experts else 'no'},{one.runs},{one.low:.4g},{one.high:.4g}")
    return "\n".join(lines) + "\n"
