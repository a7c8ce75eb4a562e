"""A choice made better one variable at a time, where a relaxed elimination has found it.

    repeat   for every variable, the candidate that is cheapest beside those that its neighbours have now
    until    nothing changes, `_SWEEPS` times at most

Iterated conditional modes (Besag, On the Statistical Analysis of Dirty Pictures, 1986): never worse, seldom best.
"""

import numpy as np

from planner.limits import check
from planner.strategy_search.solvers.elimination.order import Schedule
from planner.strategy_search.solvers.problem import Array

_SWEEPS = 8


def improved(schedule: Schedule, tables: list[Array], choice: list[int], rest: int) -> list[int]:
    """A choice that costs as much or less; the variables of the last `rest` buckets stay as they are.

    `tables` are those of the variables, then of the pairs; more may follow.
    """
    found, count = list(choice), schedule.variables
    near: list[list[tuple[int, Array]]] = [[] for _ in range(count)]
    for (first, second), table in zip(schedule.pairs, tables[count:], strict=False):
        near[first].append((second, table.T))
        near[second].append((first, table))
    fixed = {bucket.variable for bucket in schedule.buckets[len(schedule.buckets) - rest :]}
    free = [variable for variable in range(count) if variable not in fixed]
    for _ in range(_SWEEPS):
        changed = False
        for variable in free:
            check()
            costs = tables[variable]
            for other, table in near[variable]:
                costs = costs + table[found[other]]
            best = int(np.argmin(costs))
            if costs[best] < costs[found[variable]]:
                found[variable], changed = best, True
        if not changed:
            break
    return found
