"""Every solver through the same checks, against exhaustive enumeration on small problems."""

import dataclasses
import functools
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from planner import limits
from planner.errors import LimitError
from planner.strategy_search.solvers import SOLVERS, dynamic_programming, exhaustive, ilp
from planner.strategy_search.solvers.elimination.order import schedule
from planner.strategy_search.solvers.problem import OPTIMALITY_TOLERANCE, Edge, Problem, Solution, Variable
from tests.refusals import refused

Pairs = list[tuple[int, int]]
Draw = np.random.Generator

EXACT = ("dynamic_programming", "exhaustive", "ilp")
SEEDS = range(40)

# What a proof may leave open, relatively: the program's bound is lowered by what the engine's tolerances could hide.
PROVED_WITHIN = {"ilp": OPTIMALITY_TOLERANCE}

# Some milliseconds a program: where each problem is solved three times, every sixth of them will do (about 150).
STRIDE = {"ilp": 6}


def tree(random: Draw, count: int) -> Pairs:
    return [(int(random.integers(later)), later) for later in range(1, count)]


def chain_with_skips(random: Draw, count: int) -> Pairs:
    skips = [(start, start + 2) for start in range(count - 2) if random.random() < 0.6]
    return [(start, start + 1) for start in range(count - 1)] + skips


def star(random: Draw, count: int) -> Pairs:
    hub = int(random.integers(count))
    return [(min(hub, leaf), max(hub, leaf)) for leaf in range(count) if leaf != hub]


def width_three(random: Draw, count: int) -> Pairs:
    return [(a, b) for b in range(count) for a in range(max(0, b - 3), b) if random.random() < 0.7]


def scattered(random: Draw, count: int) -> Pairs:
    """Several components, and parallel edges."""
    pairs = [(a, b) for b in range(count) for a in range(b) if random.random() < 0.25]
    return pairs + pairs[: int(random.integers(3))]


SHAPES: dict[str, Callable[[Draw, int], Pairs]] = {
    "chain_with_skips": chain_with_skips,
    "scattered": scattered,
    "star": star,
    "tree": tree,
    "width_three": width_three,
}


def random_problem(shape: str, seed: int) -> Problem:
    """At most eight variables of at most four candidates; every other one in whole numbers, which tie."""
    random = np.random.default_rng([seed, *shape.encode()])
    sizes = [int(random.integers(1, 5)) for _ in range(int(random.integers(2, 8)))]
    whole, forbids, has_transients, edges_hold = (random.random(4) < (0.5, 0.3, 0.7, 0.5)).tolist()

    def numbers(*table: int) -> np.ndarray:
        return np.floor(random.random(table) * 10) if whole else random.random(table) * 10

    def times(*table: int) -> np.ndarray:
        return np.where(forbids & (random.random(table) < 0.1), np.inf, numbers(*table))

    variables = tuple(
        Variable(name=f"v{i}", time=times(K), memory=numbers(K), transient=2 * has_transients * numbers(K))
        for i, K in enumerate(sizes)
    )
    edges = []
    for first, second in SHAPES[shape](random, len(sizes)):
        table = sizes[first], sizes[second]
        edges.append(Edge(first=first, second=second, time=times(*table), memory=edges_hold * numbers(*table)))
    return Problem(variables=variables, edges=tuple(edges))


def limited(problem: Problem, memory_limit: float) -> Problem:
    return dataclasses.replace(problem, memory_limit=memory_limit)


@functools.cache
def instances(shape: str) -> list[tuple[Problem, Solution]]:
    """Problems without a limit, with limits from just enough to slack, and with one that is a little too tight."""
    problems = []
    for seed in SEEDS:
        free = random_problem(shape, seed)
        fastest = exhaustive.solve(free)
        problems.append(free)
        if fastest.evaluation is not None:
            least = exhaustive.solve(limited(free, -1.0)).least_memory
            assert least is not None
            slack = fastest.evaluation.peak - least
            problems += [limited(free, least + share * slack) for share in (0.0, 0.3, 0.7, 0.95)]
            problems.append(limited(free, least - 0.01))
    return [(problem, exhaustive.solve(problem)) for problem in problems]


def cases() -> Iterator[tuple[Problem, Solution]]:
    for shape in SHAPES:
        yield from instances(shape)


def close(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=2 * OPTIMALITY_TOLERANCE, abs_tol=1e-12)


def check_consistency(problem: Problem, solution: Solution) -> None:
    """What holds of any solution of any solver."""
    if solution.status in ("optimal", "feasible"):
        assert solution.choice is not None
        assert solution.evaluation == problem.evaluate(solution.choice)
        assert solution.evaluation.feasible
        assert solution.bound <= solution.evaluation.time
    else:
        assert solution.choice is None
        assert solution.evaluation is None
    if solution.status == "optimal":
        assert solution.gap <= OPTIMALITY_TOLERANCE
    assert (solution.least_memory is not None) == (solution.status == "infeasible")


