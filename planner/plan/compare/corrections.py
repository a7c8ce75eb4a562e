"""What records of runs say of a profile: one factor for each kind of its numbers.

    factor     of what                 from
    compute    kernels                 forward and backward
    update     the optimizer           update
    messages   links of all levels     communication and reduction

A factor is predicted over measured seconds, the geometric mean over the runs in which it counts: `COUNTS` of the step
at least on one side. One factor for all kernels and one for all links is all that terms of steps can tell apart; it
says nothing of kernels and collectives that were not run.

A factor is about the profile by which its run was predicted, and multiplies the numbers of that one alone: the factors
of a second round, of plans for a corrected profile, multiply the corrected numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardware_profiles import UnknownProfileError, compose, load_profile
from hardware_profiles.corrections import FACTORS, Corrections
from hardware_profiles.run_record import MeasuredRun
from planner.errors import RequestError
from planner.plan.compare.measured import COUNTS, Clock, measured_terms

_TERMS = {"compute": ("forward", "backward"), "update": ("update",), "messages": ("communication", "reduction")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """How many times faster the numbers of a kind are than the profile says; `runs` stand behind it, and lie between
    `low` and `high`. None where no run says anything."""

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
            raise RequestError(f"runs {runs.index(run) + 1} and {at + 1} are the same one; give each run once")
    factors = tuple(_factor(name, runs, clock) for name in FACTORS)
    if all(one.value is None for one in factors):
        raise RequestError(
            f"no term of these runs is predicted and measured to take {COUNTS:.0%} of the step, so there is nothing to"
            " correct; measure runs that compute"
        )
    return factors


def check_profile(runs: Sequence[MeasuredRun], profile: str) -> None:
    """Raise RequestError where runs were predicted by another profile than the one that is to be corrected, given by
    its name or file: what an earlier round has corrected would be corrected again."""
    try:
        cluster = load_profile(profile)
    except UnknownProfileError as error:
        raise RequestError(f"{error}; give --hardware the file of the profile that was measured") from error
    for plan in (run.plan for run in runs):
        machine = compose(cluster, plan.composition) if plan.composition else cluster
        if machine.name != plan.profile or plan.profile_digest not in ("", machine.digest()):
            other = f"'{machine.name}'" if machine.name != plan.profile else "another one of that name"
            raise RequestError(
                f"the run was predicted by profile '{plan.profile}', and {profile} is {other}, of which the run says"
                " nothing: give --hardware the profile as it was when the plan was made, or plan replan PLAN --hardware"
                f" {profile}, and measure what that writes"
            )


def corrections_of(runs: Sequence[MeasuredRun], factors: Sequence[Factor], clock: Clock = "wall") -> Corrections:
    """What makes the profile of the runs one of their machine."""
    machine, dates = runs[0].machine, sorted({run.date for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    words = f"{len(runs)} run{'s' if len(runs) > 1 else ''} on {machine.name}, PyTorch {machine.torch}, {when}"
    return Corrections(
        factors={one.name: one.value for one in factors if one.value is not None},
        source=words if clock == "wall" else f"{words}, CPU seconds",
    )


def _check_alike(runs: Sequence[MeasuredRun], what: str, of: Callable[[MeasuredRun], str]) -> None:
    found = sorted({of(run) for run in runs})
    if len(found) > 1:
        raise RequestError(f"the runs are of {len(found)} {what}s, {' and '.join(found[:2])}; fit each by itself")


def _factor(name: str, runs: Sequence[MeasuredRun], clock: Clock) -> Factor:
    ratios = []
    for run in runs:
        measured = measured_terms(run, clock)
        said, found = (sum(terms[term] for term in _TERMS[name]) for terms in (run.plan.predicted, measured))
        if said > 0 and found > 0 and max(said, found) >= COUNTS * sum(measured.values()):
            ratios.append(said / found)
    if not ratios:
        return Factor(name=name, value=None, low=1.0, high=1.0, runs=0)
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    return Factor(name=name, value=mean, low=min(ratios), high=max(ratios), runs=len(ratios))
