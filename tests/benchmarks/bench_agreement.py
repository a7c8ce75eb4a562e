"""Do the solvers agree? The exact one, exhaustive enumeration and the integer program on small random problems."""

import math
from collections import Counter

import numpy as np
from timing import extent

from planner.strategy_search.solvers import SOLVERS
from planner.strategy_search.solvers.problem import OPTIMALITY_TOLERANCE, Edge, Problem, Solution, Variable

PROBLEMS = {"quick": 100, "usual": 1000, "full": 1000}
NAMES = ("dynamic_programming", "exhaustive", "ilp")


def random_problem(seed: int) -> Problem:
    """Two to seven variables of up to four candidates; any two may share an edge; some choices are forbidden, and
    three of four problems have a limit of memory, of which some cannot be kept."""
    random = np.random.default_rng(seed)
    sizes = [int(random.integers(1, 5)) for _ in range(int(random.integers(2, 8)))]
    variables = tuple(
        Variable(
            name=f"v{place}",
            time=np.where(random.random(size) < 0.05, np.inf, random.random(size)),
            memory=random.random(size),
            transient=2 * random.random(size),
        )
        for place, size in enumerate(sizes)
    )
    edges = tuple(
        Edge(
            first=first,
            second=second,
            time=np.where(random.random((sizes[first], sizes[second])) < 0.05, np.inf, 1.0)
            * random.random((sizes[first], sizes[second])),
            memory=0.2 * random.random((sizes[first], sizes[second])),
        )
        for second in range(len(sizes))
        for first in range(second)
        if random.random() < 0.5
    )
    limit = math.inf if seed % 4 == 0 else len(sizes) * random.uniform(0.3, 0.9) + random.uniform(0.5, 1.5)
    return Problem(variables=variables, edges=edges, memory_limit=limit)


def agree(one: Solution, other: Solution) -> bool:
    """The same status, and the same time where there is one."""
    if one.status != other.status or (one.evaluation is None) != (other.evaluation is None):
        return False
    if one.evaluation is None or other.evaluation is None:
        return True
    return math.isclose(one.evaluation.time, other.evaluation.time, rel_tol=2 * OPTIMALITY_TOLERANCE, abs_tol=1e-12)


def main() -> None:
    """Print the count."""
    count = PROBLEMS[extent()]
    equal, statuses, bound_by_memory = 0, Counter[str](), 0
    for seed in range(count):
        problem = random_problem(seed)
        first, *others = (SOLVERS[name](problem) for name in NAMES)
        statuses[first.status] += 1
        free = SOLVERS["dynamic_programming"](Problem(variables=problem.variables, edges=problem.edges))
        slower = first.evaluation is not None and first.evaluation.time > free.bound * (1 + 1e-9)
        bound_by_memory += slower
        if all(agree(first, other) for other in others):
            equal += 1
        else:
            print(f"seed {seed}: " + ", ".join(f"{s.status} {s.evaluation}" for s in (first, *others)))
    kinds = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()))
    print(f"{' = '.join(NAMES)} on {equal} of {count} random problems")
    print(f"({kinds}; in {bound_by_memory} the limit of memory makes the best choice slower)")


if __name__ == "__main__":
    main()
