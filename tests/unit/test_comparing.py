"""Cases side by side, and how many devices are enough."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import planner
from planner.api import comparing
from planner.api.comparing import Case, Outcome
from planner.cli.commands.compare_cases import _number, _remark, days_text, parse_prices
from planner.cli.main import app
from planner.errors import RequestError
from planner.plan.plan import Plan
from tests.refusals import refused


@pytest.fixture(scope="module")
def traced() -> planner.TracedModel:
    return planner.trace("llama-tiny", precision="fp32")


@pytest.mark.slow
def test_cases_say_what_training_takes(traced: planner.TracedModel) -> None:
    found = planner.compare(traced, "cpu", devices=[1, 2], tokens=1e9, price={"cpu": 0.5}, failures=0.01)
    one, two = found.outcomes
    assert one.plan is not None
    assert one.step is not None and one.days is not None and one.cost is not None  # noqa: PT018
    tokens = one.plan.training.global_batch * 128
    assert one.days[0] == pytest.approx(one.step[0] * 1e9 / tokens / 86400 * one.slowdown)
    assert one.cost[0] == pytest.approx(one.days[0] * 24 * 0.5)
    assert one.days[1] < one.days[0] < one.days[2]
    assert (one.efficiency, found.fastest, found.cheapest) == (None, two, one)
    assert two.efficiency == pytest.approx(two.tokens_per_second / one.tokens_per_second / 2)  # type: ignore[operator]
    assert "<table>" in found._repr_html_()
    with refused(RequestError, "h100-80gb", "cpu"):
        planner.compare(traced, "cpu", devices=1, price={"h100": 1.0})
    with refused(RequestError, "devices", "0"):
        planner.compare(traced, "cpu", devices=[0])


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"pinned": {"tensr": 2}}, "tensor"),
        ({"objective": "speed"}, "speed"),
        ({"update": {"clip": 1}}, "clip_norm"),
        ({"shard": {"*q_proj*": 1}}, "{'*q_proj*': 'b,o'}"),
    ],
)
def test_an_option_that_no_case_can_have_is_refused_at_once(options: dict[str, Any], fact: str) -> None:
    with refused(RequestError, fact):
        planner.compare("llama-tiny", "cpu", devices=[1, 2], **options)
    with refused(RequestError, fact):
        planner.capacity("llama-tiny", "cpu", days=1, tokens=1e9, **options)


def test_a_case_that_does_not_fit_says_why_and_the_others_stand(traced: planner.TracedModel) -> None:
    found = planner.compare(traced, "cpu", devices=[2, 3], pinned={"pipeline": 2})
    assert [one.plan is None for one in found.outcomes] == [False, True]
    assert "3" in found.outcomes[1].reason
    assert found.fastest is found.outcomes[0]


def test_levels_and_precision_are_those_of_every_case(traced: planner.TracedModel) -> None:
    pinned = {"micro_batch": 1, "recompute": "none", "zero": 0}
    levels, degrees = "node=4,cluster@25", {"data": 16, **pinned}
    (one,) = planner.compare(traced, "h100", devices=16, cluster=levels, pinned=degrees).outcomes
    assert one.plan is not None
    assert (one.plan.cluster.devices, one.plan.cluster.composition) == (16, "node=4@450,cluster@25")
    with refused(RequestError, "6 devices", "4 and 8"):
        planner.compare(traced, "h100", devices=6, cluster=levels)
    (other,) = planner.compare(traced, "h100", devices=1, precision="bf16").outcomes
    assert "the model is traced" in other.reason
    (named,) = planner.compare("llama-tiny", "h100", devices=1, precision="fp8", seq_len=32, pinned=pinned).outcomes
    assert named.plan is not None
    assert named.plan.training.precision == "bf16"


def test_no_more_devices_are_tried_than_the_levels_join(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def compare(model: Any, hardware: Any, *, devices: int, tokens: float, **options: Any) -> comparing.CaseComparison:
        assert options["cluster"] == "node=4,cluster=6"
        asked.append(devices)
        case = Case(model="llama-tiny", hardware="h", devices=devices)
        return comparing.CaseComparison(outcomes=(Outcome(case=case, plan=None, tokens=tokens),))

    monkeypatch.setattr(comparing, "compare", compare)
    found = planner.capacity("llama-tiny", "h100", days=1, tokens=1e9, cluster="node=4,cluster=6")
    assert (found.answer, max(asked)) == (None, 24)


def test_the_fewest_devices_that_are_enough_are_found(
    traced: planner.TracedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planner.estimate(traced, "cpu", devices=1)
    asked: list[int] = []

    def compare(model: Any, hardware: Any, *, devices: int, tokens: float, **_: Any) -> comparing.CaseComparison:
        asked.append(devices)
        case = Case(model="m", hardware="h", devices=devices)
        outcome = Outcome(case=case, plan=_quicker(plan, devices), tokens=tokens)
        return comparing.CaseComparison(outcomes=(outcome,))

    monkeypatch.setattr(comparing, "compare", compare)
    one = _days(plan, 1e9)
    for wanted, enough in ((one / 100, 128), (one / 8, 8), (one / 97, 128), (one / 90, 96)):
        asked.clear()
        found = planner.capacity(traced, "h100", days=wanted, tokens=1e9)
        assert found.answer is not None
        assert found.answer.case.devices == enough, asked
        assert len(asked) <= 6
    assert planner.capacity(traced, "h100", days=one / 1e9, tokens=1e9).answer is None


def _quicker(plan: Plan, times: int) -> Plan:
    from dataclasses import replace

    seconds = plan.prediction.step_seconds / times
    return replace(plan, prediction=replace(plan.prediction, step_seconds=seconds, low_seconds=None, high_seconds=None))


def _days(plan: Plan, tokens: float) -> float:
    outcome = Outcome(case=Case(model="m", hardware="h", devices=1), plan=plan, tokens=tokens)
    assert outcome.days is not None
    return outcome.days[0]


def test_prices_are_read() -> None:
    assert parse_prices("2.5") == 2.5
    assert parse_prices("h100=2.5, b200=5") == {"h100": 2.5, "b200": 5.0}
    for text in ("h100=", "h100", "1,2", "h100=1,2", ""):
        with refused(RequestError, "--price", "h100=2.5,b200=5"):
            parse_prices(text)
    for text, value in (("-3", "-3"), ("h100=1,b200=nan", "nan"), ("inf", "inf")):
        with refused(RequestError, "--price", f"{value} is no price"):
            parse_prices(text)


def test_what_cheapest_means_without_all_prices_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*costs: tuple[float, float, float] | None) -> str:
        cases = zip(("a100", "h100", "b200"), costs, strict=False)
        more = {"days": (1.0, 1.0, 1.0), "efficiency": None}
        outcomes = [
            SimpleNamespace(case=Case(model="m", hardware=name, devices=8), cost=cost, **more) for name, cost in cases
        ]
        _remark(SimpleNamespace(outcomes=outcomes, stopped=False), 0.0)  # type: ignore[arg-type]
        return capsys.readouterr().out

    money = (2.0, 1.0, 3.0)
    assert "Cheapest: the fewest device-hours, as there is no price of b200, h100 (--price)" in told(money, None, None)
    assert "Cheapest" not in told(money, money) + told(None, None)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"days": 0.0}, ("days", 0.0)),
        ({"days": 1.0, "failures": math.inf}, ("failures", "inf")),
        ({"days": 1.0, "failures": 1.0, "restart_seconds": math.inf}, ("restart_seconds", "inf")),
        ({"days": 1.0, "price": math.inf}, ("price of h100-80gb", "inf")),
    ],
)
def test_numbers_that_no_training_has_are_refused(options: dict[str, float], facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        planner.capacity("llama-tiny", "h100", tokens=1e9, **options)


def test_a_capacity_is_that_of_one_profile() -> None:
    with refused(RequestError, "h100,b200", "one profile"):
        planner.capacity("llama-tiny", "h100,b200", days=1, tokens=1e9)
    with refused(RequestError, "h100:8,a100:8", "groups", "one profile"):
        planner.capacity("llama-tiny", "h100:8,a100:8", days=1, tokens=1e9)


def test_a_capacity_that_no_number_of_devices_has_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images have no tokens; less than a node is never looked at."""
    asked = list[int]()

    def compare(model: Any, hardware: Any, *, devices: int, tokens: float, **_: Any) -> comparing.CaseComparison:
        asked.append(devices)
        plan = cast(Plan, SimpleNamespace(model=SimpleNamespace(sequence_length=None)))
        case = Case(model="resnet-tiny", hardware="h", devices=devices)
        return comparing.CaseComparison(outcomes=(Outcome(case=case, plan=plan, tokens=tokens),))

    monkeypatch.setattr(comparing, "compare", compare)
    with refused(RequestError, "tokens", "resnet-tiny", "no sequences"):
        planner.capacity("resnet-tiny", "h100", days=1, tokens=1e9)
    assert len(asked) == 1
    with refused(RequestError, "most", 4, 8):
        planner.capacity("llama-tiny", "h100", days=1, tokens=1e9, most=4)


