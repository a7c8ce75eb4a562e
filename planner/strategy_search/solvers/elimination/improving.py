"""Improves a choice one variable at a time, if a relaxed elimination has found it.

    repeat   for every variable, take the cheapest candidate given the current candidates of its neighbours
    until    nothing changes, at most `_SWEEPS` times

Iterated conditional modes (Besag, On the Statistical Analysis of Dirty Pictures, 1986): never worse, seldom optimal.
"""

import itertools

import numpy as np

from planner.limits import check
from planner.strategy_search.solvers.elimination.order import Schedule
from planner.strategy_search.solvers.problem import Array

_SWEEPS = 8


def improved(
    schedule: Schedule, tables: list[Array], choice: list[int], rest: int, *, place: int | None = None
) -> list[int]:
    """A choice that costs at most as much; the variables of the last `rest` buckets do not change.

    `tables` are those of the variables, then of the pairs; more may follow. `place` is the number of the problem, if
    there are several.
    """
    found, near = list(choice), schedule.neighbours
    fixed = {bucket.variable for bucket in schedule.buckets[len(schedule.buckets) - rest :]}
    waiting = [variable not in fixed for variable in range(schedule.variables)]
    for _ in range(_SWEEPS):
        if not any(waiting):
            break
        for variable in itertools.compress(range(schedule.variables), waiting):
            check()
            waiting[variable] = False
            costs = tables[variable] if place is None else tables[variable][place]
            for other, pair, first in near[variable]:
                table = tables[pair] if place is None else tables[pair][place]
                costs = costs + (table[:, found[other]] if first else table[found[other]])
            best = int(np.argmin(costs))
            if costs[best] < costs[found[variable]]:
                found[variable] = best
                for other, *_ in near[variable]:
                    waiting[other] = other not in fixed
    return found
