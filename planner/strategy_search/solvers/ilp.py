"""The same problem as a mixed-integer program, solved by HiGHS or SCIP through OR-Tools MathOpt.

    a ── b          x[a, i] = 1      a takes candidate i             (_add_candidates)
                    y[a, i, b, j]    a takes i and b takes j         (_add_pairs)
                    τ                the largest transient           (_add_transient)

    minimise    Σ time x + Σ time y                                  (_total)
    subject to  Σ_i x[a, i] = 1                                      (_add_candidates)
                Σ_j y[a, i, b, j] = x[a, i],  and likewise for b     (_add_pairs: the local polytope)
                τ ≥ Σ_i transient[a, i] x[a, i]  for every a         (_add_transient)
                Σ memory x + Σ memory y + τ ≤ capacity               (_build)

x is binary; y and τ are continuous, because integral x determines y. Forbidden entries have no variable. Neither do
entries that alone exceed what a limit leaves when everything else is at its least (_leave_out). If nothing fits, the
same program with the peak as its objective gives the least memory.

The engine works with tolerances; its answers are corrected to hold without them: - Every table is shifted to a least
entry of 0, and scaled so that the difference between the ceiling and the sum of the
  least entries is PER_PART for each table. The tolerance is then far below OPTIMALITY_TOLERANCE.
- The bound is lowered by everything that tolerances can hide (_proved). It is never trusted above the value from which
  the engine prunes. If the gap stays open because the scale was too coarse, the best choice gives a finer one.
- Only `problem.evaluate` prices a choice. A choice that exceeds the limit by a rounding is banned by a constraint of
its
  own (_ban), which no other choice violates, and the program is solved again.
The engine is trusted to prune correctly within its tolerances. The dynamic programming shares no code with this file,
so where both agree, two independent proofs agree.

Complexity: exponential in the worst case. Σ K columns for the variables, Σ K² for the edges. Without a limit the
relaxation is often integral at once on chains with skips. Wainwright and Jordan 2008, section 8 (the local polytope);
Huangfu and Hall 2018 (HiGHS); Zheng et al. 2022 (Alpa), section 4.2, has such a program for sharding. Not good for
large problems or tight limits, where a gap remains (tests/benchmarks/bench_solvers.py), or for an inner loop that must
be fast: `upper_bound` leaves candidates out, but does not stop the engine early.

Everything is in one file, so that the program stands beside the corrections of its answers.
"""

import dataclasses
import datetime
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from planner.limits import room
from planner.strategy_search.solvers.problem import OPTIMALITY_TOLERANCE, Array, Evaluation, Problem, Solution, Status

Engine = Literal["highs", "scip"]
Goal = Literal["time", "peak"]

# Tolerances for the engine, in scaled units: violated rows, fractional columns, reduced costs.
TOLERANCE = 1e-9

# Sums over all tables are scaled to this much per table, so that tolerances are about 1e-11 of them.
PER_PART = 100.0

# Relative difference of sums of the same doubles in different orders: less than this.
ROUNDING = 1e-12

# The most programs solved for one answer: with a new scale, or with a banned choice.
ROUNDS = 20

# Bytes of a column of a pair, in the model and in the engine: measured with HiGHS on 69,000 columns.
COLUMN_BYTES = 2200


class _LateError(Exception):
    """The time was over before the program was ready for the engine."""


