"""All solvers, by name. Each takes a problem and its own options, and returns a solution.

Each accepts `upper_bound`: the caller wants only choices faster than that. To add a solver: a file here, a line below.
"""

from collections.abc import Mapping
from typing import Protocol

from planner.strategy_search.solvers import dynamic_programming, exhaustive, ilp
from planner.strategy_search.solvers.problem import Problem, Solution

__all__ = ["SOLVERS", "Solver"]


class Solver(Protocol):
    """The interface of a solver."""

    def __call__(self, problem: Problem, *, upper_bound: float | None = None) -> Solution:
        """Search for the fastest choice that fits."""


SOLVERS: Mapping[str, Solver] = {
    "dynamic_programming": dynamic_programming.solve,
    "exhaustive": exhaustive.solve,
    "ilp": ilp.solve,
}
