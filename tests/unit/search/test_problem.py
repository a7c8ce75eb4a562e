"""The problem, its prices, and the messages for numbers that cannot be."""

import math

import numpy as np
import pytest

from planner.strategy_search.solvers.problem import Edge, Evaluation, Problem, Solution, Variable
from tests.refusals import refused


def variable(name: str, time: list[float], memory: list[float], transient: list[float] | None = None) -> Variable:
    numbers = [0.0] * len(time) if transient is None else transient
    return Variable(name=name, time=np.array(time), memory=np.array(memory), transient=np.array(numbers))


def edge(first: int, second: int, time: list[list[float]], memory: list[list[float]] | None = None) -> Edge:
    table = np.array(time)
    return Edge(
        first=first, second=second, time=table, memory=np.zeros(table.shape) if memory is None else np.array(memory)
    )


@pytest.fixture
def small() -> Problem:
    """Two variables, two candidates each, and two parallel edges."""
    return Problem(
        variables=(
            variable("a", [1.0, 2.0], [10.0, 20.0], [5.0, 1.0]),
            variable("b", [3.0, math.inf], [30.0, 40.0], [2.0, 7.0]),
        ),
        edges=(
            edge(0, 1, [[0.5, 0.0], [0.25, 0.0]], [[1.0, 0.0], [2.0, 0.0]]),
            edge(0, 1, [[0.125, 0.0], [math.inf, 0.0]]),
        ),
        memory_limit=46.0,
    )


def test_a_choice_costs_the_sum_of_its_parts_and_the_largest_transient(small: Problem) -> None:
    expected = Evaluation(time=4.625, memory=41.0, transient=5.0, peak=46.0, feasible=True)
    assert small.evaluate((0, 0)) == expected


def test_a_choice_over_the_limit_is_not_feasible(small: Problem) -> None:
    tighter = Problem(variables=small.variables, edges=small.edges, memory_limit=45.9)
    assert not tighter.evaluate((0, 0)).feasible


def test_a_forbidden_pair_or_candidate_is_not_feasible(small: Problem) -> None:
    unlimited = Problem(variables=small.variables, edges=small.edges)
    for choice in [(1, 0), (0, 1)]:
        evaluation = unlimited.evaluate(choice)
        assert evaluation.time == math.inf
        assert not evaluation.feasible


def test_rounding_does_not_make_a_peak_at_the_limit_infeasible() -> None:
    parts = tuple(variable(str(number), [0.0], [0.1]) for number in range(10))
    assert Problem(variables=parts, memory_limit=sum([0.1] * 10)).evaluate((0,) * 10).feasible
    assert not Problem(variables=parts, memory_limit=1.0 - 1e-6).evaluate((0,) * 10).feasible


def test_lists_of_numbers_are_taken_as_they_are() -> None:
    made = Variable(name="a", time=[1, 2], memory=[0, 0], transient=[0, 0])  # type: ignore[arg-type]
    assert made.time.dtype == np.float64
    assert made.size == 2


def test_a_solution_knows_its_gap(small: Problem) -> None:
    evaluation = small.evaluate((0, 0))
    assert Solution(status="feasible", choice=(0, 0), evaluation=evaluation, bound=3.7).gap == pytest.approx(0.2)
    assert Solution(status="optimal", choice=(0, 0), evaluation=evaluation, bound=evaluation.time).gap == 0.0
    assert Solution(status="unknown", bound=1.0).gap == math.inf


@pytest.mark.parametrize(
    ("time", "memory", "transient", "facts"),
    [
        ([], [], [], ("time", "(0,)")),
        ([[1.0]], [[1.0]], [[1.0]], ("time", "(1, 1)")),
        (
            [math.nan],
            [0.0],
            [0.0],
            ("time", "nan"),
        ),
        ([-math.inf], [0.0], [0.0], ("time", "-inf")),
        ([1.0, 2.0], [0.0], [0.0, 0.0], ("memory", "(1,)", "time", "(2,)")),
        ([1.0], [math.inf], [0.0], ("memory", "finite")),
        ([1.0], [0.0], [math.nan], ("transient", "finite")),
        ([1.0], [0.0], [-2.0], ("transient", -2.0)),
    ],
)
def test_a_variable_says_what_is_wrong(
    time: list[float], memory: list[float], transient: list[float], facts: tuple[object, ...]
) -> None:
    with refused(ValueError, "x", *facts):
        variable("x", time, memory, transient)


def test_an_edge_says_what_is_wrong() -> None:
    with refused(ValueError, "edge 1-0"):
        edge(1, 0, [[0.0]])
    with refused(ValueError, "time", "edge 0-1", "nan"):
        edge(0, 1, [[math.nan]])
    with refused(ValueError, "memory", "edge 0-1", "(2, 1)", "(1, 2)"):
        edge(0, 1, [[0.0, 0.0]], [[0.0], [0.0]])


def test_a_problem_says_what_is_wrong(small: Problem) -> None:
    a, b = small.variables
    with refused(ValueError, "variable"):
        Problem(variables=())
    with refused(ValueError, "memory_limit", "nan"):
        Problem(variables=(a,), memory_limit=math.nan)
    with refused(ValueError, "edge 0-2", 2):
        Problem(variables=(a, b), edges=(edge(0, 2, [[0.0]]),))
    with refused(ValueError, "a", "b", "(1, 2)", "(2, 2)"):
        Problem(variables=(a, b), edges=(edge(0, 1, [[0.0, 0.0]]),))


def test_a_choice_must_name_a_candidate_of_every_variable(small: Problem) -> None:
    with refused(ValueError, "choice", 1, 2):
        small.evaluate((0,))
    for candidate in (2, -1):
        with refused(ValueError, "b", "2 candidates", candidate):
            small.evaluate((0, candidate))
