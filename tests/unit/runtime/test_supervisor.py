"""Runs that are started again: after failures, after a change of devices, and when that ends."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.errors import RequestError, RunError
from planner.plan.file import load_plan
from planner.plan.plan import Plan
from runtime.processes.progress import NoticeReport, Report, RestartReport, StepReport
from runtime.recovery.replanning import Range
from runtime.recovery.supervisor import Attempt, Supervisor, devices_of
from tests.refusals import refused

GOLDEN = Path(__file__).parents[2] / "golden" / "plans" / "llama-tiny-4-cpu.json"


@pytest.fixture(scope="module")
def tiny_plan() -> Plan:
    """Any plan of several devices."""
    return load_plan(GOLDEN)


def step(number: int) -> StepReport:
    return StepReport(step=number, steps=9, loss=1.0, unsharded=None, seconds=1.0, samples=1, tokens=None)


class Runs:
    """Stands in for the ranks: each run makes some steps, and then ends as it is told."""

    def __init__(self, *ends: tuple[int, int | RunError]) -> None:
        self.ends, self.attempts = list(ends), list[Attempt]()
        self.supervisor: Supervisor | None = None

    def __call__(self, attempt: Attempt) -> int:
        assert self.supervisor is not None
        self.attempts.append(attempt)
        steps, end = self.ends.pop(0)
        for _ in range(steps):
            self.supervisor.see(step(self.supervisor.done + 1))
        if isinstance(end, RunError):
            raise end
        return end


class Fixed:
    """Plans that are known beforehand."""

    def __init__(self, allowed: Range, *plans: Plan) -> None:
        self.allowed, self._plans = allowed, {plan.cluster.devices: plan for plan in plans}

    def most(self, devices: int) -> Plan:
        return self._plans[max(count for count in self._plans if count <= devices)]

    def path(self, devices: int) -> Path:
        return Path(f"{devices}.json")


def supervised(plan: Plan, runs: Runs, told: list[Report], **more: Any) -> Supervisor:
    given: dict[str, Any] = {"start": runs, "plan": plan, "steps": 6, "restarts": 2, "tell": told.append, **more}
    runs.supervisor = Supervisor(**given)
    return runs.supervisor


KILLED = RunError("rank 1 was killed by SIGKILL")


def test_a_run_that_gets_on_may_break_down_as_often_as_it_likes(tiny_plan: Plan) -> None:
    told: list[Report] = []
    runs = Runs(*[(1, KILLED)] * 5, (1, 0))
    assert supervised(tiny_plan, runs, told).run() == 0
    found = [one for one in told if isinstance(one, RestartReport)]
    assert [(one.restart, one.step, one.devices) for one in found] == [
        (number, number, tiny_plan.cluster.devices) for number in range(1, 6)
    ]
    assert found[0].lines()[0].endswith("devices: rank 1 was killed by SIGKILL")


def test_failures_without_a_step_come_to_an_end(tiny_plan: Plan) -> None:
    runs = Runs((0, KILLED), (0, KILLED), (0, KILLED), (6, 0))
    with refused(RunError, "SIGKILL", 3, "--restarts"):
        supervised(tiny_plan, runs, []).run()
    again = Runs((0, KILLED), (0, KILLED), (1, KILLED), (0, KILLED), (5, 0))
    assert supervised(tiny_plan, again, []).run() == 0


def test_what_ranks_say_on_purpose_is_not_tried_again(tiny_plan: Plan) -> None:
    runs = Runs((2, RunError("a plan for another model", exit_code=2)), (6, 0))
    with pytest.raises(RunError, match="another model"):
        supervised(tiny_plan, runs, []).run()
    assert len(runs.attempts) == 1


def test_losses_that_differ_are_an_end_too(tiny_plan: Plan) -> None:
    assert supervised(tiny_plan, Runs((6, 1)), []).run() == 1


def test_devices_come_and_go(tiny_plan: Plan, tmp_path: Path) -> None:
    count, told, left = tiny_plan.cluster.devices, list[Report](), list[bool]()
    fewer = replace(tiny_plan, cluster=replace(tiny_plan.cluster, devices=1))

    class Changing(Runs):
        def __call__(self, attempt: Attempt) -> int:
            left.append(attempt.leave())
            if len(self.attempts) < 2:
                (tmp_path / "devices").write_text(["1", str(count)][len(self.attempts)], encoding="utf-8")
            left.append(attempt.leave())
            return super().__call__(attempt)

    runs = Changing((2, 0), (2, 0), (2, 0))
    plans = Fixed(Range(least=1, most=count), tiny_plan, fewer)
    assert supervised(tiny_plan, runs, told, plans=plans, folder=tmp_path).run() == 0
    assert [attempt.plan.cluster.devices for attempt in runs.attempts] == [count, 1, count]
    assert [attempt.path for attempt in runs.attempts] == [None, Path("1.json"), None]
    assert left == [False, True, False, True, False, False]
    assert [(one.devices, one.step) for one in told if isinstance(one, RestartReport)] == [(1, 2), (count, 4)]


@pytest.mark.parametrize("text", ["four", "", "-1", "4.0", "9" * 10])
def test_a_file_of_devices_without_a_number(text: str, tmp_path: Path) -> None:
    (tmp_path / "devices").write_text(text, encoding="utf-8")
    with refused(RequestError, tmp_path / "devices", f"'{text}'"):
        devices_of(tmp_path, 4)


def test_how_many_devices_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.recovery.supervisor._accelerators", lambda: 0)
    assert devices_of(tmp_path, 4) == 4
    monkeypatch.setattr("runtime.recovery.supervisor._accelerators", lambda: 3)
    assert devices_of(tmp_path, 4) == 3
    (tmp_path / "devices").write_text("2\n", encoding="utf-8")
    assert devices_of(tmp_path, 4) == 2


def test_a_file_of_devices_that_has_no_number_is_told_once(tiny_plan: Plan, tmp_path: Path) -> None:
    count, told, left = tiny_plan.cluster.devices, list[Report](), list[bool]()
    devices = tmp_path / "devices"
    devices.write_text(str(count), encoding="utf-8")

    class Looking(Runs):
        def __call__(self, attempt: Attempt) -> int:
            for text in ("", str(count), "four", "four", "four", str(count), "four", "many", "many"):
                devices.write_text(text, encoding="utf-8")
                left.append(attempt.leave())
            return super().__call__(attempt)

    plans: Any = Fixed(Range(least=1, most=count), tiny_plan)
    assert supervised(tiny_plan, Looking((6, 0)), told, plans=plans, folder=tmp_path).run() == 0
    notes = [one.text for one in told if isinstance(one, NoticeReport)]
    assert [note.partition(": ")[2].partition(" is")[0] for note in notes] == ["'four'", "'many'"]
    assert not any(left)
