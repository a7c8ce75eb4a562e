"""How reliable a prediction is: its interval and its basis, and the sources of the machine's numbers."""

from collections import Counter
from dataclasses import dataclass

from hardware_profiles import FitError, Machine, RunError, Seconds, machines_of, parts_of, recorded, spread_of
from hardware_profiles.intervals import COVERAGE
from planner.plan.binding.bind import BoundPlan
from planner.plan.plan import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The interval, with how often it should hold (`coverage`), by the errors of how many `runs` of sources that were
    not known when they were predicted; 0 runs where nobody published any of such `machines`, or of some of several
    kinds, and the interval is that of all others, twice as wide. `measured` are recorded errors of whole steps on this
    profile, `fits` those of kernels and collectives. `facts` counts the numbers of the profile, or of all of them, by
    kind; `digest_as_planned` says whether they are still those that the plan was made with."""

    step_seconds: Seconds
    low_seconds: Seconds | None
    high_seconds: Seconds | None
    coverage: float
    machines: str
    experts: bool
    runs: int
    profile: str
    software: str
    measured: RunError | None
    fits: tuple[FitError, ...]
    facts: tuple[tuple[str, int], ...]
    digest_as_planned: bool


def trust_of(bound: BoundPlan, prediction: Prediction, machine: Machine) -> Trust:
    """The known accuracy of predictions like this one."""
    experts = any(operator.rule.op_class == "experts" for operator in bound.operators)
    profiles = dict.fromkeys(part.name for part in parts_of(machine))
    counts = {machines_of(name): spread_of(name, experts).runs for name in profiles}
    facts = {part.name: part.facts for part in parts_of(machine)}
    runs = [one for one in recorded(RunError) if one.profile == machine.name]
    return Trust(
        step_seconds=prediction.step_seconds,
        low_seconds=prediction.low_seconds,
        high_seconds=prediction.high_seconds,
        coverage=COVERAGE,
        machines=" and ".join(counts),
        experts=experts,
        runs=max(counts.values()) if all(counts.values()) else 0,
        profile=machine.name,
        software=machine.software.name,
        measured=runs[0] if runs else None,
        fits=tuple(one for one in recorded(FitError) if one.profile in profiles),
        facts=tuple(sorted(Counter(fact.kind for own in facts.values() for fact in own).items())),
        digest_as_planned=machine.digest() == bound.plan.cluster.digest,
    )