def solve(
    problem: Problem,
    *,
    upper_bound: float | None = None,
    time_limit: float | None = None,
    relative_gap: float = 0.0,
    engine: Engine = "highs",
) -> Solution:
    """The fastest choice that fits, and a bound on all others.

    Args:
        problem: the problem to solve.
        upper_bound: only choices faster than this (within OPTIMALITY_TOLERANCE) are of interest; the status is "cutoff"
            if there are none, even if nothing fits at all.
        time_limit: seconds of wall time, which the engine may exceed a little. It covers the making of programs, which
            take about 25 microseconds for each allowed pair of candidates. The status is then "feasible" with a
            gap, or "unknown" with a bound. An infinite bound then says that nothing fits, but that the least memory was
            not found in time.
        relative_gap: stop once the choice is proved to be within this of the best; the status is then "feasible".
        engine: "highs" or "scip".

    Raises:
        ValueError: an option makes no sense.
        LimitError: the program does not fit into the memory of the planner.
    """
    if relative_gap < 0 or (time_limit is not None and not time_limit > 0):
        raise ValueError(f"relative_gap={relative_gap} must be at least 0, time_limit={time_limit} more than 0")
    if engine not in ("highs", "scip"):
        raise ValueError(f"engine={engine!r} must be 'highs' or 'scip'")
    ceiling = math.inf if upper_bound is None else upper_bound
    deadline = time.monotonic() + (math.inf if time_limit is None else time_limit)
    search = _Search(problem, goal="time", engine=engine, gap=relative_gap, deadline=deadline)
    search.offer(_settle(problem, [int(variable.time.argmin()) for variable in problem.variables], deadline))
    search.run(ceiling)
    if search.best is None and search.bound == math.inf:
        unlimited = dataclasses.replace(problem, memory_limit=math.inf)
        lean = _Search(unlimited, goal="peak", engine=engine, gap=0.0, deadline=deadline)
        lean.run(math.inf)
        search.rounds, search.nodes = search.rounds + lean.rounds, search.nodes + lean.nodes
        if lean.best is None or not problem.evaluate(lean.best[0]).feasible:
            return _nothing_fits(search, lean)
        search.offer(lean.best[0])  # the first proof was wrong by a rounding
        search.bound = search.floor
    return _solution(search, ceiling)


def _nothing_fits(search: "_Search", lean: "_Search") -> Solution:
    """The solution if nothing fits: with the least memory, if that was found."""
    statistics = search.statistics
    if lean.best is None and lean.bound == math.inf:
        return Solution(status="infeasible", bound=math.inf, least_memory=math.inf, statistics=statistics)
    if lean.best is not None and lean.gap <= OPTIMALITY_TOLERANCE:
        peak = lean.best[1].peak
        return Solution(status="infeasible", bound=math.inf, least_memory=peak, statistics=statistics)
    return Solution(status="unknown", bound=math.inf, statistics=statistics)


def _solution(search: "_Search", ceiling: float) -> Solution:
    """The result of a search for the fastest choice."""
    if search.best is None or search.best[1].time >= ceiling:
        proved = search.bound >= ceiling - OPTIMALITY_TOLERANCE * abs(ceiling)
        status: Status = "cutoff" if proved else "unknown"
        return Solution(status=status, bound=search.bound, statistics=search.statistics)
    choice, evaluation = search.best
    status = "optimal" if search.gap <= OPTIMALITY_TOLERANCE else "feasible"
    bound = min(search.bound, evaluation.time)
    return Solution(status=status, choice=choice, evaluation=evaluation, bound=bound, statistics=search.statistics)


