"""Lagrangian relaxation of the memory budget: a price on bytes turns the limit into plain sums again.

    L(λ) = min over choices x of  time(x) + λ (memory(x) - budget)        a lower bound for every λ ≥ 0, concave in λ

    bound
      │        outside ╲ ╱ inside      Each x is a line in λ: rising if it is over the budget ("outside"), falling if
      │             ╱‾‾╳‾‾╲            under it ("inside"). Where an outside and an inside line cross, eliminate once
      │          ╱╱   ╱ ╲  ╲           with that λ. A line below the crossing replaces the one on its side; none: done.
      └─────────────λ──────────

The maximum of L is the value of the linear program over the convex hull (Geoffrion 1974). The rest, up to the best
choice, is the duality gap, which fronts.py closes. Each step costs one elimination. The lines are corners of the lower
hull of (memory, time), and few are visited. Not good alone: the choices found are on the hull, and the best one may not
be.
"""

import math
from dataclasses import dataclass

from planner.strategy_search.solvers.elimination.messages import backtrack, eliminate, optimum
from planner.strategy_search.solvers.elimination.tables import Tables

# Stop searching for the maximum of L where the crossing promises less than this, relative to the size of the terms.
PRECISION = 1e-9
MOST_STEPS = 100

# Factor between a first guess and the next one, when a line on the other side is needed.
STRIDE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A choice, its time and its memory without the base."""

    choice: list[int]
    time: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The bound, the multiplier that proves it, the best choice within the budget, and the number of eliminations.

    `inside` is None if the bound is infinite (nothing fits) or if the search stopped at the cutoff.
    """

    bound: float
    multiplier: float
    inside: list[int] | None
    steps: int


class _Dual:
    """Evaluates L, and keeps the best bound and the best line on each side."""

    def __init__(self, tables: Tables, budget: float) -> None:
        self.tables, self.budget = tables, budget
        self.bound, self.multiplier, self.steps = -math.inf, 0.0, 0
        self.outside: Line | None = None
        self.inside: Line | None = None

    def step(self, multiplier: float) -> float:
        """Eliminate at this multiplier and record the line found; returns min of time + multiplier * memory."""
        messages = eliminate(self.tables.plan, self.tables.weighted(multiplier))
        self.steps += 1
        value = optimum(messages)
        if value == math.inf:
            self.bound = math.inf
            return value
        if value - multiplier * self.budget > self.bound:
            self.bound, self.multiplier = value - multiplier * self.budget, multiplier
        self._sort_in(backtrack(self.tables.plan, messages))
        return value

    def least_memory(self) -> None:
        """Find any line inside, or prove that no line is inside."""
        messages = eliminate(self.tables.plan, self.tables.allowed_memory())
        self.steps += 1
        if optimum(messages) > self.budget:
            self.bound = math.inf
        else:
            self._sort_in(backtrack(self.tables.plan, messages))

    def _sort_in(self, choice: list[int]) -> None:
        time, memory = self.tables.cost(choice)
        line = Line(choice=choice, time=time, memory=memory)
        if memory > self.budget:
            self.outside = line
        elif self.inside is None or time <= self.inside.time:
            self.inside = line

    def result(self) -> Relaxation:
        choice = self.inside.choice if self.inside is not None and self.bound < math.inf else None
        return Relaxation(bound=self.bound, multiplier=self.multiplier, inside=choice, steps=self.steps)


def relax(tables: Tables, budget: float, *, cutoff: float = math.inf, start: float = 0.0) -> Relaxation:
    """Maximise L for a budget (without `tables.base`) from a first guess of λ; stop once the bound is at the cutoff."""
    dual = _Dual(tables, budget)
    dual.step(start)
    if start and dual.bound < cutoff:
        dual.step(start / STRIDE if dual.outside is None else start * STRIDE)
    if dual.outside is None and start and dual.bound < math.inf:
        dual.step(0.0)
    if dual.outside is None or dual.bound >= cutoff:
        return dual.result()
    if dual.inside is None:
        dual.least_memory()
    while dual.bound < cutoff and dual.steps < MOST_STEPS:
        assert dual.inside is not None
        assert dual.outside is not None
        inside, outside = dual.inside, dual.outside
        multiplier = (inside.time - outside.time) / (outside.memory - inside.memory)
        if multiplier <= 0:  # the inside line is also the faster one, so the bound meets it
            break
        crossing = outside.time + multiplier * outside.memory
        scale = abs(outside.time) + multiplier * abs(outside.memory)
        if dual.step(multiplier) >= crossing - PRECISION * scale:
            break
    return dual.result()
