"""The choice with the smallest peak, memory + transient, whatever its time. It decides whether a problem is feasible.

    transient ≤ W_1: memory M_1, but its own transient is W(x_1) ─▶ peak M_1 + W(x_1)
    transient < W(x_1): memory M_2 ≥ M_1, transient W(x_2)       ─▶ peak M_2 + W(x_2)
    ...

x_i has the least memory of all choices below the threshold W_i, so no choice between W(x_i) and W_i has a smaller peak:
the next threshold is W(x_i). Every choice below W_i has a peak of at least M_i + the smallest possible transient, which
ends the descent. Exact; each step is one elimination (see messages.py), and there are at most as many steps as distinct
transients. A lower threshold excludes candidates of a few operators; messages that do not depend on these are reused.
"""

import math
from dataclasses import dataclass

import numpy as np

from planner.strategy_search.solvers.elimination.messages import backtrack, eliminate_together, optimum
from planner.strategy_search.solvers.elimination.tables import Tables
from planner.strategy_search.solvers.problem import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastPeak:
    """A choice and its peak; the least memory of any choice; the number of steps. Without a choice nothing is
    allowed."""

    choice: list[int] | None
    peak: float
    memory_floor: float
    steps: int


def least_peak(tables: Tables, *, enough: float) -> LeastPeak:
    """Descend to the smallest peak, or to the first that is at most `enough`."""
    memory = [table[None] for table in tables.allowed_memory()]
    together: list[Array] | None = None
    smallest = max(values.min().item() for values in tables.transient)
    threshold, best, choice, floor, steps = math.inf, math.inf, None, math.inf, 0
    while best > enough:
        for place, values in enumerate(tables.transient):
            if (np.isfinite(memory[place]) & (values >= threshold)).any():
                memory[place] = np.where(values < threshold, memory[place], math.inf)
        together = eliminate_together(tables.plan, memory, known=together)
        messages = [table[0] for table in together]
        steps += 1
        least = optimum(messages) + tables.base
        floor = min(floor, least)
        if least + smallest >= best or least == math.inf:
            break
        candidate = backtrack(tables.plan, messages)
        threshold = tables.largest_transient(candidate)
        if least + threshold < best:
            best, choice = least + threshold, candidate
    return LeastPeak(choice=choice, peak=best, memory_floor=floor, steps=steps)
