"""Orders of elimination: whole, with what is kept at the end, and the best of several ways to find one."""

import random

import pytest

from planner.strategy_search.solvers.elimination import order
from planner.strategy_search.solvers.elimination.order import elimination_order, schedule


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
