"""Exact dynamic programming by variable elimination, with an exact memory limit.

    a ── b ── c ── d        1. Eliminate without the limit (elimination/messages.py). If the choice fits, it is optimal.
         │         │        2. Else find the smallest peak (elimination/peak.py). If that does not fit, nothing does.
         e ──── f ─┘        3. Else search as follows.

The peak is a sum (memory) plus a maximum (transient). For an interval [w, W] of the transient there is a relaxation
with sums alone:

    candidates with transient ≤ W,    memory ≤ limit - w

Its Lagrangian (elimination/multiplier.py) gives a bound and a price of bytes. Min-marginals exclude candidates
(potential.py). Elimination with Pareto fronts (fronts.py) solves what is left. If the relaxed choice has transient t
and fits, the interval is done. If not, it is split at s ≤ t into [w, s) and [s, W]: the first excludes the choice by
its transient, the second by its memory. The interval with the least bound is next, until no bound is below the best
choice that fits.

Complexity: n K^(width + 1) cells per elimination, and some tens of eliminations with a limit. Fronts are exponential in
the worst case; `front_limit` turns that case into a reported gap. Bertele and Brioschi 1972; Dechter 1999; Geoffrion
1974. Not good for graphs of large width, which it refuses: use another solver there.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.strategy_search.solvers.elimination.fronts import search_fronts
from planner.strategy_search.solvers.elimination.messages import backtrack, eliminate, optimum
from planner.strategy_search.solvers.elimination.multiplier import Relaxation, relax
from planner.strategy_search.solvers.elimination.order import WIDEST, Schedule
from planner.strategy_search.solvers.elimination.peak import least_peak
from planner.strategy_search.solvers.elimination.potential import Limits, fix, narrow
from planner.strategy_search.solvers.elimination.tables import Tables, schedule_of, time_tables
from planner.strategy_search.solvers.problem import OPTIMALITY_TOLERANCE, Evaluation, Problem, Solution, Status

# Entries per front in the first try; each later try has this factor more, up to the limit.
FIRST_WIDTH = 300
WIDTH_GROWTH = 10


def solve(
    problem: Problem,
    *,
    upper_bound: float | None = None,
    known: Sequence[int] | None = None,
    relative_gap: float = 0.0,
    front_limit: int = 100_000,
    table_limit: int = 2**28,
    cell_limit: float = math.inf,
) -> Solution:
    """The fastest choice that fits.

    Args:
        problem: the problem to solve.
        upper_bound: only choices faster than this are of interest; the status is "cutoff" if there are none.
        known: a choice to begin with; if it fits, slower choices are not examined.
        relative_gap: stop once the choice is proved to be within this of the best; the status is then "feasible".
        front_limit: the most entries of a Pareto front. If it is reached, the status may be "feasible", with a gap.
        table_limit: refuse problems whose largest clique table has more cells.
        cell_limit: refuse problems whose clique tables have more cells together.

    Raises:
        ValueError: the elimination would need a table larger than `table_limit`, more cells than `cell_limit` together,
            or a table with more axes than possible.
    """
    if front_limit < 1 or relative_gap < 0:
        raise ValueError(f"front_limit={front_limit} must be at least 1, relative_gap={relative_gap} at least 0")
    plan = _schedule(problem, table_limit, cell_limit)
    ceiling = math.inf if upper_bound is None else upper_bound
    messages = eliminate(plan, time_tables(problem, plan))
    if optimum(messages) == math.inf:
        return Solution(status="infeasible", bound=math.inf, least_memory=math.inf)
    choice = tuple(backtrack(plan, messages))
    evaluation = problem.evaluate(choice)
    if evaluation.time >= ceiling:
        return Solution(status="cutoff", bound=evaluation.time)
    if evaluation.feasible:
        return Solution(status="optimal", choice=choice, evaluation=evaluation, bound=evaluation.time)
    tables = Tables.of(problem, plan)
    least = least_peak(tables, enough=problem.capacity)
    steps = ("peak_steps", float(least.steps))
    if least.choice is None or least.peak > problem.capacity:
        return Solution(status="infeasible", bound=math.inf, least_memory=least.peak, statistics=(steps,))
    search = _Search(problem, ceiling=ceiling, relative_gap=relative_gap, front_limit=front_limit)
    for begun in (tables.original(least.choice), known):
        if begun is not None:
            search.offer(tuple(begun))
    search.run(tables, memory_floor=least.memory_floor)
    return search.solution(floor=evaluation.time, steps=steps)


def lower_bound(problem: Problem, *, table_limit: int = 2**28, cell_limit: float = math.inf) -> float:
    """A lower bound on the time of any choice that fits: the optimum without the limit, or the Lagrangian bound if that
    choice does not fit.

    Infinite if the relaxation proves that nothing fits. Much cheaper than `solve`, but only `solve` is exact.
    """
    plan = _schedule(problem, table_limit, cell_limit)
    messages = eliminate(plan, time_tables(problem, plan))
    value = optimum(messages)
    if value == math.inf or problem.evaluate(backtrack(plan, messages)).feasible:
        return value
    tables = Tables.of(problem, plan)
    smallest = max(values.min().item() for values in tables.transient)
    return max(value, relax(tables, problem.capacity - smallest - tables.base).bound)


def _schedule(problem: Problem, table_limit: int, cell_limit: float = math.inf) -> Schedule:
    plan = schedule_of(problem)
    if not plan.exact:
        raise ValueError(
            f"eliminating {len(problem.variables)} variables joins more than {WIDEST} of them that have several "
            "candidates each: the graph is too wide for dynamic programming, use another solver"
        )
    if plan.largest_table > table_limit:
        raise ValueError(
            f"eliminating {len(problem.variables)} variables needs a table of {plan.largest_table:.3g} cells, over "
            f"table_limit={table_limit}: the graph is too wide for dynamic programming, use another solver"
        )
    if plan.cells > cell_limit:
        raise ValueError(
            f"eliminating {len(problem.variables)} variables needs tables of {plan.cells:.3g} cells, over"
            f" cell_limit={cell_limit:.3g}: the graph is too wide for dynamic programming, use another solver"
        )
    return plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Interval:
    """Candidates with transient in [thresholds[low], thresholds[high]], and the relaxation that bounds them."""

    low: int
    high: int
    tables: Tables
    relaxation: Relaxation


class _Search:
    """Best-first branching on intervals of the transient, with the best choice so far."""

    def __init__(self, problem: Problem, *, ceiling: float, relative_gap: float, front_limit: int) -> None:
        self.problem, self.ceiling, self.front_limit = problem, ceiling, front_limit
        self.tolerance = max(relative_gap, OPTIMALITY_TOLERANCE)
        self.best: tuple[tuple[int, ...], Evaluation] | None = None
        self.open: list[tuple[float, int, _Interval]] = []
        self.thresholds = np.zeros(0)
        self.unresolved = math.inf
        self.intervals = self.relaxations = self.sweeps = self.largest_front = 0

    @property
    def cutoff(self) -> float:
        """Choices that take at least this long are not of interest."""
        if self.best is None or self.best[1].time >= self.ceiling:
            return self.ceiling
        time = self.best[1].time
        return time - 0.999 * self.tolerance * abs(time)  # so that the gap, when rounded, is within the tolerance

    def offer(self, choice: tuple[int, ...]) -> Evaluation:
        """Keep a choice if it fits and is the fastest so far; returns its cost."""
        evaluation = self.problem.evaluate(choice)
        if evaluation.feasible and (self.best is None or evaluation.time < self.best[1].time):
            self.best = choice, evaluation
        return evaluation

    def run(self, tables: Tables, *, memory_floor: float) -> None:
        """Branch until no open interval can contain a better choice."""
        self.thresholds = np.unique(np.concatenate(tables.transient))
        low = np.searchsorted(self.thresholds, max(values.min() for values in tables.transient))
        high = np.searchsorted(self.thresholds, self.problem.capacity - memory_floor, side="right") - 1
        self.push(tables, int(low), int(high), start=0.0, floor=-math.inf)
        while self.open and self.open[0][0] < self.cutoff:
            self.resolve(heapq.heappop(self.open)[2])

    def push(self, tables: Tables, low: int, high: int, *, start: float, floor: float) -> None:
        """Bound an interval, and open it if it may contain a better choice."""
        if low > high:
            return
        keep = [values <= self.thresholds[high] for values in tables.transient]
        if not all(mask.any() for mask in keep):
            return
        tables = tables.restrict(keep)
        budget = self.budget(tables, low)
        relaxation = relax(tables, budget, cutoff=self.cutoff, start=start)
        self.relaxations += relaxation.steps
        if relaxation.inside is not None:
            self.offer(tables.original(relaxation.inside))
        bound = max(floor, relaxation.bound)
        if bound == math.inf:
            return
        self.intervals += 1
        interval = _Interval(low=low, high=high, tables=tables, relaxation=relaxation)
        heapq.heappush(self.open, (bound, self.intervals, interval))

    def budget(self, tables: Tables, low: int) -> float:
        """The memory that remains beside the least transient of an interval, counted like the tables."""
        return self.problem.capacity - float(self.thresholds[low]) - tables.base

    def resolve(self, interval: _Interval) -> None:
        """Solve an interval, or split it if its relaxed choice does not fit."""
        relaxation, bound, width = interval.relaxation, interval.relaxation.bound, FIRST_WIDTH
        assert relaxation.inside is not None, "an open interval has a choice within its budget"
        limits = Limits(multiplier=relaxation.multiplier, budget=self.budget(interval.tables, interval.low))
        tables = narrow(interval.tables, limits, self.cutoff)
        relaxed = self.offer(interval.tables.original(relaxation.inside))
        while tables is not None and bound < self.cutoff:
            if not relaxed.feasible:
                self.split(interval, tables, relaxed, bound)
                return
            fixed = fix(tables, limits, self.cutoff)
            if fixed is None:
                return
            tables, width = fixed.tables, min(width, self.front_limit)
            found = search_fronts(fixed, cutoff=self.cutoff, width=width)
            self.sweeps += 1
            self.largest_front = max(self.largest_front, found.largest)
            fastest = math.inf
            if found.choice is not None:
                relaxed = self.offer(tables.original(found.choice))
                fastest = relaxed.time
            bound = max(bound, min(found.bound, fastest))
            if relaxed.feasible and bound < self.cutoff and width == self.front_limit:
                self.unresolved = min(self.unresolved, bound)
                return
            width *= WIDTH_GROWTH

    def split(self, interval: _Interval, tables: Tables, relaxed: Evaluation, bound: float) -> None:
        """Open two parts of an interval, neither of which allows this choice, which does not fit.

        The choice is excluded above any threshold that leaves less than its memory, and below any threshold up to its
        transient.
        """
        first = int(np.searchsorted(self.thresholds, self.problem.capacity - relaxed.memory, side="right"))
        last = int(np.searchsorted(self.thresholds, relaxed.transient))
        middle = (first + 3 * last) // 4  # better on benchmarks than either end or the middle
        if not interval.low < middle <= last:  # it fits but for rounding, so no split excludes it
            self.unresolved = min(self.unresolved, bound)
            return
        start = interval.relaxation.multiplier
        self.push(tables, interval.low, middle - 1, start=start, floor=bound)
        self.push(tables, middle, interval.high, start=start, floor=bound)

    def solution(self, *, floor: float, steps: tuple[str, float]) -> Solution:
        """The result of the search; `floor` is a bound found before it."""
        bound = max(floor, min([self.cutoff, self.unresolved, *(entry[0] for entry in self.open)]))
        statistics = (
            steps,
            ("intervals", float(self.intervals)),
            ("relaxation_steps", float(self.relaxations)),
            ("sweeps", float(self.sweeps)),
            ("largest_front", float(self.largest_front)),
        )
        if self.best is None or self.best[1].time >= self.ceiling:
            status: Status = "cutoff" if bound >= self.ceiling else "unknown"
            return Solution(status=status, bound=bound, statistics=statistics)
        choice, evaluation = self.best
        time = evaluation.time
        status = "optimal" if bound >= time - OPTIMALITY_TOLERANCE * abs(time) else "feasible"
        return Solution(
            status=status, choice=choice, evaluation=evaluation, bound=min(bound, time), statistics=statistics
        )