@pytest.mark.parametrize(
    ("days", "available", "told"),
    [(30.011737, 30, "30.01"), (30.0004, 30, "30.0004"), (29.99, 30, "30"), (38.84, 30, "38.8"), (30.0, 30, "30")],
)
def test_days_beyond_those_available_look_like_it(days: float, available: float, told: str) -> None:
    assert days_text(days, available) == told


@pytest.mark.parametrize("command", [["compare", "--devices", "8"], ["capacity", "--days", "1", "--tokens", "1T"]])
def test_commands_have_levels_and_precision(command: list[str]) -> None:
    call = [*command, "--model", "llama-tiny"]
    wrong = CliRunner().invoke(app, [*call, "--cluster", "nod=4,cluster@25"])
    assert "--cluster 'nod=4,cluster@25': h100-80gb has no level called nod; did you mean node?" in wrong.output
    wrong = CliRunner().invoke(app, [*call, "--cluster", "node=4,cluster@25", "--precision", "fp9"])
    assert "unknown value for precision: 'fp9'" in wrong.output


def test_levels_and_precision_are_not_given_with_a_plan_file() -> None:
    for option in (["--cluster", "node=4,cluster"], ["--precision", "bf16"]):
        for more in ([], ["--engines", "torch"]):
            assert "a.json: " in CliRunner().invoke(app, ["compare", "a.json", *option, *more]).output


