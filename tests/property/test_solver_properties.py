"""Laws of the optimum: how it moves when the numbers of a problem move."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.strategy_search.solvers import SOLVERS
from planner.strategy_search.solvers.problem import Edge, Problem, Solution, Variable

EXACT = ("dynamic_programming", "exhaustive")

numbers = st.integers(0, 20).map(float)
times = st.one_of(numbers, numbers, numbers, st.just(math.inf))


def tables(elements: st.SearchStrategy[float], *shape: int) -> st.SearchStrategy[np.ndarray]:
    size = math.prod(shape)
    return st.lists(elements, min_size=size, max_size=size).map(lambda flat: np.array(flat).reshape(shape))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to six variables of up to three candidates, any graph, most limits binding."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    variables = tuple(
        Variable(
            name=f"v{i}",
            time=draw(tables(times, K)),
            memory=draw(tables(numbers, K)),
            transient=draw(tables(numbers, K)),
        )
        for i, K in enumerate(sizes)
    )
    everything = [(a, b) for b in range(len(sizes)) for a in range(b)]
    pairs = draw(st.lists(st.sampled_from(everything), max_size=8)) if everything else []
    edges = tuple(
        Edge(
            first=a,
            second=b,
            time=draw(tables(times, sizes[a], sizes[b])),
            memory=draw(tables(numbers, sizes[a], sizes[b])),
        )
        for a, b in pairs
    )
    limit = draw(st.one_of(st.just(math.inf), st.integers(0, 25 * len(sizes) + 10 * len(pairs)).map(float)))
    return Problem(variables=variables, edges=edges, memory_limit=limit)


def time_of(solution: Solution) -> float:
    return math.inf if solution.evaluation is None else solution.evaluation.time


def same(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=1e-8)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@given(problem=problems(), factor=st.sampled_from([1e-6, 0.5, 3.0, 1e6]))
def test_time_scales(name: str, problem: Problem, factor: float) -> None:
    scaled = dataclasses.replace(
        problem,
        variables=tuple(dataclasses.replace(v, time=factor * v.time) for v in problem.variables),
        edges=tuple(dataclasses.replace(e, time=factor * e.time) for e in problem.edges),
    )
    assert same(time_of(SOLVERS[name](scaled)), factor * time_of(SOLVERS[name](problem)))


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@given(problem=problems(), factor=st.sampled_from([1e-3, 7.0, 2.0**30]))
def test_bytes_scale_with_their_limit(name: str, problem: Problem, factor: float) -> None:
    scaled = Problem(
        variables=tuple(
            dataclasses.replace(v, memory=factor * v.memory, transient=factor * v.transient) for v in problem.variables
        ),
        edges=tuple(dataclasses.replace(e, memory=factor * e.memory) for e in problem.edges),
        memory_limit=factor * problem.memory_limit,
    )
    first, second = SOLVERS[name](problem), SOLVERS[name](scaled)
    assert first.status == second.status
    assert same(time_of(first), time_of(second))
    if first.least_memory is not None and second.least_memory is not None:
        assert same(factor * first.least_memory, second.least_memory)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@given(problem=problems(), shift=st.integers(0, 50), data=st.data())
def test_a_cost_common_to_all_candidates_shifts_the_optimum(
    name: str, problem: Problem, shift: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, len(problem.variables) - 1))
    variables = list(problem.variables)
    variables[chosen] = dataclasses.replace(variables[chosen], time=variables[chosen].time + shift)
    shifted = dataclasses.replace(problem, variables=tuple(variables))
    assert same(time_of(SOLVERS[name](shifted)), time_of(SOLVERS[name](problem)) + shift)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@given(problem=problems(), more=st.integers(0, 60))
def test_more_memory_never_hurts(name: str, problem: Problem, more: int) -> None:
    roomier = dataclasses.replace(problem, memory_limit=problem.memory_limit + more)
    assert time_of(SOLVERS[name](roomier)) <= time_of(SOLVERS[name](problem)) * (1 + 1e-8)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@given(problem=problems(), data=st.data())
def test_the_order_of_variables_does_not_matter(name: str, problem: Problem, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(problem.variables))))
    place = {variable: position for position, variable in enumerate(order)}
    edges = []
    for edge in problem.edges:
        first, second = place[edge.first], place[edge.second]
        if first < second:
            edges.append(dataclasses.replace(edge, first=first, second=second))
        else:
            edges.append(Edge(first=second, second=first, time=edge.time.T, memory=edge.memory.T))
    permuted = Problem(
        variables=tuple(problem.variables[variable] for variable in order),
        edges=tuple(edges),
        memory_limit=problem.memory_limit,
    )
    first_solution, second_solution = SOLVERS[name](problem), SOLVERS[name](permuted)
    assert first_solution.status == second_solution.status
    assert same(time_of(first_solution), time_of(second_solution))


@pytest.mark.thorough
@given(problem=problems())
def test_the_limit_that_an_infeasible_problem_asks_for_is_enough(problem: Problem) -> None:
    for name in EXACT:
        solution = SOLVERS[name](problem)
        if solution.least_memory is not None and solution.least_memory < math.inf:
            assert SOLVERS[name](dataclasses.replace(problem, memory_limit=solution.least_memory)).status == "optimal"
