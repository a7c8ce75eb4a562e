"""Finds slow ranks: compares each rank's time outside of waiting for others with its peers'.

    rank 0   ████░░░░░░░░        ░ waits in a collective: every rank's step takes as long as the slowest's
    rank 1   ████░░░░░░░░
    rank 2   ███████████░   <─   takes 2.75 times as long as the median
    rank 3   ████░░░░░░░░

All ranks of a stage have the same work. A stage with one rank is compared with the other stages instead, each scaled by
its predicted seconds: there a slow device looks the same as a stage whose work the plan underestimates.

Of two middle values the median is the lower one, so that of two ranks the slower one is found.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hardware_profiles import Seconds
from planner.plan.plan import Plan

LEAST_STEPS = 10
"""Minimum number of timed steps: among only a few, one that the system disturbed would count too much."""

_FACTOR = 1.5  # multiple of the median
_SHARE = 0.05  # minimum share of the step that is lost; less is no reason to look for another machine


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank for which others wait: its busy `seconds` in a step, and the ratio `times` to the median of its peers."""

    rank: int
    seconds: Seconds
    times: float


def slow_ranks(busy: Sequence[Seconds], step: Seconds, plan: Plan) -> tuple[SlowRank, ...]:
    """The ranks whose busy time exceeds their peers' by more than half, and by more than a twentieth of the step.
    `busy` are the seconds of every rank outside of waiting, `step` those of the whole step."""
    found = []
    for rank, own in enumerate(busy):
        usual = statistics.median_low(_peers(busy, rank, plan))
        if own > _FACTOR * usual > 0 and own - usual > _SHARE * step:
            found.append(SlowRank(rank=rank, seconds=own, times=own / usual))
    return tuple(found)


def _peers(busy: Sequence[Seconds], rank: int, plan: Plan) -> list[Seconds]:
    """The time that a rank would take at the pace of each of its peers, including itself."""
    size = plan.mesh.size
    if size > 1:
        stage = rank // size
        return list(busy[stage * size : (stage + 1) * size])
    parts, count = plan.prediction.stages, plan.stage_passes
    work = [count * part.micro_batch_seconds + part.once_seconds for part in parts]
    if len(work) != len(busy) or not all(seconds > 0 for seconds in work):  # an old plan file: unknown
        return [busy[rank]]
    return [seconds / part * work[rank] for seconds, part in zip(busy, work, strict=True)]
