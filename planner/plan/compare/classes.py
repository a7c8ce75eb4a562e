"""Seconds of a step by class of operator, as a plan predicts them, beside those that a profiler has seen.

predicted   forward, backward and recomputation of the operators of the rank that computes longest, or the mean of all
            pipeline ranks, all micro-batches, each operator at least as long as its launch; updates of parameters
measured    kernels of the busiest device of a trace (or operators of a CPU), or the profiled step of a record, the mean
            of all ranks
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from costmodels import FREE_OP_CLASS
from hardware_profiles import Machine, Seconds
from planner.plan.binding.bind import BoundPlan
from planner.plan.compare.dissection import RankDissection, dissect

_COMPUTED = ("forward", "backward", "recomputation")
_OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """A class of operators: its seconds in a step, None where nothing is known on that side; `calls` of kernels where
    they were counted."""

    name: str
    predicted: Seconds | None
    measured: Seconds | None
    calls: float | None = None


def predicted_classes(bound: BoundPlan, machine: Machine, *, mean: bool = False) -> dict[str, Seconds]:
    """Seconds of a step by class, of the rank that computes longest, or the `mean` of all pipeline ranks."""
    micro_batches = bound.plan.stage_passes
    ranks = [_classes(bound, rank, micro_batches) for rank in dissect(bound, machine)]
    if not mean:
        return max(ranks, key=lambda found: sum(found.values()))
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: sum(rank.get(name, 0.0) for rank in ranks) / len(ranks) for name in names}


def class_times(
    predicted: Mapping[str, Seconds], measured: Mapping[str, Seconds], calls: Mapping[str, float] | None = None
) -> tuple[ClassTime, ...]:
    """Both sides by class, the longest first."""
    found = [
        ClassTime(
            name=name,
            predicted=predicted.get(name),
            measured=measured.get(name),
            calls=None if calls is None else calls.get(name),
        )
        for name in dict.fromkeys((*predicted, *measured))
    ]
    return tuple(sorted(found, key=lambda one: (-max(one.predicted or 0.0, one.measured or 0.0), one.name)))


def _classes(bound: BoundPlan, rank: RankDissection, micro_batches: int) -> dict[str, Seconds]:
    found: dict[str, Seconds] = defaultdict(float)
    for operator in rank.operators:
        op_class = bound.operators[operator.at].rule.op_class
        if op_class != FREE_OP_CLASS:
            found[op_class] += micro_batches * sum(s for part, s in operator.seconds if part in _COMPUTED)
    found[_OPTIMIZER] += rank.cost.all_once[_OPTIMIZER]
    return {name: seconds for name, seconds in found.items() if seconds}