@pytest.mark.cases(2, 3)
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SOLVERS)
def test_no_solver_beats_the_oracle_and_exact_ones_equal_it(name: str, shape: str) -> None:
    for problem, oracle in instances(shape):
        solution = SOLVERS[name](problem)
        check_consistency(problem, solution)
        if oracle.evaluation is None:
            assert solution.status in ("infeasible", "unknown")
        else:
            best = oracle.evaluation.time
            assert solution.status in ("optimal", "feasible", "unknown")
            assert solution.bound <= best + 1e-12
            assert solution.evaluation is None or solution.evaluation.time >= best * (1 - 1e-12)
        if name in EXACT:
            assert solution.status == oracle.status
            if solution.evaluation is not None and oracle.evaluation is not None:
                assert close(solution.evaluation.time, oracle.evaluation.time)
            if solution.least_memory is not None and oracle.least_memory is not None:
                assert close(solution.least_memory, oracle.least_memory)
                assert solution.bound == math.inf


def test_there_are_enough_instances_of_every_kind() -> None:
    statuses = [oracle.status for _, oracle in cases()]
    assert len(statuses) >= 600
    assert statuses.count("infeasible") >= 100
    binding = [
        problem
        for problem, oracle in cases()
        if oracle.evaluation is not None and oracle.evaluation.time > exhaustive.solve(limited(problem, math.inf)).bound
    ]
    assert len(binding) >= 150


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_an_upper_bound_cuts_off_just_what_is_not_faster(name: str) -> None:
    for problem, oracle in list(cases())[:: STRIDE.get(name, 1)]:
        if oracle.evaluation is None or oracle.evaluation.time <= 0:
            continue
        best = oracle.evaluation.time
        for bound in (0.5 * best, best):
            solution = SOLVERS[name](problem, upper_bound=bound)
            check_consistency(problem, solution)
            assert solution.status in ("cutoff", "unknown")
            assert solution.bound <= best + 1e-12
            if name in EXACT:
                assert solution.status == "cutoff"
                assert solution.bound >= bound * (1 - PROVED_WITHIN.get(name, 0.0))
        solution = SOLVERS[name](problem, upper_bound=1.001 * best)
        check_consistency(problem, solution)
        if name in EXACT:
            assert solution.status == "optimal"


def test_a_choice_that_is_known_is_where_it_begins() -> None:
    """The best one comes back; one that does not fit is worth nothing."""
    for problem, oracle in list(cases())[::9]:
        slowest = [int(np.argmax(variable.memory)) for variable in problem.variables]
        for known in (oracle.choice, slowest):
            solution = dynamic_programming.solve(problem, known=known)
            check_consistency(problem, solution)
            assert solution.status == oracle.status
            if oracle.evaluation is not None and solution.evaluation is not None:
                assert close(solution.evaluation.time, oracle.evaluation.time)


@pytest.mark.cases(0, 3)
@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_the_same_problem_gives_the_same_answer(name: str) -> None:
    for problem, _ in list(cases())[:: max(7, 3 * STRIDE.get(name, 1))]:
        first = SOLVERS[name](problem)
        schedule.cache_clear()
        assert SOLVERS[name](problem) == first or first.choice is None


@pytest.mark.parametrize("name", SOLVERS)
def test_ties_go_to_the_first_candidate(name: str) -> None:
    zeros = [Variable(name=f"v{i}", time=np.ones(3), memory=np.ones(3), transient=np.zeros(3)) for i in range(4)]
    edges = [Edge(first=i, second=i + 1, time=np.zeros((3, 3)), memory=np.zeros((3, 3))) for i in range(3)]
    assert SOLVERS[name](Problem(variables=tuple(zeros), edges=tuple(edges))).choice == (0, 0, 0, 0)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_problem_without_any_allowed_choice_has_no_least_memory(name: str) -> None:
    part = Variable(name="v", time=np.zeros(2), memory=np.ones(2), transient=np.zeros(2))
    forbid = Edge(first=0, second=1, time=np.full((2, 2), np.inf), memory=np.zeros((2, 2)))
    solution = SOLVERS[name](Problem(variables=(part, part), edges=(forbid,)))
    assert solution.status == "infeasible"
    assert solution.least_memory == math.inf


def test_lower_bounds_hold() -> None:
    for problem, oracle in cases():
        best = math.inf if oracle.evaluation is None else oracle.evaluation.time
        bound = dynamic_programming.lower_bound(problem)
        assert bound <= best + 1e-12
        if oracle.evaluation is not None and math.isinf(problem.memory_limit):
            assert close(bound, best)


