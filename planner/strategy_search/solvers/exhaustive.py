"""The oracle: examines every choice. Slow, and simple enough to be trusted.

    choice number    0       1       2       3      ...       mixed radix, the last variable changes fastest:
    (a, b)         (0,0)   (0,1)   (0,2)   (1,0)    ...       the order of itertools.product

Of equally fast choices the first is taken. It does n table lookups per choice, for the product of all candidate counts;
more than `choice_limit` choices are refused. Good only for checking other solvers.
"""

import math
from collections.abc import Iterator

import numpy as np

from planner.limits import check
from planner.strategy_search.solvers.problem import Array, Problem, Solution

# Choices that are priced together.
CHUNK = 2**16


def solve(problem: Problem, *, upper_bound: float | None = None, choice_limit: int = 5_000_000) -> Solution:
    """The fastest choice that fits; "cutoff" if none is faster than `upper_bound`.

    Raises:
        ValueError: the problem has more than `choice_limit` choices.
    """
    count = math.prod(problem.sizes)
    if count > choice_limit:
        raise ValueError(f"{count:.3g} choices are more than choice_limit={choice_limit}; use another solver")
    best_time, best_number, least = math.inf, -1, math.inf
    for start, time, peak in _prices(problem, count):
        least = min(least, peak[time < math.inf].min(initial=math.inf).item())
        fitting = np.where(peak <= problem.capacity, time, math.inf)
        fastest = int(fitting.argmin())
        if fitting[fastest] < best_time:
            best_time, best_number = fitting[fastest].item(), start + fastest
    statistics = (("choices", float(count)),)
    if best_number < 0:
        return Solution(status="infeasible", bound=math.inf, least_memory=least, statistics=statistics)
    choice = tuple(int(k) for k in np.unravel_index(best_number, problem.sizes))
    evaluation = problem.evaluate(choice)
    if upper_bound is not None and evaluation.time >= upper_bound:
        return Solution(status="cutoff", bound=evaluation.time, statistics=statistics)
    return Solution(
        status="optimal", choice=choice, evaluation=evaluation, bound=evaluation.time, statistics=statistics
    )


def _prices(problem: Problem, count: int) -> Iterator[tuple[int, Array, Array]]:
    """For each chunk the number of its first choice, and the times and peaks of all its choices."""
    for start in range(0, count, CHUNK):
        check()
        picks = np.unravel_index(np.arange(start, min(start + CHUNK, count)), problem.sizes)
        time, memory, transient = (np.zeros(len(picks[0])) for _ in range(3))
        for variable, pick in zip(problem.variables, picks, strict=True):
            time += variable.time[pick]
            memory += variable.memory[pick]
            transient = np.maximum(transient, variable.transient[pick])
        for edge in problem.edges:
            time += edge.time[picks[edge.first], picks[edge.second]]
            memory += edge.memory[picks[edge.first], picks[edge.second]]
        yield start, time, memory + transient
