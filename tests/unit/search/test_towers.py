"""Alike blocks before the blocks or behind them, as a tower of images has: they choose as the first of them does."""

import random

import pytest

from planner.strategy_search.request.space import Configuration
from tests.unit.search import cases
from tests.unit.search.cases import Case, Towers, make_case, plan_of, random_ranks, random_state


def case_of(name: str, monkeypatch: pytest.MonkeyPatch, before: int, after: int) -> Case:
    monkeypatch.setitem(cases.MODELS, name, (lambda: Towers(before, after), cases.TOKENS))  # type: ignore[arg-type]
    configuration = Configuration(pipeline=1, mesh=(2, 2), micro_batches=2, virtual_stages=1)
    return make_case(name, "h100-80gb", configuration, 8)


def test_a_tower_has_the_variables_of_one_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (case_of(f"towers of {n}", monkeypatch, n, n).chain for n in (3, 6))
    for one, other in zip((*few.head, *few.tail), (*many.head, *many.tail), strict=True):
        assert one.sizes == other.sizes
        assert one.part.size == other.part.size


def test_blocks_of_a_tower_are_alike_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    case, draw = case_of("towers of 3 and 4", monkeypatch, 3, 4), random.Random(0)
    plan = plan_of(case, random_ranks(case, draw, random_state(case, draw)))
    for name, count in (("before", 3), ("after", 4)):
        for what in ("operators", "parameters"):
            rows = next(dict(getattr(group, what)) for group in plan.groups if group.name == f"{name} the blocks")
            own = [
                [chosen for key, chosen in rows.items() if f"{name}.{block}/" in key or f"{name}.{block}." in key]
                for block in range(count)
            ]
            assert len(own[0]) in (3, 4)
            assert own == count * own[:1]
