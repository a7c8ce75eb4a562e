"""Solvers on chains with skips, the shape of neural networks: medians of wall time, with and without a memory limit."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.strategy_search.solvers import SOLVERS, ilp
from planner.strategy_search.solvers.problem import Edge, Problem, Solution, Variable

RUNS = 5
PROGRAM_SECONDS = 20.0  # after which a program is stopped; then the gap is what counts
GIBIBYTE = 2.0**30
SKIP = 4  # every so many variables, an edge jumps as far

# Where the limit lies between the smallest possible peak (0) and that of the fastest choice (1).
TIGHTNESS = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many variables, how many candidates each; after how many variables the numbers repeat, 0 for never."""

    variables: int
    candidates: int
    period: int = 0


SHAPES = (
    Shape(variables=60, candidates=25),
    Shape(variables=60, candidates=25, period=12),
    Shape(variables=100, candidates=12),
    Shape(variables=100, candidates=12, period=10),
    Shape(variables=1000, candidates=12),
    Shape(variables=1000, candidates=12, period=10),
    Shape(variables=60, candidates=64),
)
PROGRAM_SHAPES = (Shape(variables=100, candidates=12), Shape(variables=300, candidates=12))


def chain_with_skips(shape: Shape, *, seed: int = 0, memory_limit: float = np.inf) -> Problem:
    """A random instance: memory falls where time rises, edges cost nothing on the diagonal, one leaf per four."""
    random = np.random.default_rng(seed)
    period = shape.period or shape.variables
    K = shape.candidates
    blocks = [(random.uniform(1e-4, 1e-3, K), random.uniform(0.5, 1.5, K)) for _ in range(period)]
    redistributions = [random.uniform(0.0, 5e-4, (K, K)) * (1 - np.eye(K)) for _ in range(2 * period)]
    variables, edges = [], []
    for position in range(shape.variables):
        times, shares = blocks[position % period]
        memory = np.round(GIBIBYTE * shares * times.min() / times)
        transient = np.round(GIBIBYTE * shares[::-1])
        variables.append(Variable(name=f"v{position}", time=times, memory=memory, transient=transient))
        hops = [(1, 0), (SKIP, period)] if position % SKIP == 0 else [(1, 0)]
        for hop, kind in hops:
            if position >= hop:
                table = redistributions[kind + position % period]
                memory = np.round(table / 5e-4 * GIBIBYTE / 20)
                edges.append(Edge(first=position - hop, second=position, time=table, memory=memory))
    return Problem(variables=tuple(variables), edges=tuple(edges), memory_limit=memory_limit)


def limits(problem: Problem) -> Sequence[float]:
    """Memory limits of the wanted tightness."""
    solve = SOLVERS["dynamic_programming"]
    free = solve(problem)
    none = solve(Problem(variables=problem.variables, edges=problem.edges, memory_limit=0.0))
    assert free.evaluation is not None
    assert none.least_memory is not None
    return [none.least_memory + share * (free.evaluation.peak - none.least_memory) for share in TIGHTNESS]


def median_time(work: Callable[[], Solution]) -> tuple[float, Solution]:
    """The median wall time of several runs, and what the last one returned; one run where it takes long."""
    samples = []
    for _ in range(RUNS):
        start = time.perf_counter()
        solution = work()
        samples.append(time.perf_counter() - start)
        if samples[-1] > 5.0:
            break
    return statistics.median(samples), solution


def report(shapes: Sequence[Shape], solve: Callable[[Problem], Solution]) -> None:
    """Print a line per instance: time, status, gap, and what the search did."""
    print(
        f"{'variables':>9} {'candidates':>10} {'repeats':>7} {'limit':>6} {'ms':>9}  {'status':<10} {'gap':>8}  search"
    )
    for shape in shapes:
        free = chain_with_skips(shape)
        for label, limit in [("none", np.inf), *zip(map(str, TIGHTNESS), limits(free), strict=True)]:
            problem = replace(free, memory_limit=limit)
            seconds, solution = median_time(lambda problem=problem: solve(problem))
            search = ", ".join(f"{name} {value:g}" for name, value in solution.statistics)
            shown = f"{shape.variables:>9} {shape.candidates:>10} {shape.period or '-':>7} {label:>6}"
            print(f"{shown} {1e3 * seconds:>9.2f}  {solution.status:<10} {solution.gap:>8.1e}  {search}", flush=True)


def main() -> None:
    """Print a table per solver."""
    print(f"dynamic_programming, median of {RUNS} runs")
    report(SHAPES, SOLVERS["dynamic_programming"])
    print(f"\nilp, stopped after {PROGRAM_SECONDS:g} s, median of {RUNS} runs, one where it takes longer than 5 s")
    report(PROGRAM_SHAPES, lambda problem: ilp.solve(problem, time_limit=PROGRAM_SECONDS))


if __name__ == "__main__":
    main()
