"""What records of runs say of a profile: one factor for each kind of its numbers.

    factor     of what                 from
    compute    kernels                 forward and backward
    update     the optimizer           update
    messages   links of all levels     communication and reduction

A factor is predicted over measured seconds. A run says as much of it as its term is long beside the `noise`, by which
its steps differ: a logarithm has the error s = noise / seconds, and seconds below the noise count as that much. Plans
differ by `APART` beyond that, and a profile of which nothing was measured is off by `DOUBT`. So a term that is hardly
there changes nothing, where plans that have more of it would pay for its noise:

    log f = D^2 / (D^2 + S^2)  sum_i w_i log(predicted_i / measured_i) / sum_i w_i
            w_i = 1 / (s_i^2 + A^2),  1 / S^2 = sum_i 1 / s_i^2

Collectives that travel while a rank computes say nothing of links, as clocks find what is left of them alone, and the
rest in the passes: a run with any of those does not correct messages.

One factor for all kernels and one for all links is all that terms of steps can tell apart; it says nothing of kernels
and collectives that were not run.

A factor is about the profile by which its run was predicted, and multiplies the numbers of that one alone: the factors
of a second round, of plans for a corrected profile, multiply the corrected numbers.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardware_profiles import Seconds, UnknownProfileError, compose, load_profile
from hardware_profiles.corrections import FACTORS, Corrections
from hardware_profiles.run_record import MeasuredRun
from planner.errors import RequestError
from planner.plan.compare.measured import COUNTS, Clock, measured_terms

DOUBT, APART = 0.5, 0.1
"""Standard deviations of logarithms. Both are assumptions: two of three factors are between 0.6 and 1.6, and two of
three plans are within a tenth of the factor of their profile."""

_FEW = 4

_WAITED_FOR = "wait"
"""The call by which a record has collectives that were started before; without a phase they are between stages."""

_TERMS = {"compute": ("forward", "backward"), "update": ("update",), "messages": ("communication", "reduction")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """How many times faster the numbers of a kind are than the profile says; `runs` stand behind it, whose own ratios
    lie between `low` and `high`. None where no run says anything."""

    name: str
    value: float | None
    low: float
    high: float
    runs: int


def factors_of(runs: Sequence[MeasuredRun], clock: Clock = "wall") -> tuple[Factor, ...]:
    """The factors that runs of one profile ask for. Raises RequestError where they are of several profiles or machines,
    where one is given twice, and where no run says anything."""
    _check_alike(runs, "profile", lambda run: run.plan.profile)
    _check_alike(runs, "machine", lambda run: run.machine.name)
    for at, run in enumerate(runs):
        if run in runs[:at]:
            raise RequestError(f"runs {runs.index(run) + 1} and {at + 1} are the same; give each run once")
    factors = tuple(_factor(name, runs, clock) for name in FACTORS)
    if all(one.value is None for one in factors):
        raise RequestError(
            "the step times of these runs vary by more than any part of the step takes, so nothing can be corrected;"
            " measure again on a machine that does nothing else"
        )
    return factors


def check_profile(runs: Sequence[MeasuredRun], profile: str) -> None:
    """Raise RequestError where runs were predicted by another profile than the one that is to be corrected, given by
    its name or file: what an earlier round has corrected would be corrected again."""
    try:
        cluster = load_profile(profile)
    except UnknownProfileError as error:
        raise RequestError(f"{error}; give the file of the measured profile with --hardware") from error
    for plan in (run.plan for run in runs):
        machine = compose(cluster, plan.composition) if plan.composition else cluster
        if machine.name != plan.profile or plan.profile_digest not in ("", machine.digest()):
            other = f"'{machine.name}'" if machine.name != plan.profile else "another version of it"
            raise RequestError(
                f"the run was predicted by profile '{plan.profile}', but {profile} is {other}; give the profile as it"
                " was when the plan was made with --hardware, or run plan replan PLAN --hardware"
                f" {profile} -o FILE and measure that plan"
            )


def corrections_of(runs: Sequence[MeasuredRun], factors: Sequence[Factor], clock: Clock = "wall") -> Corrections:
    """What makes the profile of the runs one of their machine."""
    machine, dates = runs[0].machine, sorted({run.date for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    versions = " and ".join(sorted({run.machine.torch for run in runs}))
    words = f"{len(runs)} run{'s' if len(runs) > 1 else ''} on {machine.name}, PyTorch {versions}, {when}"
    return Corrections(
        factors={one.name: one.value for one in factors if one.value is not None},
        source=words if clock == "wall" else f"{words}, CPU seconds",
    )


def _check_alike(runs: Sequence[MeasuredRun], what: str, of: Callable[[MeasuredRun], str]) -> None:
    found = sorted({of(run) for run in runs})
    if len(found) > 1:
        raise RequestError(
            f"the runs are of {len(found)} {what}s, {' and '.join(found[:2])}; fit the runs of each separately"
        )


def spread(run: MeasuredRun) -> float:
    """Half of what the middle half of its steps differ by, by their median; 0 of one step."""
    first, middle, third = statistics.quantiles(run.step_seconds * 2, n=4, method="inclusive")  # takes two at least
    return (third - first) / 2 / middle


def noise(run: MeasuredRun, clock: Clock = "wall") -> Seconds:
    """The `spread` of its steps, and `COUNTS` of a step at least; `APART` where they are too few to differ. It does not
    fall with the number of steps: the next run finds the machine as different as the next steps do."""
    least = COUNTS if len(run.step_seconds) >= _FEW else APART
    return max(least, spread(run)) * sum(measured_terms(run, clock).values())


def _factor(name: str, runs: Sequence[MeasuredRun], clock: Clock) -> Factor:
    ratios, errors = list[float](), list[float]()
    for run in runs:
        if name == "messages" and any(one.call == _WAITED_FOR and one.phase for one in run.collectives):
            continue
        measured, least = measured_terms(run, clock), noise(run, clock)
        said, found = (sum(terms[term] for term in _TERMS[name]) for terms in (run.plan.predicted, measured))
        if said > 0 and found > 0 and max(said, found) > least:
            ratios.append(max(said, least) / max(found, least))
            errors.append(least / max(found, least))
    if not ratios:
        return Factor(name=name, value=None, low=1.0, high=1.0, runs=0)
    weights = [1 / (error**2 + APART**2) for error in errors]
    mean = math.fsum(w * math.log(ratio) for w, ratio in zip(weights, ratios, strict=True)) / math.fsum(weights)
    sure = DOUBT**2 / (DOUBT**2 + 1 / math.fsum(error**-2 for error in errors))
    return Factor(name=name, value=math.exp(sure * mean), low=min(ratios), high=max(ratios), runs=len(ratios))