class _Search:
    """Programs for one goal; each uses what the earlier ones found."""

    def __init__(self, problem: Problem, *, goal: Goal, engine: Engine, gap: float, deadline: float) -> None:
        self.problem, self.goal, self.engine, self.deadline = problem, goal, engine, deadline
        self.wanted = max(gap, OPTIMALITY_TOLERANCE)
        self.best: tuple[tuple[int, ...], Evaluation] | None = None
        self.bound = self.floor = _floor(problem, goal)
        self.banned: list[tuple[int, ...]] = []
        self.rounds = self.nodes = 0

    @property
    def value(self) -> float:
        """The cost of the best choice, in the unit of the goal."""
        if self.best is None:
            return math.inf
        return self.best[1].time if self.goal == "time" else self.best[1].peak

    @property
    def gap(self) -> float:
        """How far the best choice may be above the least value, relative to it."""
        if self.value <= self.bound:
            return 0.0
        return (self.value - self.bound) / abs(self.value) if 0 < abs(self.value) < math.inf else math.inf

    @property
    def statistics(self) -> tuple[tuple[str, float], ...]:
        return (("programs", float(self.rounds)), ("nodes", float(self.nodes)))

    def offer(self, choice: Sequence[int]) -> bool:
        """Keep a choice if it fits and is the best so far; returns whether it fits."""
        evaluation = self.problem.evaluate(choice)
        value = evaluation.time if self.goal == "time" else evaluation.peak
        if evaluation.feasible and value < self.value:
            self.best = tuple(choice), evaluation
        return evaluation.feasible

    def run(self, ceiling: float) -> None:
        """Solve programs until the gap is closed, nothing below the ceiling is left, or the time is over."""
        unit = math.inf
        while self.gap > self.wanted and self.bound < ceiling and self.rounds < ROUNDS:
            top = min(ceiling, self.value)
            try:
                program = _build(self.problem, self.goal, top, self.banned, self.deadline)
            except _LateError:
                return
            if program is None:
                self.bound = max(self.bound, top)
                return
            if self.best is not None and unit < 2 * program.unit:  # a finer scale would not help
                return
            unit = program.unit if self.best is not None else math.inf
            answer = _run(program, self.engine, self.wanted - 0.75 * OPTIMALITY_TOLERANCE, self.deadline)
            self.rounds, self.nodes = self.rounds + 1, self.nodes + answer.nodes
            if answer.empty:
                self.bound = max(self.bound, top) if self.best is None else self.bound
                return
            self.bound = max(self.bound, min(answer.bound, top))  # choices above the ceiling are left out
            if answer.choice is None:
                return
            if not self.offer(answer.choice):
                self.banned.append(answer.choice)
                unit = math.inf
            elif self.goal == "time":
                self.offer(_settle(self.problem, answer.choice, self.deadline))
            if not answer.finished:
                return


def _floor(problem: Problem, goal: Goal) -> float:
    """The sum of the least entries: a lower bound."""
    tables = (*problem.variables, *problem.edges)
    least = [getattr(table, "time" if goal == "time" else "memory").min(initial=math.inf) for table in tables]
    transient = max(variable.transient.min().item() for variable in problem.variables)
    return math.fsum([*least, 0.0 if goal == "time" else transient]) if max(least) < math.inf else math.inf


