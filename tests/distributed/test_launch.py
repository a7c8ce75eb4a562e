"""`python -m runtime`: real torchrun processes on loopback."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.file import save_plan
from planner.plan.plan import Plan
from runtime.launch import launch

ROOT = Path(__file__).resolve().parents[2]


def _plans() -> ModuleType:
    specification = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("plans.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["plans"] = module
    specification.loader.exec_module(module)
    return module


def _plan(reference: str, sequence_length: int | None) -> Plan:
    plans = _plans()
    built = build_model(reference, dtype="float32", device="cpu", sequence_length=sequence_length)
    graph = trace(built.module, built.args, built.kwargs)
    plan = plans.hand_plan("zero1", reference, plans.mesh_of(2), graph=graph, samples=built.batch, micro_batches=2)
    return replace(plan, model=replace(plan.model, sequence_length=sequence_length))


def test_the_plan_agrees_with_the_unsharded_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    save_plan(_plan("llama-tiny", 8), path)
    code = launch(path, steps=3)
    out, err = capfd.readouterr()
    assert code == 0, out + err
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["step", "1"], ["step", "2"], ["step", "3"]]
    assert "agrees with the unsharded model" in lines[3]
    assert err == ""


def test_an_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = _plan("llama-tiny", 8)
    save_plan(replace(plan, model=replace(plan.model, fingerprint="sha256:" + "0" * 64)), path)
    done = subprocess.run(
        [sys.executable, "-m", "runtime", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: the plan is for another graph")
    assert len(done.stderr.splitlines()) == 1


FACTORY = """
import os

import torch

class Square(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.weight).pow(2).mean()

def make():
    if os.environ.get("RANK") == "1":
        raise OSError("the disk of rank 1 is broken")
    return Square(), (torch.randn(2, 4),)
"""


def test_one_failing_rank_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "squares.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_plan(_plan("squares:make", None), tmp_path / "plan.json")
    start = time.monotonic()
    assert launch(tmp_path / "plan.json", steps=1) == 2
    assert time.monotonic() - start < 60
    assert capfd.readouterr().err == "error: the factory squares:make raised OSError: the disk of rank 1 is broken\n"


def test_floating_point_inputs_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "healthy.py").write_text(FACTORY.replace('== "1"', '== "never"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_plan(_plan("healthy:make", None), tmp_path / "plan.json")
    assert launch(tmp_path / "plan.json", steps=2, check=False) == 0
    assert "unsharded" not in capfd.readouterr().out


def _processes_of(path: Path) -> list[int]:
    """Processes whose command line names this plan."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if str(path).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def _started(path: Path) -> "subprocess.Popen[str]":
    """A long run that has made its first step."""
    command = [sys.executable, "-m", "runtime", str(path), "--steps", "100000", "--no-check"]
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stdout is not None
    assert run.stdout.readline().startswith("step")
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_stops_the_run_stops_its_ranks(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "plan.json"
    save_plan(_plan("llama-tiny", 8), path)
    run = _started(path)
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode not in (None, 0)
    deadline = time.monotonic() + 15
    while _processes_of(path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _processes_of(path) == []


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(_plan("llama-tiny", 8), path)
    run = _started(path)
    by_rank = {}
    for process in _processes_of(path):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            by_rank.update({word[5:]: process for word in environment if word.startswith(b"RANK=")})
    os.kill(by_rank[b"1"], signal.SIGKILL)
    _, err = run.communicate(timeout=90)
    assert run.returncode == 1
    assert err.startswith("error: rank 1 was ended by SIGKILL")
    assert len(err.splitlines()) == 1
