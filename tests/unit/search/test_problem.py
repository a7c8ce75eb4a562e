"""The problem, its prices, and the messages for numbers that cannot be."""

import math

import numpy as np
import pytest

from planner.search.problem import Edge, Evaluation, Problem, Solution, Variable


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
    ("time", "memory", "transient", "message"),
    [
        ([], [], [], r"time of variable 'x' has shape \(0,\); one number for each of at least one candidate"),
        ([[1.0]], [[1.0]], [[1.0]], r"time of variable 'x' has shape \(1, 1\)"),
        (
            [math.nan],
            [0.0],
            [0.0],
            "time of variable 'x' has an entry nan; it must be a number, or inf where forbidden",
        ),
        ([-math.inf], [0.0], [0.0], "time of variable 'x' has an entry -inf"),
        ([1.0, 2.0], [0.0], [0.0, 0.0], r"memory of variable 'x' has shape \(1,\), its time has \(2,\)"),
        ([1.0], [math.inf], [0.0], "memory of variable 'x' has an entry that is not finite"),
        ([1.0], [0.0], [math.nan], "transient of variable 'x' has an entry that is not finite"),
        ([1.0], [0.0], [-2.0], r"transient of variable 'x' is -2\.0; it cannot be negative"),
    ],
)
def test_a_variable_says_what_is_wrong(
    time: list[float], memory: list[float], transient: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        variable("x", time, memory, transient)


def test_an_edge_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="edge 1-0: needs 0 <= first < second; swap the ends and transpose the tables"):
        edge(1, 0, [[0.0]])
    with pytest.raises(ValueError, match="time of edge 0-1 has an entry nan"):
        edge(0, 1, [[math.nan]])
    with pytest.raises(ValueError, match=r"memory of edge 0-1 has shape \(2, 1\), its time has \(1, 2\)"):
        edge(0, 1, [[0.0, 0.0]], [[0.0], [0.0]])


def test_a_problem_says_what_is_wrong(small: Problem) -> None:
    a, b = small.variables
    with pytest.raises(ValueError, match="at least one variable"):
        Problem(variables=())
    with pytest.raises(ValueError, match="memory_limit is nan"):
        Problem(variables=(a,), memory_limit=math.nan)
    with pytest.raises(ValueError, match="edge 0-2: there are only 2 variables"):
        Problem(variables=(a, b), edges=(edge(0, 2, [[0.0]]),))
    with pytest.raises(
        ValueError, match=r"edge between 'a' and 'b' has shape \(1, 2\), their candidates ask for \(2, 2\)"
    ):
        Problem(variables=(a, b), edges=(edge(0, 1, [[0.0, 0.0]]),))


def test_a_choice_must_name_a_candidate_of_every_variable(small: Problem) -> None:
    with pytest.raises(ValueError, match="the choice has 1 entries for 2 variables"):
        small.evaluate((0,))
    for candidate in (2, -1):
        with pytest.raises(ValueError, match=f"variable 'b' has 2 candidates, asked for {candidate}"):
            small.evaluate((0, candidate))
