"""Every answer says whether a limit ended its search: its plan is then the best so far."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import planner
from planner.api import comparing, replanning
from planner.cli.commands import compare_engines
from planner.cli.commands.compare_cases import _print_capacity, _print_cases, capacity_content
from planner.cli.commands.compare_engines import Row
from planner.cli.main import app
from planner.plan.layout.roles import roles
from planner.strategy_search.result import SearchResult
from planner.ui.content import Shown, plan_content

SAID = "Stopped by the planner's memory limit"


@pytest.fixture(scope="module")
def traced() -> planner.TracedModel:
    return planner.trace("llama-tiny", precision="fp32")


@pytest.fixture(scope="module")
def result(traced: planner.TracedModel) -> SearchResult:
    return planner.search(traced, "cpu", devices=2, pinned={"pipeline": 1, "data": 2})


def cut_short(search: Callable[..., SearchResult]) -> Callable[..., SearchResult]:
    return lambda *given, **named: search(*given, **named).cut_short("memory")


def test_a_case_whose_search_was_ended_by_memory_says_so(
    traced: planner.TracedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparing, "search", cut_short(comparing.search))
    found = planner.compare(traced, "cpu", devices=2, pinned={"pipeline": 1, "data": 2})
    assert [row["stopped_by"] for row in found.to_rows()] == ["memory"]
    _print_cases(found.outcomes)
    assert f"llama-tiny on 2 x cpu: {SAID}; its plan is the best so far" in capsys.readouterr().out


def test_a_capacity_that_was_interrupted_says_so(
    traced: planner.TracedModel,
    result: SearchResult,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[int] = []

    def compare(*_: object, devices: int, tokens: float, **__: object) -> comparing.CaseComparison:
        asked.append(devices)
        case = comparing.Case(model="llama-tiny", hardware="cpu", devices=devices)
        return comparing.CaseComparison(outcomes=(comparing.Outcome(case=case, plan=result.plan, tokens=tokens),))

    monkeypatch.setattr(comparing, "compare", compare)
    for most, stopped in ((1, True), (99, False)):
        asked.clear()
        found = planner.capacity(traced, "cpu", days=1e9, tokens=1e9, cancelled=lambda most=most: len(asked) >= most)
        assert (found.stopped, capacity_content(found)["stopped"]) == (stopped, stopped)
        _print_capacity(found)
        assert ("Stopped by Ctrl-C: fewer devices may be enough" in capsys.readouterr().out) == stopped


def test_an_engine_whose_search_was_ended_says_so(result: SearchResult, capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(engine=None, name="this project", software="pytorch", result=result.cut_short("memory"))
    assert (row.content()["stopped_by"], Row.content(row)["why"]) == ("memory", None)
    compare_engines.show([row])
    assert f"this project: {SAID}; its plan is the best so far" in capsys.readouterr().out


def test_a_page_says_that_its_search_was_ended(result: SearchResult) -> None:
    short = result.cut_short("memory")
    proofs = [plan_content(Shown(result=one, final=final))["proof"] for one, final in (
        (result, True), (short, False), (short, True),
    )]  # fmt: skip
    assert proofs[0] == proofs[1]
    assert proofs[2] == f"{SAID}; this is the best so far. {proofs[0]}"


def test_a_plan_that_is_searched_again_says_that_it_was_ended(
    result: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replanning, "search", cut_short(replanning.search))
    planner.save(result.plan, tmp_path / "plan.json")
    command = ["replan", str(tmp_path / "plan.json"), "--hardware", "cpu"]
    assert f"{SAID}: there may be faster plans" in CliRunner().invoke(app, command).output
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["stopped"] is True


def test_advice_without_time_says_so(tmp_path: Path) -> None:
    """It said that nothing faster was found, as after a search."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    )
    command = ["advise", str(file), "--model", "llama-tiny", "--devices", "4", "--time-limit", "0"]
    assert "Stopped by the time limit: there may be better ones." in CliRunner().invoke(app, command).output
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["stopped_by"] == "time"


def test_a_forward_pass_shards_weights_alone(traced: planner.TracedModel) -> None:
    pinned = {"schedule": "forward", "data": 4, "zero": 3}
    assert roles(planner.search(traced, "cpu", devices=4, pinned=pinned).bound).zero == "3 (weights)"
