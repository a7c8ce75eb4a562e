"""The time of a step by part, by resource, and by operator class."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hardware_profiles import Seconds
from planner.plan.binding.bind import BoundPlan
from planner.plan.compare.dissection import RankDissection
from planner.plan.compare.explanation import RESOURCE_OF, shown_part, shown_parts
from planner.plan.plan import Plan, Prediction
from planner.plan.prediction.step import step_of
from planner.plan.prediction.walk.stage_cost import StageCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the step and its resource."""

    name: str
    resource: str
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorClass:
    """All operators of one class on the busiest pipeline rank: seconds of a step, by part of the prediction."""

    name: str
    operators: int
    seconds: tuple[tuple[str, Seconds], ...]

    @property
    def total(self) -> Seconds:
        return sum(seconds for _, seconds in self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The parts sum to `step_seconds`. Parts and classes are of pipeline rank `busiest`; classes are longest first and
    leave out what is no operator: updates, transfers, waiting."""

    step_seconds: Seconds
    busiest: int
    parts: tuple[Part, ...]
    classes: tuple[OperatorClass, ...]


def spending_of(bound: BoundPlan, prediction: Prediction, rank: RankDissection, busiest: int) -> Spending:
    """The spending of a plan; `rank` has the costs of its pipeline rank `busiest`."""
    return Spending(
        step_seconds=prediction.step_seconds,
        busiest=busiest,
        parts=tuple(
            Part(name=name, resource=RESOURCE_OF[name], seconds=seconds)
            for name, seconds in shown_parts(prediction.time)
            if seconds
        ),
        classes=_classes(bound, rank),
    )


def busiest_of(plan: Plan, costs: Sequence[StageCost]) -> int:
    """The pipeline rank that the parts of a prediction describe."""
    chunks, once = [cost.chunks for cost in costs], [cost.all_once for cost in costs]
    return step_of(chunks, once, plan.training.micro_batches, plan.schedule).busiest


def _classes(bound: BoundPlan, rank: RankDissection) -> tuple[OperatorClass, ...]:
    turns = bound.plan.stage_passes
    seconds: defaultdict[str, defaultdict[str, Seconds]] = defaultdict(lambda: defaultdict(float))
    counts: defaultdict[str, int] = defaultdict(int)
    for one in rank.operators:
        name = bound.operators[one.at].rule.op_class
        counts[name] += 1
        for part, taken in one.seconds:
            seconds[name][shown_part(part)] += turns * taken
    found = [
        OperatorClass(name=name, operators=counts[name], seconds=tuple(parts.items()))
        for name, parts in seconds.items()
    ]
    return tuple(sorted((one for one in found if one.total > 0), key=lambda one: -one.total))
