"""Which ranks are slow, from made up seconds; and that whatever waits for others in a step is counted as waiting."""

import ast
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import runtime
from planner.plan.plan import Plan, StagePrediction
from runtime.processes.stragglers import slow_ranks
from runtime.waiting import timing_waits, waiting_for
from tests.distributed import plans

RUNTIME = Path(runtime.__file__).parent
OUTSIDE = {
    "agreement", "checking", "checkpoint", "exchange", "finiteness", "initial_values", "integrations", "launch",
    "measuring", "proving", "recording", "recovery", "same_batch", "training", "waiting",
}  # fmt: skip
"""Modules of what is done beside steps, or in the first one only."""
WAITING = {
    "all_gather_object", "all_gather_single", "all_reduce", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "recv", "reduce_scatter_single", "send", "wait",
}  # fmt: skip


def plan_of(size: int, work: tuple[float, ...]) -> Plan:
    """With so many devices in a stage, and stages of so much work."""
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(size), micro_batches=2)
    parts = tuple(StagePrediction(micro_batch_seconds=w / 2, once_seconds=0.0, peak_bytes=1.0) for w in work)
    return replace(plan, prediction=replace(plan.prediction, stages=parts))


@pytest.mark.parametrize(
    ("busy", "size", "work", "slow"),
    [
        ((1.0, 1.1, 2.75, 0.9), 4, (), {2: 2.75}),
        ((1.0, 1.4, 0.7, 1.0), 4, (), {}),
        ((1.0, 3.0), 2, (), {1: 3.0}),
        ((1.0, 1.0, 3.0, 3.0), 2, (), {}),
        ((1.0, 1.0, 3.0, 6.0), 2, (), {3: 2.0}),
        ((1.0, 4.0), 1, (1.0, 4.0), {}),
        ((1.0, 4.0), 1, (1.0, 1.0), {1: 4.0}),
        ((2.0, 2.0, 2.0), 1, (1.0, 1.0, 0.5), {2: 2.0}),
        ((1.0, 4.0), 1, (), {}),
        ((0.1, 0.3), 2, (), {}),
        ((1.0,), 1, (), {}),
    ],
    ids=["one", "all alike", "of two", "stages that differ", "in its stage", "as planned", "not as planned",
         "of three", "nobody knows", "little of the step", "alone"],
)  # fmt: skip
def test_slow_is_who_is_busy_longer_than_those_with_its_work(
    busy: tuple[float, ...], size: int, work: tuple[float, ...], slow: dict[int, float]
) -> None:
    found = slow_ranks(busy, 10.0, plan_of(size, work))
    assert {one.rank: pytest.approx(one.times) for one in found} == slow
    assert all(one.seconds == busy[one.rank] for one in found)


def test_waiting_is_counted_where_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def wait(seconds: float, *, well: bool = True) -> str:
        now[0] += seconds
        if not well:
            raise RuntimeError
        return "came"

    assert waiting_for(wait, 7.0) == "came"
    with timing_waits() as waits:
        assert waiting_for(wait, 2.0) == "came"
        now[0] += 5.0
        with pytest.raises(RuntimeError):
            waiting_for(wait, 1.0, well=False)
    assert waits.seconds == 3.0
    waiting_for(wait, 7.0)
    assert waits.seconds == 3.0


def waits_that_are_not_counted(text: str) -> Iterator[str]:
    """Calls that wait for other ranks, or for what they were started for, without `waiting_for`."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, of = node.func.attr, ast.unparse(node.func.value)
        later = any(keyword.arg == "async_op" for keyword in node.keywords)
        if name in WAITING and not later and (of == "dist" or (name == "wait" and of == "work")):
            yield f"{of}.{name}"


def test_all_that_waits_in_a_step_is_counted() -> None:
    """A collective that is called in another way would count as work of whoever is early."""
    assert list(waits_that_are_not_counted("dist.recv(x)\nwork.wait()\ndist.all_reduce(x, async_op=True)")) == [
        "dist.recv", "work.wait",
    ]  # fmt: skip
    found = {}
    for path in RUNTIME.rglob("*.py"):
        parts = path.relative_to(RUNTIME).with_suffix("").parts
        if not OUTSIDE & {*parts} and (calls := list(waits_that_are_not_counted(path.read_text(encoding="utf-8")))):
            found[str(path.relative_to(RUNTIME))] = calls
    assert found == {}