@pytest.mark.slow
def test_operators_of_replicas_are_those_of_every_case(tmp_path: Path) -> None:
    call = ["compare", "--model", "llama-tiny", "--seq-len", "16", "--devices", "1,2", "--hardware", "cpu"]
    found = CliRunner().invoke(app, [*call, "--per-replica", "nothing", "--json"])
    assert found.exit_code == 3
    assert all("'nothing' means no operator" in row["reason"] for row in json.loads(found.stdout)["rows"])
    for more in (["--engines", "torch"], []):
        wrong = CliRunner().invoke(app, ["compare", str(tmp_path / "a.json"), "--per-replica", "*", *more])
        assert wrong.exit_code == 2
        assert "a.json: " in wrong.output


@pytest.mark.thorough
@pytest.mark.slow
def test_engines_are_not_told_of_operators_of_replicas() -> None:
    call = ["compare", "--model", "llama-tiny", "--seq-len", "16", "--devices", "2", "--hardware", "cpu"]
    told = CliRunner().invoke(app, [*call, "--per-replica", "*cross_entropy*", "--engines", "torch"])
    assert "plain PyTorch is not told which operators replicas compute by themselves" in told.output


@pytest.mark.parametrize(
    ("value", "told"), [(999.7, "1,000"), (9_999, "9,999"), (12_345, "12.3k"), (999_700, "1M"), (2.5e12, "2.5T")]
)
def test_large_numbers_have_no_exponent(value: float, told: str) -> None:
    assert _number(value) == told
