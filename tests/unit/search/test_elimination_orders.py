"""Orders of elimination: whole, with what is kept at the end, and the best of several ways to find one."""

import math
import random
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from planner.strategy_search.solvers import dynamic_programming, exhaustive
from planner.strategy_search.solvers.elimination import messages, order
from planner.strategy_search.solvers.elimination.messages import eliminate_together, remainder
from planner.strategy_search.solvers.elimination.order import elimination_order, schedule
from planner.strategy_search.solvers.elimination.tables import schedule_of
from planner.strategy_search.solvers.problem import Edge, Problem, Variable


def grid(rows: int, columns: int) -> tuple[tuple[int, int], ...]:
    right = [(at, at + 1) for at in range(rows * columns) if (at + 1) % columns]
    return (*right, *((at, at + columns) for at in range((rows - 1) * columns)))


@pytest.mark.parametrize("seed", range(12))
def test_an_order_has_all_variables_and_what_is_kept_last(seed: int) -> None:
    drawn = random.Random(seed)
    count = drawn.randint(4, 30)
    edges = tuple(
        (one, other) for one in range(count) for other in range(one + 1, min(count, one + 5)) if drawn.random() < 0.5
    )
    sizes = tuple(drawn.choice([2, 5, 9]) for _ in range(count))
    last = tuple(drawn.sample(range(count), 2))
    found = elimination_order(sizes, edges, last)
    assert sorted(found) == list(range(count))
    assert tuple(found[-2:]) == last


