"""Errors of predictions over any set of rows.

    e     = predicted / measured - 1, of a row
    MAPE  = mean |e|,    worst = max |e|,    bias = mean e
    tau-b = (C - D) / sqrt((n0 - n1) (n0 - n2))      over the n0 pairs of the rows of one rank group:
            C pairs that both sides order alike, D otherwise; n1 pairs are tied in the prediction, n2 where measured

Kendall, "The treatment of ties in ranking problems", Biometrika 33 (1945). A pair tied on either side is neither in C
nor in D. All pairs are looked at, O(n^2), which groups of a few hundred rows allow.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.validation.results.evaluated import Evaluated

TIED = 1e-9
"""Values this close, relatively, are tied."""

ABOVE = 0.05
"""A measured peak may exceed the prediction of a run that fits by this share before it counts as a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of `count` rows; None if there are none."""

    count: int
    mean_absolute: float | None
    max_absolute: float | None
    bias: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """`count` mistakes among `judged` rows, with their mean and worst relative size; None if there are none."""

    judged: int
    count: int
    mean: float | None
    worst: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Statistics of rows that have something in common.

    Attributes:
        name: what they have in common.
        rows: number of rows.
        evaluated: rows with a prediction.
        feasible: rows that fit by our memory model.
        seconds: errors of step times.
        memory: errors of peaks.
        ran: of the runs that were made and state their recomputation, those that do not fit by our model, and the share
            of the device that they would lack.
        untold: the same for runs that do not state their recomputation.
        above: of the runs that fit by our model, those whose measured peak exceeds the predicted one by more than
            `ABOVE`, or that ran out of memory (which count with an excess of 0), and the excess.
        inferred: runs whose recomputation was inferred so that they fit; they say nothing about our memory model
            (`planner.validation.pricing.spared_plans`).
        inside: share of the timed rows whose time lies in its interval.
        peak_inside: share of the rows with a peak whose peak lies in its interval.
        tau: Kendall's tau-b of a rank group; None for other parts, and if there is no order.
    """

    name: str
    rows: int
    evaluated: int
    feasible: int
    seconds: Errors
    memory: Errors
    ran: Mistakes
    untold: Mistakes
    above: Mistakes
    inferred: int = 0
    inside: float | None = None
    peak_inside: float | None = None
    tau: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All rows, and parts of them; `median_tau` is the median over the rank groups that have a tau."""

    whole: Part
    sources: tuple[Part, ...]
    profiles: tuple[Part, ...]
    devices: tuple[Part, ...]
    rank_groups: tuple[Part, ...]
    median_tau: float | None


def summarise(results: Sequence[Evaluated]) -> Summary:
    """Errors of all rows, and by source, profile, device and rank group, in the order of their first appearance."""
    groups = _parts(results, "rank_group", tau=True)
    taus = [part.tau for part in groups if part.tau is not None]
    return Summary(
        whole=_part("all", results),
        sources=_parts(results, "source"),
        profiles=_parts(results, "profile"),
        devices=_parts(results, "device"),
        rank_groups=groups,
        median_tau=statistics.median(taus) if taus else None,
    )


def errors_of(values: Iterable[float | None]) -> Errors:
    """Statistics of relative errors; None values are left out."""
    known = [value for value in values if value is not None]
    if not known:
        return Errors(count=0, mean_absolute=None, max_absolute=None, bias=None)
    sizes = [abs(value) for value in known]
    return Errors(
        count=len(known),
        mean_absolute=math.fsum(sizes) / len(sizes),
        max_absolute=max(sizes),
        bias=math.fsum(known) / len(known),
    )


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b of two sequences of equal length; None if one has no order (all tied, or too short)."""
    agreement = ranked_first = ranked_second = 0
    for (a, x), (b, y) in combinations(zip(first, second, strict=True), 2):
        one, other = _order(a, b), _order(x, y)
        agreement += one * other
        ranked_first += one != 0
        ranked_second += other != 0
    if not ranked_first or not ranked_second:
        return None
    return agreement / math.sqrt(ranked_first * ranked_second)


def _order(a: float, b: float) -> int:
    return 0 if math.isclose(a, b, rel_tol=TIED) else 1 if a > b else -1


def _parts(results: Sequence[Evaluated], column: str, *, tau: bool = False) -> tuple[Part, ...]:
    groups: dict[str, list[Evaluated]] = {}
    for result in results:
        if name := result.row.text(column):
            groups.setdefault(name, []).append(result)
    rank: Callable[[list[Evaluated]], float | None] = _tau if tau else lambda _: None
    return tuple(_part(name, group, rank(group)) for name, group in groups.items())


def _part(name: str, results: Sequence[Evaluated], tau: float | None = None) -> Part:
    return Part(
        name=name,
        rows=len(results),
        evaluated=sum(result.error is None for result in results),
        feasible=sum(bool(result.feasible) for result in results),
        seconds=errors_of(result.seconds_error for result in results),
        memory=errors_of(result.memory_error for result in results),
        ran=_ran(results, told=True),
        untold=_ran(results, told=False),
        above=_above(results),
        inferred=sum(result.inferred for result in results),
        inside=_share(result.inside for result in results),
        peak_inside=_share(result.peak_inside for result in results),
        tau=tau,
    )


def _ran(results: Sequence[Evaluated], *, told: bool) -> Mistakes:
    judged = [
        result
        for result in results
        if result.feasible is not None and result.ran and (result.row.recomputation() is not None) == told
    ]
    lacking = [
        result.needed_bytes / result.capacity_bytes - 1
        for result in judged
        if not result.feasible and result.needed_bytes is not None and result.capacity_bytes is not None
    ]
    return _mistakes(len(judged), lacking)


def _above(results: Sequence[Evaluated]) -> Mistakes:
    judged = [
        result
        for result in results
        if result.feasible and (result.memory_error is not None or result.row.out_of_memory)
    ]
    excess = [
        0.0 if result.memory_error is None else 1 / (1 + result.memory_error) - 1
        for result in judged
        if result.row.out_of_memory or 1 / (1 + (result.memory_error or 0.0)) - 1 > ABOVE
    ]
    return _mistakes(len(judged), excess)


def _mistakes(judged: int, sizes: Sequence[float]) -> Mistakes:
    return Mistakes(
        judged=judged,
        count=len(sizes),
        mean=math.fsum(sizes) / len(sizes) if sizes else None,
        worst=max(sizes, default=None),
    )


def _share(answers: Iterable[bool | None]) -> float | None:
    known = [answer for answer in answers if answer is not None]
    return statistics.fmean(known) if known else None


def _tau(results: Sequence[Evaluated]) -> float | None:
    pairs = [
        (result.predicted_seconds, result.row.measured_seconds)
        for result in results
        if result.predicted_seconds is not None and result.row.measured_seconds is not None
    ]
    return kendall_tau([predicted for predicted, _ in pairs], [measured for _, measured in pairs])
