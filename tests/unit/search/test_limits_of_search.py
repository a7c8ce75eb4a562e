"""Wide graphs, and limits where they are felt: relaxed eliminations, stages that ask, tables that are large."""

import contextlib
import itertools
import math
import random
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import planner
import planner.limits
import planner.strategy_search.decomposition.pieces
from planner.errors import LateError, LimitError, RequestError
from planner.limits import Limits, limited, resident_bytes
from planner.sharding.update import PLAIN
from planner.strategy_search.decomposition.block_ranges import block_ranges_of
from planner.strategy_search.exploration.best_first import BestFirst
from planner.strategy_search.objectives import front, plan_for
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from planner.strategy_search.solvers.elimination.improving import improved
from planner.strategy_search.solvers.elimination.messages import backtrack, eliminate_together, remainder
from planner.strategy_search.solvers.elimination.order import Pairs, Schedule, schedule
from tests.benchmarks.hard_models import mamba_short
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, request_of

Tables = list[np.ndarray[Any, np.dtype[np.float64]]]


def wide(draw: random.Random, count: int, size: int) -> tuple[tuple[int, ...], Pairs]:
    """A scan: each step reads the one before and slices of three hubs."""
    hubs = range(3)
    steps = range(3, count)
    pairs = [(hub, step) for step in steps for hub in hubs if draw.random() < 0.9]
    pairs += list(itertools.pairwise(steps))
    return (size,) * count, tuple(pairs)


def drawn(draw: random.Random, sizes: tuple[int, ...], plan: Schedule) -> Tables:
    nodes = [np.array([draw.uniform(0, 1) for _ in range(size)]) for size in sizes]
    pairs = [np.array([[draw.uniform(0, 1) for _ in range(sizes[b])] for _ in range(sizes[a])]) for a, b in plan.pairs]
    return [*nodes, *pairs]


def cost(plan: Schedule, tables: Tables, choice: list[int]) -> float:
    count = plan.variables
    nodes = sum(float(table[k]) for table, k in zip(tables, choice, strict=False))
    pairs = zip(tables[count:], plan.pairs, strict=False)
    return nodes + sum(float(table[choice[a], choice[b]]) for table, (a, b) in pairs)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rest", [0, 1])
def test_a_relaxed_elimination_is_a_bound_and_its_choice_costs_what_it_costs(seed: int, rest: int) -> None:
    draw = random.Random(seed)
    sizes, edges = wide(draw, 9, 9)
    last = tuple(range(rest))
    exact, relaxed = schedule(sizes, edges, last), schedule(sizes, edges, last, 5000.0)
    assert exact.exact
    assert not relaxed.exact
    assert relaxed.largest_table < exact.largest_table
    assert relaxed.message_cells < exact.message_cells
    assert relaxed.pairs == exact.pairs
    tables = drawn(draw, sizes, exact)
    together = [table[None] for table in tables]
    true, bound = (eliminate_together(plan, together, rest) for plan in (exact, relaxed))
    if rest:
        values, bounds = remainder(exact, true, rest)[0], remainder(relaxed, bound, rest)[0]
    else:
        values, bounds = true[-1], bound[-1]
    assert (bounds <= values + 1e-9).all()
    state = [0] * rest
    least = float(values[tuple(state)]) if rest else float(values.item())
    plain = backtrack(relaxed, [table[0] for table in bound], state)
    better = improved(relaxed, tables, plain, rest)
    assert least - 1e-9 <= cost(relaxed, tables, better) <= cost(relaxed, tables, plain) + 1e-9
    assert better[:rest] == plain[:rest] == state
    assert math.isclose(cost(exact, tables, backtrack(exact, [table[0] for table in true], state)), least)


def test_a_narrow_graph_is_eliminated_exactly_whatever_is_allowed_to_be_relaxed() -> None:
    sizes, edges = (5,) * 8, tuple(itertools.pairwise(range(8)))
    assert schedule(sizes, edges, (), 5000.0) == schedule(sizes, edges)


def test_messages_are_asked_for_before_they_are_made() -> None:
    sizes, edges = (40,) * 6, tuple(itertools.combinations(range(6), 2))
    plan = schedule(sizes, edges)
    tables = [np.zeros((1, 40)) for _ in sizes] + [np.zeros((1, 40, 40)) for _ in plan.pairs]
    with limited(memory=2.0**29, resident=lambda: 0.0), refused(LimitError, "801.3 MiB", "512.0 MiB"):
        eliminate_together(plan, tables)


ASKED_WITHIN = 50_000
"""Calls of functions between two questions of a search; the longest stretches without one prepare the graph and price
a plan that was found. A call takes less than a microsecond or two, so that this is a tenth of a second."""


class Calls:
    """Counts calls of functions, and the most of them between two looks at the clock."""

    def __init__(self) -> None:
        self.calls = self.longest = self.asked = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"

    def clock(self) -> float:
        self.longest, self.calls = max(self.longest, self.calls), 0
        self.asked += 1
        return 0.0


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["recursive_programming", "sharding_propagation"])
def test_every_stage_asks_whether_there_is_time(algorithm: str) -> None:
    request = request_of("residual", cluster_of("cpu", 4), 8, algorithm=algorithm)
    search(request)  # what is made once and kept
    calls = Calls()
    with limited(seconds=1.0, clock=calls.clock):
        sys.setprofile(calls)
        try:
            search(request)
        finally:
            sys.setprofile(None)
        calls.clock()
    assert calls.asked > 100
    assert calls.longest < ASKED_WITHIN


