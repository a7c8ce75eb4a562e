"""The loop of measuring, correcting and planning again, by its commands: a second round corrects the first."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hardware_profiles import load_profile
from hardware_profiles.run_record import dump_run_record
from planner.cli.commands.replan import _levels_left_out
from planner.cli.main import app
from planner.plan.file import load_plan
from tests.unit.cli.test_answers import TINY, record_of

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def done(*words: str) -> dict[str, object]:
    """The answer of a command that succeeds."""
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def ran(plan: Path, times: float) -> str:
    """The file of a run in which all took so many times what its plan says."""
    record = record_of(load_plan(plan))
    rank, *_ = record.ranks
    seconds = {name: times * value for name, value in record.plan.predicted.items()}
    path = plan.with_suffix(".run.json")
    ranks, steps = (replace(rank, seconds=seconds),) * len(record.ranks), (sum(seconds.values()),) * 8
    path.write_text(dump_run_record(replace(record, ranks=ranks, step_seconds=steps)), encoding="utf-8")
    return str(path)


def test_two_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced_once: None) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, [*TINY, "--buckets", "none", "-q", "-o", "first.json"]).exit_code == 0
    first = ran(Path("first.json"), 2.0)
    done("fit", first, "-o", "mine.toml")
    answer = done("replan", "first.json", "--hardware", "mine.toml", "-o", "second.json")
    second = ran(Path("second.json"), 1.25)

    found = done("compare", "second.json", second, "--hardware", "mine.toml")
    assert found["predicted_seconds"] == answer["best"]["step_seconds"]  # type: ignore[index]
    assert found["error"] == pytest.approx(1 / 1.25 - 1)
    terms = {one["name"]: one["predicted"] for one in found["terms"]}  # type: ignore[attr-defined]
    classes = {one["name"]: one["predicted"] for one in found["classes"]}  # type: ignore[attr-defined]
    assert classes["optimizer"] == pytest.approx(terms["update"])

    another = CliRunner().invoke(app, ["compare", "first.json", first, "--hardware", "mine.toml"])
    assert another.exit_code == 2
    assert "plan replan" in another.stderr  # its terms are by another profile

    for words in (
        ("diff", "first.json", "second.json"),  # one of them is for a profile that is shipped
        ("explain", "second.json", "--no-search"),
        ("audit", "second.json"),
    ):
        assert done(*words, "--hardware", "mine.toml")
        refused = CliRunner().invoke(app, [*words])
        assert refused.exit_code == 2
        assert "made for the profile 'mine'" in refused.stderr
        assert "--hardware mine.toml" in refused.stderr

    done("fit", second, "--hardware", "mine.toml", "-o", "mine2.toml")
    was, once, twice = (load_profile(name) for name in ("cpu", "mine.toml", "mine2.toml"))
    for machine, times in ((once, 2.0), (twice, 2.5)):
        assert machine.device.launch_latency == pytest.approx(times * was.device.launch_latency, rel=0.1)
        assert machine.levels[0].bandwidth == pytest.approx(was.levels[0].bandwidth / times, rel=0.1)
    (fact,) = (one for one in twice.facts if one.key == "device.launch_latency_us")
    (before,) = (one for one in was.facts if one.key == "device.launch_latency_us")
    assert fact.source.count("[was: ") == 2
    assert before.source in fact.source

    for words, said in (
        ((first, "--hardware", "mine.toml"), "predicted by profile 'cpu', but mine.toml is 'mine'"),
        ((second,), "give the file of the measured profile"),
        ((first, second), "2 profiles"),
    ):
        refused = CliRunner().invoke(app, ["fit", *words, "-o", "third.toml"])
        assert refused.exit_code == 2
        assert said in refused.stderr
    done("fit", first, "-o", "mine.toml", "--clock", "cpu")  # another profile of that name
    refused = CliRunner().invoke(app, ["fit", second, "--hardware", "mine.toml", "-o", "third.toml"])
    assert refused.exit_code == 2
    assert "another version of it" in refused.stderr
    assert not Path("third.toml").exists()


def test_a_plan_stays_where_nothing_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, [*TINY, "-q", "-o", "first.json"]).exit_code == 0
    again = CliRunner().invoke(app, ["replan", "first.json", "--hardware", "cpu", "-o", "second.json"])
    assert "No plan was found that takes 0.1% less: this one stays." in again.stdout
    assert load_plan(Path("second.json")) == load_plan(Path("first.json"))


def test_network_levels_that_are_left_out_are_named() -> None:
    """A copy of the profile under another name priced a plan by the network of the profile, without a word."""
    plan = load_plan(Path(__file__).parents[2] / "distributed" / "llama-tiny-in-two.json")
    composed = replace(plan, cluster=replace(plan.cluster, composition="node=4,cluster@25"))
    other = replace(plan, cluster=replace(plan.cluster, profile="mine"))
    assert _levels_left_out(composed, composed) == _levels_left_out(plan, other) == ""
    said = _levels_left_out(composed, other)
    assert all(word in said for word in ("mine", "node=4,cluster@25", plan.cluster.profile, "--cluster"))