def _settle(problem: Problem, start: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Move each variable to its fastest candidate, given all others, that fits; of equals to the first.

    So ties go to the first candidate, and a choice that the engine had at its time limit becomes a local optimum.
    """
    choice, best = list(start), problem.evaluate(start)
    touching: list[list[tuple[int, Array]]] = [[] for _ in problem.variables]
    for edge in problem.edges:
        touching[edge.first].append((edge.second, edge.time))
        touching[edge.second].append((edge.first, edge.time.T))
    moved = True
    while moved:
        moved = False
        for position, variable in enumerate(problem.variables):
            if time.monotonic() > deadline:
                return tuple(choice)
            times = variable.time + sum(table[:, choice[other]] for other, table in touching[position])
            now = choice[position]
            for candidate in np.argsort(times, kind="stable").tolist():
                if candidate == now or times[candidate] == math.inf:
                    break
                choice[position] = candidate
                trial = problem.evaluate(choice)
                better = (trial.time, candidate) < (best.time, now)
                if better and (trial.feasible or not best.feasible):
                    best, moved = trial, True
                    break
                choice[position] = now
    return tuple(choice)


@dataclass(slots=True, kw_only=True, eq=False)
class _Part:
    """A variable, or all edges between two variables: its tables, and which entries the program has."""

    ends: tuple[int, ...]
    time: Array
    memory: Array
    transient: Array
    allowed: NDArray[np.bool_]

    def least(self, table: Array) -> float:
        """The least allowed entry of a table; infinite if none is allowed."""
        return float(table[self.allowed].min(initial=math.inf))


def _parts(problem: Problem) -> list[_Part]:
    """The variables by position, then the edges, with parallel ones added up; forbidden entries are not allowed."""
    parts = [
        _Part(ends=(v,), time=x.time, memory=x.memory, transient=x.transient, allowed=x.time < math.inf)
        for v, x in enumerate(problem.variables)
    ]
    pairs: dict[tuple[int, int], tuple[Array, Array]] = {}
    for edge in problem.edges:
        ends = edge.first, edge.second
        time, memory = pairs.get(ends, (0.0, 0.0))
        pairs[ends] = time + edge.time, memory + edge.memory
    for ends, (time, memory) in pairs.items():
        parts.append(_Part(ends=ends, time=time, memory=memory, transient=np.zeros(()), allowed=time < math.inf))
    return parts


def _spread(parts: list[_Part]) -> None:
    """Disallow pairs with a candidate that is not allowed, and candidates without an allowed pair."""
    for part in [part for part in parts if len(part.ends) == 2]:
        first, second = (parts[end] for end in part.ends)
        part.allowed = part.allowed & first.allowed[:, None] & second.allowed
        first.allowed, second.allowed = np.any(part.allowed, axis=1), np.any(part.allowed, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How a sum over tables enters the program: divided by `unit`. `base` is the least value of the sum."""

    base: float
    unit: float


def _leave_out(parts: list[_Part], quantity: Literal["time", "memory"], ceiling: float) -> _Scale | None:
    """Disallow entries that alone lift a sum over its ceiling, and scale the rest; None if nothing remains.

    For memory the transient counts: with all candidates but one at their least, the transient is still at least the
    largest of the least transients.
    """
    tables: list[Array] = [getattr(part, quantity) for part in parts]
    least = [part.least(table) for part, table in zip(parts, tables, strict=True)]
    if max(least) == math.inf:
        return None
    moments = [part.least(part.transient) for part in parts if len(part.ends) == 1]
    floor = max(moments) if quantity == "memory" else 0.0
    base = math.fsum([*least, floor])
    slack = ROUNDING * math.fsum([abs(value) for value in (*least, floor, ceiling) if value < math.inf])
    room, worst = ceiling - base + slack, 0.0
    if room < 0:
        return None
    for part, table, lowest in zip(parts, tables, least, strict=True):
        excess = table - lowest
        if quantity == "memory" and len(part.ends) == 1:
            excess = excess + np.maximum(part.transient - floor, 0.0)
        part.allowed = part.allowed & (excess <= room)
        worst += float(excess[part.allowed].max(initial=0.0))
    unit = (min(room, worst) or abs(base) or 1.0) / (PER_PART * len(parts))
    return _Scale(base=base, unit=max(unit, sys.float_info.min))


@dataclass(slots=True, kw_only=True, eq=False)
class _Program:
    """A MathOpt model, the columns of each part (an array of variables, None for entries without one), and its units;
    and the reading of the clock until which it may be made."""

    model: Any
    deadline: float
    columns: list[NDArray[np.object_]] = field(default_factory=list)
    unit: float
    margin: float

    def look(self) -> None:
        """Raise _LateError if the time is over."""
        if time.monotonic() > self.deadline:
            raise _LateError


def _build(
    problem: Problem, goal: Goal, ceiling: float, banned: Sequence[tuple[int, ...]], deadline: float
) -> _Program | None:
    """The program of all choices within the limit whose value is at most `ceiling`, and possibly more; None if there
    are none. Raises _LateError at the deadline."""
    from ortools.math_opt.python import mathopt

    parts = _parts(problem)
    _spread(parts)
    limit = problem.capacity if goal == "time" else ceiling
    seconds = _leave_out(parts, "time", ceiling if goal == "time" else math.inf)
    _spread(parts)
    octets = _leave_out(parts, "memory", limit)
    _spread(parts)
    if seconds is None or octets is None or not all(part.allowed.any() for part in parts):
        return None
    room(COLUMN_BYTES * sum(int(part.allowed.sum()) for part in parts), "an integer program")
    model = mathopt.Model()
    scale = seconds if goal == "time" else octets
    program = _Program(model=model, deadline=deadline, unit=scale.unit, margin=TOLERANCE * (2 * len(parts) + PER_PART))
    _add_candidates(program, parts)
    _add_pairs(program, parts)
    _ban(program, banned)
    if goal == "time":
        constant, terms = _total(program, parts, "time", seconds)
    if goal == "peak" or limit < math.inf:
        base, peak = _total(program, parts, "memory", octets)
        floor, transient = _add_transient(program, parts, octets)
        base, peak = base + floor, [*peak, *transient]
        if goal == "peak":
            constant, terms = base, peak
        else:
            slack = ROUNDING * (abs(limit) + abs(octets.base)) / octets.unit
            model.add_linear_constraint(mathopt.fast_sum(peak) <= limit / octets.unit - base + slack + TOLERANCE)
    model.minimize(mathopt.fast_sum(terms) + constant)
    return program


def _add_candidates(program: _Program, parts: list[_Part]) -> None:
    """A binary column for every allowed candidate; each variable takes one."""
    from ortools.math_opt.python import mathopt

    for part in [part for part in parts if len(part.ends) == 1]:
        columns = np.full(part.time.shape, None, dtype=object)
        for candidate in np.flatnonzero(part.allowed).tolist():
            columns[candidate] = program.model.add_binary_variable()
        program.columns.append(columns)
        program.model.add_linear_constraint(mathopt.fast_sum(columns[part.allowed].tolist()) == 1)


def _add_pairs(program: _Program, parts: list[_Part]) -> None:
    """A column for every allowed pair of an edge; those of a candidate sum up to the candidate's column."""
    from ortools.math_opt.python import mathopt

    for part in [part for part in parts if len(part.ends) == 2]:
        columns = np.full(part.time.shape, None, dtype=object)
        for cell in zip(*np.nonzero(part.allowed), strict=True):
            columns[cell] = program.model.add_variable(lb=0.0, ub=1.0)
        program.columns.append(columns)
        program.look()
        for end, grid, mask in zip(part.ends, (columns, columns.T), (part.allowed, part.allowed.T), strict=True):
            for candidate in np.flatnonzero(parts[end].allowed).tolist():
                row = grid[candidate][mask[candidate]].tolist()
                program.model.add_linear_constraint(mathopt.fast_sum(row) == program.columns[end][candidate])


def _ban(program: _Program, banned: Sequence[tuple[int, ...]]) -> None:
    """At least one variable differs from each of these choices."""
    from ortools.math_opt.python import mathopt

    for choice in banned:
        row = [columns[candidate] for columns, candidate in zip(program.columns, choice, strict=False)]
        if all(column is not None for column in row):
            program.model.add_linear_constraint(mathopt.fast_sum(row) <= len(row) - 1)


def _total(
    program: _Program, parts: list[_Part], quantity: Literal["time", "memory"], scale: _Scale
) -> tuple[float, list[Any]]:
    """The sum of a table over all parts in scaled units: its constant and its terms."""
    constants, terms = [], []
    for part, columns in zip(parts, program.columns, strict=True):
        program.look()
        table: Array = getattr(part, quantity)
        least = part.least(table)
        constants.append(least)
        costly = part.allowed & (table > least)
        weights = ((table[costly] - least) / scale.unit).tolist()
        terms += [weight * column for weight, column in zip(weights, columns[costly], strict=True)]
    return math.fsum(constants) / scale.unit, terms


def _add_transient(program: _Program, parts: list[_Part], scale: _Scale) -> tuple[float, list[Any]]:
    """The largest transient in scaled units: a floor that every choice has, and a column for the excess over it."""
    from ortools.math_opt.python import mathopt

    nodes = [part for part in parts if len(part.ends) == 1]
    floor = max(part.least(part.transient) for part in nodes)
    span = max(float(part.transient[part.allowed].max()) for part in nodes) - floor
    if span <= 0:
        return floor / scale.unit, []
    excess = program.model.add_variable(lb=0.0, ub=PER_PART)
    for part, columns in zip(nodes, program.columns, strict=False):
        above = part.allowed & (part.transient > floor)
        if above.any():
            weights = ((part.transient[above] - floor) / span * PER_PART).tolist()
            terms = [weight * column for weight, column in zip(weights, columns[above], strict=True)]
            program.model.add_linear_constraint(mathopt.fast_sum(terms) <= excess)
    return floor / scale.unit, [span / PER_PART / scale.unit * excess]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The engine's answer to a program: `bound` is in the unit of the goal, and holds without tolerances."""

    choice: tuple[int, ...] | None = None
    bound: float = -math.inf
    empty: bool = False
    finished: bool = False
    nodes: int = 0


def _run(program: _Program, engine: Engine, gap: float, deadline: float) -> _Answer:
    """Let the engine solve a program. HiGHS refuses MathOpt's own options for threads and cutoffs."""
    from ortools.math_opt.python import mathopt

    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return _Answer()
    parameters = mathopt.SolveParameters(relative_gap_tolerance=gap, absolute_gap_tolerance=0.0)
    if seconds < math.inf:
        parameters.time_limit = datetime.timedelta(seconds=seconds)
    if engine == "highs":
        for name in ("mip_feasibility", "primal_feasibility", "dual_feasibility"):
            parameters.highs.double_options[f"{name}_tolerance"] = TOLERANCE
        result = mathopt.solve(program.model, mathopt.SolverType.HIGHS, params=parameters)
    else:
        for name in ("feastol", "dualfeastol"):
            parameters.gscip.real_params[f"numerics/{name}"] = TOLERANCE
        result = mathopt.solve(program.model, mathopt.SolverType.GSCIP, params=parameters)
    reason, kinds, nodes = result.termination.reason, mathopt.TerminationReason, result.solve_stats.node_count
    if reason in (kinds.INFEASIBLE, kinds.INFEASIBLE_OR_UNBOUNDED):  # it cannot be unbounded: every column is bounded
        return _Answer(empty=True, finished=True, nodes=nodes)
    trusted = reason in (kinds.OPTIMAL, kinds.FEASIBLE, kinds.NO_SOLUTION_FOUND)  # not after a numerical failure
    bound = result.dual_bound() if trusted else -math.inf
    if not result.has_primal_feasible_solution():
        return _Answer(bound=_proved(program, bound, math.inf, gap), nodes=nodes)
    values = result.variable_values()
    choice = tuple(
        max(range(columns.size), key=lambda k: -1.0 if columns[k] is None else values[columns[k]])
        for columns in program.columns
        if columns.ndim == 1
    )
    bound = _proved(program, bound, result.objective_value(), gap)
    return _Answer(choice=choice, bound=bound, finished=reason == kinds.OPTIMAL, nodes=nodes)


def _proved(program: _Program, bound: float, objective: float, gap: float) -> float:
    """A bound of the engine, corrected to hold without its tolerances, in the unit of the goal.

    A reduced cost may be wrong by the tolerance, and a weight of that size may be dropped. The columns of a part sum up
    to one; that of the transient is at most PER_PART. The engine prunes nodes that improve on the best objective by
    less than the gap or the tolerance.
    """
    if objective < math.inf:
        bound = min(bound, objective - max(gap * abs(objective), TOLERANCE))
    return program.unit * (bound - program.margin - ROUNDING * abs(bound)) if bound > -math.inf else -math.inf
