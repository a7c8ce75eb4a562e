"""Which ranks are slow: what each does outside of waiting for others, beside those that do the same.

    rank 0   ████░░░░░░░░        ░ waits in a collective: everybody takes as long as the slowest
    rank 1   ████░░░░░░░░
    rank 2   ███████████░   <─   takes 2.75 times as long as the median
    rank 3   ████░░░░░░░░

All ranks of a stage have the same work. A stage of one rank is held against those of the other stages instead, each in
proportion to the seconds that the plan gives it: there a slow device looks like a stage whose work the plan takes for
less than it is.

The median is the lower one of two, so that of two ranks the slower one is found.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hardware_profiles import Seconds
from planner.plan.plan import Plan

LEAST_STEPS = 10
"""Steps whose times are needed: of a few, one that the system was busy with would count too much."""

_FACTOR = 1.5  # times the median
_SHARE = 0.05  # of the step that is lost by it, at least; the rest is no reason to look for another machine


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that others wait for: the `seconds` of a step that it is busy itself, and how many `times` the median of
    its peers that is."""

    rank: int
    seconds: Seconds
    times: float


def slow_ranks(busy: Sequence[Seconds], step: Seconds, plan: Plan) -> tuple[SlowRank, ...]:
    """Those that are busy longer than their peers by more than half, and by more than a twentieth of the step. `busy`
    are the seconds of every rank outside of waiting, `step` those of the whole step."""
    found = []
    for rank, own in enumerate(busy):
        usual = statistics.median_low(_peers(busy, rank, plan))
        if own > _FACTOR * usual > 0 and own - usual > _SHARE * step:
            found.append(SlowRank(rank=rank, seconds=own, times=own / usual))
    return tuple(found)


def _peers(busy: Sequence[Seconds], rank: int, plan: Plan) -> list[Seconds]:
    """What a rank would take at the pace of each of its peers, itself among them."""
    size = plan.mesh.size
    if size > 1:
        stage = rank // size
        return list(busy[stage * size : (stage + 1) * size])
    parts, count = plan.prediction.stages, plan.training.micro_batches
    work = [count * part.micro_batch_seconds + part.once_seconds for part in parts]
    if len(work) != len(busy) or not all(seconds > 0 for seconds in work):  # an old file: nobody knows
        return [busy[rank]]
    return [seconds / part * work[rank] for seconds, part in zip(busy, work, strict=True)]
