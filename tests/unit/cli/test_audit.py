"""`plan audit`: tables and a verdict for people, rows as JSON, exit code 1 where anything differs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from runtime.auditing import audit as auditing
from tests.distributed.language import CONFIGS


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "tiny.json"
    degrees = ["--data", "2", "--tensor", "2", "--pipeline", "2", "--micro-batches", "4", "--recompute", "none"]
    options = ["--model", "llama-tiny", "--devices", "8", "--hardware", "cpu", *degrees]
    made = CliRunner().invoke(app, [*options, "-o", str(path)])
    assert made.exit_code == 0, made.output
    return path


@pytest.mark.slow
@pytest.mark.thorough
def test_says_that_a_plan_agrees(plan_file: Path) -> None:
    done = CliRunner().invoke(app, ["audit", str(plan_file)])
    assert done.exit_code == 0, done.output
    assert "The runtime agrees with the plan" in done.output
    assert "predicted peak with allocator slack" in done.output


@pytest.mark.thorough
@pytest.mark.slow
def test_json_has_every_row(plan_file: Path) -> None:
    done = CliRunner().invoke(app, ["audit", str(plan_file), "--json"])
    content = json.loads(done.stdout)
    assert content["agrees"] is True
    for stage in content["stages"]:
        assert stage["collectives"]
        assert all(row["predicted"] == row["emitted"] for row in (*stage["collectives"], *stage["products"]))


@pytest.mark.thorough
def test_names_what_differs(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_of = auditing.local_work
    monkeypatch.setattr(auditing, "local_work", lambda *a: {k: f + 1 for k, f in work_of(*a).items()})
    done = CliRunner().invoke(app, ["audit", str(plan_file)])
    assert done.exit_code == 1
    assert "differs: model.layers.0" in done.output
    assert "more; --json lists all" in done.output
    assert "The runtime DIFFERS from the plan" in done.output


def test_a_file_that_is_none(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "none.json")])
    assert done.exit_code == 2


@pytest.mark.slow
@pytest.mark.thorough
def test_what_lives_in_the_gated_delta_rule_is_counted(tmp_path: Path) -> None:
    """It is an operator of our own, in whose backward pass more lives than it is made of; and no gradient of the zeros
    that its values are written to is sent anywhere."""
    plan, config = str(tmp_path / "plan.json"), str(CONFIGS / "kimi-linear")
    options = ["--devices", "2", "--hardware", "cpu", "--tensor", "2", "--global-batch", "4"]
    made = CliRunner().invoke(app, ["--model", config, *options, "-o", plan])
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(app, ["audit", plan, "--model", config])
    assert done.exit_code == 0, done.output
