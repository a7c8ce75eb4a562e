"""The script of docs/training-script.md trains on one process and on two, alike, and goes on where it has ended."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "training-script.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (\S.*)$", PAGE.partition("```python")[0], re.MULTILINE)
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LAUNCH = {"torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"], "python": [sys.executable]}


def said_by(command: str) -> list[str]:
    """What a command of the page prints at its steps."""
    program, *rest = shlex.split(command)
    if program == "plan":
        done = CliRunner().invoke(app, rest)
        assert done.exit_code == 0, done.output
        return []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [*LAUNCH[program], *rest]
    ended = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=600)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return re.findall(r"^step .*$", ended.stdout, re.MULTILINE)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    return tmp_path


def losses(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


@pytest.mark.thorough
def test_the_script_does_what_the_page_says(here: Path) -> None:
    plan_two, run_two, plan_one, run_one = COMMANDS
    said_by(plan_two)
    two = said_by(run_two)
    assert [line.split()[1] for line in two] == ["10", "20"]
    assert losses(two)[-1] < losses(two)[1]  # held out, in the end and before
    said_by(plan_one)
    assert losses(said_by(run_one)) == pytest.approx(losses(two), abs=2e-4)
    assert said_by(run_one) == []  # it has made all its steps