def knapsack_like(count: int, seed: int) -> Problem:
    """Many variables whose memory is as random as their time, so that thin fronts lose something."""
    random = np.random.default_rng(seed)
    variables = tuple(
        Variable(name=f"v{i}", time=random.random(4), memory=random.random(4), transient=random.random(4))
        for i in range(count)
    )
    edges = tuple(
        Edge(first=i, second=i + 1, time=random.random((4, 4)), memory=np.zeros((4, 4))) for i in range(count - 1)
    )
    return Problem(variables=variables, edges=edges, memory_limit=0.45 * count)


@pytest.mark.thorough
def test_fronts_that_are_cut_short_leave_an_honest_gap() -> None:
    statuses = set()
    for seed in range(10):
        problem = knapsack_like(30, seed)
        best = dynamic_programming.solve(problem)
        assert best.status == "optimal"
        assert best.evaluation is not None
        thin = dynamic_programming.solve(problem, front_limit=2)
        check_consistency(problem, thin)
        assert thin.evaluation is not None
        assert thin.bound <= best.evaluation.time <= thin.evaluation.time * (1 + OPTIMALITY_TOLERANCE)
        statuses.add(thin.status)
    assert "feasible" in statuses


def test_a_wanted_gap_is_kept() -> None:
    for seed in range(10):
        problem = knapsack_like(30, seed)
        solution = dynamic_programming.solve(problem, relative_gap=0.01)
        check_consistency(problem, solution)
        assert solution.gap <= 0.01


def test_large_tables_are_taken_in_blocks() -> None:
    random = np.random.default_rng(0)
    size = 40  # three of them: 64,000 cells, two blocks
    parts = [
        Variable(name=f"v{i}", time=random.random(size), memory=random.random(size), transient=np.zeros(size))
        for i in range(3)
    ]
    tables = {pair: random.random((size, size)) for pair in [(0, 1), (0, 2), (1, 2)]}
    edges = tuple(Edge(first=a, second=b, time=t, memory=t[::-1] / 4) for (a, b), t in tables.items())
    for limit in (math.inf, 1.0):
        problem = Problem(variables=tuple(parts), edges=edges, memory_limit=limit)
        solution, oracle = dynamic_programming.solve(problem), exhaustive.solve(problem)
        assert solution.status == oracle.status == "optimal"
        assert solution.choice == oracle.choice


def test_solvers_refuse_what_is_too_large_for_them() -> None:
    parts = tuple(Variable(name=f"v{i}", time=np.zeros(9), memory=np.zeros(9), transient=np.zeros(9)) for i in range(8))
    table = np.zeros((9, 9))
    clique = tuple(Edge(first=a, second=b, time=table, memory=table) for b in range(8) for a in range(b))
    problem = Problem(variables=parts, edges=clique)
    with refused(ValueError, "4.3e+07", "choice_limit=1000"):
        exhaustive.solve(problem, choice_limit=1000)
    with refused(ValueError, 8, "4.3e+07", "table_limit=1000000"):
        dynamic_programming.solve(problem, table_limit=10**6)
    with refused(ValueError, "front_limit=0", 1):
        dynamic_programming.solve(problem, front_limit=0)
    with refused(ValueError, "relative_gap=-1", "time_limit=None"):
        ilp.solve(problem, relative_gap=-1)
    with refused(ValueError, "relative_gap=0.0", "time_limit=0"):
        ilp.solve(problem, time_limit=0)
    with refused(ValueError, "engine='cplex'", "highs", "scip"):
        ilp.solve(problem, engine="cplex")  # type: ignore[arg-type]


def test_programs_agree_with_elimination_where_enumeration_cannot_follow() -> None:
    for seed in range(4):
        problem = knapsack_like(30, seed)
        program, elimination = ilp.solve(problem), dynamic_programming.solve(problem)
        assert program.status == elimination.status == "optimal"
        assert program.evaluation is not None
        assert elimination.evaluation is not None
        assert close(program.evaluation.time, elimination.evaluation.time)
        assert program.bound <= elimination.evaluation.time


def test_both_engines_prove_the_same() -> None:
    for problem, oracle in list(cases())[::23]:
        solution = ilp.solve(problem, engine="scip")
        check_consistency(problem, solution)
        assert solution.status == oracle.status
        if oracle.evaluation is not None and solution.evaluation is not None:
            assert close(solution.evaluation.time, oracle.evaluation.time)