def full_after(looks: int, ticks: Iterator[int]) -> contextlib.AbstractContextManager[Limits]:
    """A limit of memory that is reached at the given look; each check looks."""
    seen = itertools.count()
    return limited(
        memory=2.0**30,
        resident=lambda: 2.0**30 + 1 if next(seen) >= looks else 0.0,
        clock=lambda: float(next(ticks)),
    )


def test_memory_that_is_full_ends_a_search_with_what_it_has_found() -> None:
    request = request_of("residual", cluster_of("cpu", 4), 8, update=PLAIN)
    ticks, found = itertools.count(), list[SearchResult]()
    with refused(LimitError, "--planner-memory") as caught, full_after(0, ticks):
        search(request)
    assert caught.value.by == "memory"
    looks = 200
    while not found:
        with contextlib.suppress(LimitError), full_after(looks, ticks):
            found.append(search(request))
        looks *= 2
    assert found[0].statistics.stopped_by == "memory"
    assert found[0].bound_seconds <= found[0].plans[0].objective * (1 + 1e-9)


def test_a_limit_that_is_reached_while_the_search_goes_on_after_its_first_plans_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise LimitError("no room", by="memory")

    monkeypatch.setattr(BestFirst, "search_on", full)
    assert search(request_of("residual", cluster_of("cpu", 4), 8)).statistics.stopped_by == "memory"


def test_a_search_that_its_user_stops_asks_for_no_more_time() -> None:
    request = request_of("residual", cluster_of("cpu", 4), 8)
    with pytest.raises(LimitError, match="let it go on until its first plan") as caught:
        search(request, cancelled=lambda: True)
    assert caught.value.by == "interrupt"
    answers = itertools.chain(itertools.repeat(False, 3), itertools.repeat(True))
    assert plan_for(request, lambda _: None, lambda: next(answers)).statistics.stopped_by == "interrupt"


def test_what_the_system_refuses_is_told_as_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(planner.strategy_search.decomposition.pieces, "eliminate_together", full)
    with refused(LimitError, "--planner-memory"):
        search(request_of("residual", cluster_of("cpu", 4), 8))


def test_the_size_of_a_graph_is_named_where_nothing_was_found() -> None:
    request = request_of("residual", cluster_of("cpu", 4), 8, time_limit=0.0)
    count = len(request.graph.operators)
    with refused(LimitError, "residual", count, "0 s"):
        search(request)


def test_where_reading_took_a_little_too_long_there_is_a_conventional_plan_and_later_the_reason() -> None:
    now, request = [0.0], request_of("residual", cluster_of("cpu", 4), 8)
    with limited(10.0, clock=lambda: now[0]):
        now[0] = 10.9
        found = plan_for(request, lambda progress: None, lambda: False)
        assert found.statistics.stopped
        assert found.bound_seconds <= found.plans[0].objective
        now[0] = 11.1
        with refused(LateError, "reading residual", "10 s", "nothing was searched", "--time-limit"):
            plan_for(request, lambda progress: None, lambda: False)
        with pytest.raises(LateError):
            front(request)


def test_nothing_is_read_of_a_machine_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> float:
        raise AssertionError("nobody asked for limits")

    monkeypatch.setattr(planner.limits, "resident_bytes", read)
    Limits().check()


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_block_ranges_of_equal_blocks_are_those_that_all_kinds_have(blocks: int) -> None:
    """What is said for one kind at once is what is counted one by one for several, of which one stands alone."""
    alike, several = block_ranges_of((0,) * blocks), block_ranges_of((0,) * blocks + (1,))
    inside = several.number[: blocks + 1, : blocks + 1]
    assert (alike.number >= 0).tolist() == (inside >= 0).tolist()
    for first, last in zip(*np.nonzero(alike.number >= 0), strict=True):
        one, other = alike.number[first, last], inside[first, last]
        assert alike.lengths[one] == several.lengths[other] == last - first
        assert alike.counts[0, one] == several.counts[0, other]
        assert alike.starts[one] == several.starts[other] == 0
    assert alike.totals == (blocks,)


def test_blocks_without_number_are_refused_before_their_stretches_are_made() -> None:
    with limited(memory=2.0**30, resident=lambda: 0.0), refused(LimitError, 1000000, "14,901.2 GiB", "1.0 GiB"):
        block_ranges_of((0,) * 1_000_000)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def test_recomputation_of_no_blocks_is_refused() -> None:
    with refused(RequestError, "recompute = full", "no blocks"):
        planner.search(
            nn.Sequential(nn.Linear(4, 4), Mean()), "cpu", args=(torch.ones(2, 4),), pinned={"recompute": "full"}
        )


@pytest.mark.slow
@pytest.mark.thorough
def test_a_loop_over_tokens_is_planned_with_a_bound_that_holds() -> None:
    """Each step of a scan that is written out reads slices of what all steps read: exactly, that would take hours."""
    module, inputs = mamba_short()
    found = planner.search(
        module, "h100-80gb", devices=8, args=inputs, batch=2, planner_memory=resident_bytes() + 2.0**30
    )
    assert 0 < found.bound_seconds <= found.plans[0].objective * (1 + 1e-9)
    assert not found.statistics.stopped