@pytest.mark.parametrize("fill_first", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_the_variable_of_the_least_score_goes_first(seed: int, fill_first: bool) -> None:
    """Hubs join many variables; a score by its definition is what all missing edges weigh, and the clique."""
    drawn = random.Random(seed)
    count = drawn.randint(8, 40)
    pairs = {(one, one + 1) for one in range(count - 1)} | {
        (hub, other) for hub in (0, 1) for other in range(3, count, 2)
    }
    sizes, kept = tuple(drawn.choice([1, 2, 5]) for _ in range(count)), frozenset(drawn.sample(range(count), 2))
    graph = {one: {b if a == one else a for a, b in pairs if one in (a, b)} for one in range(count)}
    logs = [round(math.log2(size) * 10**6) for size in sizes]
    cells, found = order._greedy(graph, sizes, logs, kept, fill_first=fill_first)
    counted = 0
    for variable in found:

        def score(one: int) -> tuple[int, int]:
            fill = sum(logs[a] + logs[b] for a, b in combinations(sorted(graph[one]), 2) if b not in graph[a])
            clique = logs[one] + sum(logs[other] for other in graph[one])
            return (fill, clique) if fill_first else (clique, fill)

        assert (score(variable), variable) == min((score(one), one) for one in graph if one not in kept)
        near = graph.pop(variable)
        counted += sizes[variable] * math.prod(sizes[other] for other in near)
        for other in near:
            graph[other] = (graph[other] | near) - {other, variable}
    assert set(graph) == kept
    assert cells == counted


def test_tree_decompositions_are_never_worse_and_sometimes_better(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for seed in range(60):
        drawn = random.Random(seed)
        edges = (*grid(3, 6), *(tuple(sorted(drawn.sample(range(18), 2))) for _ in range(4)))
        problems.append((tuple(drawn.choice([2, 5, 9, 20]) for _ in range(18)), edges))

    def cells() -> list[int]:
        schedule.cache_clear()
        return [schedule(sizes, edges).cells for sizes, edges in problems]

    with_them = cells()
    monkeypatch.setattr(order, "_decompositions", lambda core, kept: [])
    without = cells()
    schedule.cache_clear()
    assert all(one <= other for one, other in zip(with_them, without, strict=True))
    assert any(one < other for one, other in zip(with_them, without, strict=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("last", [(), (9, 41)])
def test_cliques_have_no_more_variables_than_tables_may_have_axes(last: tuple[int, ...]) -> None:
    """All of 80 variables are joined, and all but three have one candidate: the best of the 27 choices is found."""
    free, count = (7, 9, 41), 80
    sizes = tuple(3 if at in free else 1 for at in range(count))
    edges = tuple(combinations(range(count), 2))
    plan = schedule(sizes, edges, last)
    assert plan.exact
    assert plan.widest <= order.WIDEST
    draw = np.random.default_rng(0)
    nodes = [draw.random(size) for size in sizes]
    joined = {(a, b): draw.random((sizes[a], sizes[b])) for a, b in edges}
    pairs = [np.zeros(())] * len(plan.pairs)
    for edge, (number, flip) in zip(edges, plan.edge_pairs, strict=True):
        pairs[number] = joined[edge].T if flip else joined[edge]

    def cost(choice: tuple[int, ...]) -> float:
        at = dict(zip(free, choice, strict=True))
        of_pairs = sum(float(table[at.get(a, 0), at.get(b, 0)]) for (a, b), table in joined.items())
        return of_pairs + sum(float(node[at.get(v, 0)]) for v, node in enumerate(nodes))

    least = min(product(range(3), repeat=3), key=cost)
    tables = messages.eliminate(plan, [*nodes, *pairs])
    assert messages.optimum(tables) == pytest.approx(cost(least), rel=1e-12)
    chosen = messages.backtrack(plan, tables)
    assert tuple(chosen[v] for v in free) == least


def test_a_clique_of_many_variables_with_candidates_is_relaxed() -> None:
    """70 joined variables of two candidates each: no table could hold them, and what comes out is no more than what
    any choice costs."""
    count = 70
    edges = tuple(combinations(range(count), 2))
    plan = schedule((2,) * count, edges)
    assert not plan.exact
    assert plan.widest <= order.WIDEST
    draw = np.random.default_rng(0)
    tables = [draw.random(2) for _ in range(count)] + [draw.random((2, 2)) for _ in plan.pairs]
    found = messages.eliminate(plan, tables)
    choice = messages.backtrack(plan, found)
    costs = sum(float(tables[v][choice[v]]) for v in range(count))
    costs += sum(float(t[choice[a], choice[b]]) for (a, b), t in zip(plan.pairs, tables[count:], strict=True))
    assert 0 < messages.optimum(found) <= costs


def test_variables_of_one_candidate_each_are_all_summed() -> None:
    """62 joined variables, none of which has a choice: the optimum is what all tables come to."""
    count = 62
    plan = schedule((1,) * count, tuple(combinations(range(count), 2)))
    assert plan.widest <= order.WIDEST
    tables = [np.ones(1) for _ in range(count)] + [np.ones((1, 1)) for _ in plan.pairs]
    assert messages.optimum(messages.eliminate(plan, tables)) == count + count * (count - 1) // 2


def _joined(sizes: tuple[int, ...], draw: np.random.Generator, memory_limit: float) -> Problem:
    def drawn(*shape: int) -> np.ndarray:
        return draw.integers(0, 20, shape).astype(float)

    nodes = [Variable(name=str(k), time=drawn(k), memory=drawn(k), transient=drawn(k)) for k in sizes]
    edges = [
        Edge(first=a, second=b, time=drawn(sizes[a], sizes[b]), memory=drawn(sizes[a], sizes[b]))
        for a, b in combinations(range(len(sizes)), 2)
    ]
    return Problem(variables=tuple(nodes), edges=tuple(edges), memory_limit=memory_limit)


@pytest.mark.cases(6)
@pytest.mark.parametrize("seed", range(20))
def test_memory_is_limited_where_variables_of_one_candidate_have_several_buckets(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine joined variables of which three have a choice, where cliques may have no more than four variables."""
    monkeypatch.setattr(order, "WIDEST", 4)
    schedule.cache_clear()
    draw = np.random.default_rng(seed)
    sizes = tuple(draw.permutation([4, 4, 3, 1, 1, 1, 1, 1, 1]).tolist())
    free = _joined(sizes, draw, math.inf)
    assert len(schedule_of(free).buckets) > len(sizes)
    peaks = sorted(free.evaluate(choice).peak for choice in product(*map(range, sizes)))
    for limit in (peaks[0] - 1, peaks[0], peaks[5], peaks[12]):
        problem = replace(free, memory_limit=limit)
        exact, found = exhaustive.solve(problem), dynamic_programming.solve(problem)
        assert found.status == exact.status
        assert found.least_memory == exact.least_memory
        if exact.evaluation is not None and found.evaluation is not None:
            assert found.evaluation.time == exact.evaluation.time
    schedule.cache_clear()


def test_a_relaxed_schedule_proves_no_optimum() -> None:
    problem = _joined((2,) * (order.WIDEST + 2), np.random.default_rng(0), math.inf)
    for solve in (dynamic_programming.solve, dynamic_programming.lower_bound):
        with pytest.raises(ValueError, match="too wide for dynamic programming"):
            solve(problem)


def test_blocks_that_repeat_in_a_problem_are_eliminated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six blocks of two operators and a weight, all of which read one value, which is left with the last: sums are the
    same numbers, and those of equal tables are made once."""
    draw, blocks = np.random.default_rng(0), 6
    inside, onwards, shared, weight = (draw.random((4, 4)) for _ in range(4))
    edges, tables = [], []
    for block in range(blocks):
        first = 3 * block
        edges += [(first, first + 1), (first + 1, 3 * blocks), (first + 1, first + 2)]
        tables += [inside, shared, weight]
        if block:
            edges.append((first - 2, first))
            tables.append(onwards)
    sizes = (4,) * (3 * blocks + 1)
    plan = schedule(sizes, tuple(edges), (3 * blocks - 2, 3 * blocks))
    nodes = [np.zeros((1, 4)) for _ in sizes]
    pairs = [np.zeros(())] * len(plan.pairs)
    for table, (number, flip) in zip(tables, plan.edge_pairs, strict=True):
        pairs[number] = (table.T if flip else table)[None]
    made, added = list[object](), messages._sum
    monkeypatch.setattr(messages, "_sum", lambda *views: (made.append(1), added(*views))[1])
    alone = remainder(plan, eliminate_together(plan, [*nodes, *pairs], 2), 2)
    every = len(made)
    monkeypatch.setattr(messages, "_MANY", 1)
    together = remainder(plan, eliminate_together(plan, [*nodes, *pairs], 2), 2)
    assert np.array_equal(alone, together)
    assert len(made) - every <= every - (blocks - 1)


def test_messages_that_nothing_changes_are_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, sizes = np.random.default_rng(0), (4,) * 12
    plan = schedule(sizes, grid(3, 4))
    tables = [draw.random((1, 4)) for _ in sizes] + [draw.random((1, 4, 4)) for _ in plan.pairs]
    known = eliminate_together(plan, tables)
    changed = plan.buckets[4].variable
    tables[changed] = np.where(np.arange(4) < 2, tables[changed], math.inf)
    anew, made, added = eliminate_together(plan, tables), list[object](), messages._sum
    monkeypatch.setattr(messages, "_sum", lambda *views: (made.append(1), added(*views))[1])
    found = eliminate_together(plan, tables, known=known)
    assert all(map(np.array_equal, found, anew))
    assert not np.array_equal(found[-1], known[-1])
    assert 0 < len(made) <= len(plan.buckets) - 4
