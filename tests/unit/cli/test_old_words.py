"""Options and keys of plan files that were called otherwise are taken, with one line that says the new word."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from planner.old_words import KEYS, with_new_options
from planner.plan.file import load_plan
from runtime.run_settings import parse_arguments

pytestmark = pytest.mark.usefixtures("searched_once")

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "2", "--global-batch", "8", "--micro-batches", "4")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that nobody names are written into the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", [("--copies", "2"), ("--copies=2",)], ids=str)
def test_an_old_option_decides_what_the_new_one_does(words: tuple[str, ...]) -> None:
    old = CliRunner().invoke(app, [*TINY, *words, "--json"])
    new = CliRunner().invoke(app, [*TINY, "--interleave", "2", "--json"])
    assert (old.exit_code, old.stderr) == (0, "plan: --copies is now --interleave\n")
    assert (new.exit_code, new.stderr) == (0, "")
    assert json.loads(old.stdout)["interleave"] == json.loads(new.stdout)["interleave"] == 2


def test_the_degree_of_data_parallelism_keeps_its_word() -> None:
    made = CliRunner().invoke(app, [*TINY, "--data", "2", "--zero", "0", "-q", "-o", "run"])
    assert (made.exit_code, made.stderr) == (0, "")


def test_what_stands_behind_two_dashes_is_no_option() -> None:
    assert with_new_options("run", ["--data", "a:b", "--", "--copies"]) == (
        ["--dataset", "a:b", "--", "--copies"],
        ["--data is now --dataset"],
    )


def test_ranks_are_told_in_old_words_too() -> None:
    settings = parse_arguments(["plan.json", "--data", "a:b", "--copies"]).settings
    assert (settings.dataset, settings.state_replicas) == ("a:b", True)


def test_an_old_plan_file_is_read_with_one_line_for_each_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    made = CliRunner().invoke(app, [*TINY, "--interleave", "2", "-q", "-o", str(path)])
    assert made.exit_code == 0, made.output
    content = json.loads(path.read_text())
    content["training"]["copies"] = content["training"].pop("interleave")
    content["prediction"]["parked"] = {"host": 5.0}
    old = tmp_path / "old.json"
    old.write_text(json.dumps(content))
    capfd.readouterr()
    found = load_plan(old)
    said = capfd.readouterr().err.splitlines()
    assert (found.training.interleave, dict(found.prediction.offloaded)) == (2, {"host": 5.0})
    assert len(said) == len(KEYS)
    assert "training.copies is now training.interleave" in said[0]
    assert "prediction.parked is now prediction.offloaded" in said[1]


def test_a_key_under_both_words_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    CliRunner().invoke(app, [*TINY, "--interleave", "2", "-q", "-o", str(path)])
    content = json.loads(path.read_text())
    content["training"]["copies"] = 2
    path.write_text(json.dumps(content))
    shown = CliRunner().invoke(app, ["show", str(path)])
    assert shown.exit_code == 2
    assert "training.copies" in shown.stderr