@pytest.mark.parametrize("time_limit", [1e-6, 0.05, 0.3])
def test_a_program_that_runs_out_of_time_leaves_an_honest_bound(time_limit: float) -> None:
    problem = knapsack_like(60, seed=0)
    best = dynamic_programming.solve(problem)
    assert best.evaluation is not None
    solution = ilp.solve(problem, time_limit=time_limit)
    check_consistency(problem, solution)
    assert solution.status in ("optimal", "feasible", "unknown")
    assert solution.bound <= best.evaluation.time
    assert solution.evaluation is None or solution.evaluation.time >= best.evaluation.time * (1 - OPTIMALITY_TOLERANCE)
    nothing = ilp.solve(limited(problem, 1.0), time_limit=time_limit)
    check_consistency(problem, nothing)
    assert nothing.status in ("infeasible", "unknown")


def test_a_program_keeps_a_wanted_gap() -> None:
    for seed in range(3):
        solution = ilp.solve(problem := knapsack_like(30, seed), relative_gap=0.01)
        check_consistency(problem, solution)
        assert solution.gap <= 0.01


@pytest.mark.parametrize("limit", [1.0, 1e6, 7e10])
def test_a_choice_that_exceeds_the_limit_by_a_rounding_is_never_returned(limit: float) -> None:
    """It is faster, and one unit in the last place too large: below the tolerances of any engine."""
    capacity = limited(knapsack_like(1, 0), limit).capacity
    large = math.nextafter(capacity, math.inf)
    memory, nothing = np.array([large, large, 0.5 * large]), np.zeros((3, 2))
    first = Variable(name="a", time=np.array([1.0, 2.0, 3.0]), memory=memory, transient=np.zeros(3))
    second = Variable(name="b", time=np.array([1.0, 1.5]), memory=np.zeros(2), transient=np.array([0.0, limit / 4]))
    edge = Edge(first=0, second=1, time=nothing, memory=nothing)
    solution = ilp.solve(Problem(variables=(first, second), edges=(edge,), memory_limit=limit))
    assert solution.status == "optimal"
    assert solution.choice == (2, 0)
    tight = dataclasses.replace(first, memory=np.full(3, large))
    solution = ilp.solve(Problem(variables=(tight, second), edges=(edge,), memory_limit=limit))
    assert solution.status == "infeasible"
    assert solution.least_memory == large


@pytest.mark.parametrize("seconds", [1e-9, 1e6])
@pytest.mark.parametrize("octets", [1e-3, 1e12])
def test_programs_are_well_conditioned_at_any_magnitude(seconds: float, octets: float) -> None:
    """Also where some candidates cost a million times as much as others."""
    for number, (problem, _) in enumerate(list(instances("width_three"))[1::17]):
        random = np.random.default_rng(number)
        seldom = [1e6 if random.random() < 0.2 else 1.0 for _ in range(100)]

        def stretched(table: np.ndarray, seldom: list[float] = seldom) -> np.ndarray:
            return seconds * table * np.resize(seldom, table.shape)

        variables = tuple(
            Variable(name=v.name, time=stretched(v.time), memory=octets * v.memory, transient=octets * v.transient)
            for v in problem.variables
        )
        edges = tuple(dataclasses.replace(e, time=stretched(e.time), memory=octets * e.memory) for e in problem.edges)
        wide = Problem(variables=variables, edges=edges, memory_limit=octets * problem.memory_limit)
        solution, oracle = ilp.solve(wide), exhaustive.solve(wide)
        check_consistency(wide, solution)
        assert solution.status == oracle.status
        if solution.evaluation is not None and oracle.evaluation is not None:
            assert math.isclose(solution.evaluation.time, oracle.evaluation.time, rel_tol=2 * OPTIMALITY_TOLERANCE)
            assert solution.bound <= oracle.evaluation.time


@pytest.mark.thorough
def test_ortools_loads_only_when_a_program_is_solved() -> None:
    code = "import sys, planner.strategy_search.search; print('ortools' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_programs_are_made_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second at each look at it; a program of 59 tables takes more looks than 60."""
    clock = itertools.count()
    monkeypatch.setattr(ilp.time, "monotonic", lambda: float(next(clock)))
    problem = knapsack_like(30, seed=0)
    solution = ilp.solve(problem, time_limit=60.0)
    check_consistency(problem, solution)
    assert dict(solution.statistics)["programs"] == 0, "the engine had time left"
    assert solution.status in ("feasible", "unknown")


def test_solvers_ask_for_the_limits_of_the_planner() -> None:
    table = np.random.default_rng(0).random((100, 100))
    part = Variable(name="v", time=np.zeros(100), memory=np.zeros(100), transient=np.zeros(100))
    problem = Problem(variables=(part, part), edges=(Edge(first=0, second=1, time=table, memory=table),))
    clock = itertools.count()
    with limits.limited(seconds=0.5, clock=lambda: float(next(clock))), pytest.raises(LimitError, match="time limit"):
        exhaustive.solve(problem)
    with limits.limited(memory=1.0, resident=lambda: 0.0), pytest.raises(LimitError, match="an integer program"):
        ilp.solve(limited(problem, -1.0))  # for the least memory every pair is a column
