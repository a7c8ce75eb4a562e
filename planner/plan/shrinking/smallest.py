"""The small plans that have the most of a large one.

Axes of two devices first. Which way a tensor takes between two layouts depends on how many devices an axis has: a
reduce-scatter on a fast axis before an all-reduce on a slow one pays where it leaves a fourth, not where it leaves a
half. So where a redistribution or a collective of the large plan is missing, one axis after the other is tried with
four devices, as far as there are processes. Likewise a rank keeps one chunk between the first and the last, and two
where turns of the schedule are missing.
"""

from dataclasses import dataclass

from hardware_profiles import Machine
from planner.plan.binding.bind import BoundPlan
from planner.plan.shrinking.coverage import Covered, coverage
from planner.plan.shrinking.facts import Facts, facts_of
from planner.plan.shrinking.shrink import SmallPlan, shrink
from planner.plan.shrinking.small_mesh import small_numbers

_TURNS = ("schedule steps",)
"""The kind of decisions that the number of chunks may change."""

_WAYS = ("redistributions", "collectives")
"""Kinds of decisions that the size of an axis may change."""


@dataclass(frozen=True, kw_only=True)
class SmallRequest:
    """What small plans are made from (`planner.plan.shrinking.shrink.shrink`): one for each of the precisions."""

    machine: Machine
    reference: str
    small: str | None
    processes: int
    precisions: tuple[str, ...]


def smallest(
    large: BoundPlan, facts: Facts, request: SmallRequest
) -> tuple[tuple[SmallPlan, ...], tuple[Covered, ...]]:
    """The small plans with the fewest missing decisions, the smaller of equals, and what they cover of `facts`."""
    best, covered = _with(large, facts, request, None)
    between = False
    if large.plan.virtual_stages > best[0].plan.virtual_stages and _missing(covered, _TURNS):
        found, more = _with(large, facts, request, None, both_between=True)
        if _missing(more) < _missing(covered):
            best, covered, between = found, more, True
    ranks = best[0].plan.pipeline
    for axis in _wider(large, request, ranks):
        if not _missing(covered, _WAYS):
            break
        found, more = _with(large, facts, request, axis, both_between=between)
        if _missing(more) < _missing(covered):
            best, covered = found, more
    return best, covered


def _with(
    large: BoundPlan, facts: Facts, request: SmallRequest, wide: int | None, *, both_between: bool = False
) -> tuple[tuple[SmallPlan, ...], tuple[Covered, ...]]:
    found = tuple(
        shrink(
            large,
            precision=precision,
            reference=request.reference,
            machine=request.machine,
            small=request.small,
            processes=request.processes,
            wide=wide,
            both_between=both_between,
        )
        for precision in request.precisions
    )
    return found, coverage(facts, [facts_of(one.bound, one.machine) for one in found])


def _wider(large: BoundPlan, request: SmallRequest, ranks: int) -> list[int]:
    """Axes that may have four devices with as many pipeline ranks as without, the fastest first."""
    axes = [at for at, axis in enumerate(large.plan.mesh.axes) if axis.size >= 4]
    least = small_numbers(large.plan, request.processes).mesh.size
    return [at for at in reversed(axes) if 2 * least * ranks <= request.processes]


def _missing(covered: tuple[Covered, ...], kinds: tuple[str, ...] | None = None) -> int:
    return sum(len(one.missing) for one in covered if kinds is None or one.kind in kinds)
