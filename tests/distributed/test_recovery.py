"""Runs that are hurt and go on: what they train is what an undisturbed run trains."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from planner.plan.file import save_plan
from runtime.checkpoint.folder import checkpoints, newest
from runtime.checkpoint.source import open_checkpoint
from tests.distributed.forked_ranks import forked_ranks
from tests.distributed.ports import free_port
from tests.distributed.soak import Found, Hurt, equal, faults_of, run, state_of
from tests.distributed.test_launch import plan_for

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 240.0


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for two processes."""
    path = tmp_path_factory.mktemp("two") / "plan.json"
    save_plan(plan_for("llama-tiny", 8), path)
    return path


@pytest.fixture(scope="module")
def undisturbed(two: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Twelve steps of it that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    with forked_ranks():
        words = ["run", str(two), "--steps", "12", "--no-check", "--json", "--save", str(folder), "--save-every", "4"]
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in done.stdout.splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    state = dict(state_of(folder))
    return Found(code=0, losses=losses, repeated=[], restarts=[], state=state, left=[], said=done.stderr)


@pytest.mark.slow
@pytest.mark.cases(0, 0)
@pytest.mark.parametrize("options", [("--state-replicas",), ()], ids=str)
def test_a_killed_worker_changes_nothing(
    two: Path, undisturbed: Found, tmp_path: Path, options: tuple[str, ...]
) -> None:
    hurt = Hurt(steps=12, kills=1, changes=0, seed=3)
    found = run(two, tmp_path, hurt, "--save-every", "4", "--restarts", "1", *options)
    assert faults_of(undisturbed, found, 12, changed=False) == []
    assert len(found.restarts) == 1
    assert "SIGKILL" in found.restarts[0]
    assert len(found.repeated) <= (1 if options else 4)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("devices", "fewest", "kills", "seed"),
    [pytest.param(2, 1, 1, 6, marks=pytest.mark.thorough), pytest.param(4, 2, 3, 1, marks=pytest.mark.exhaustive)],
)
def test_kills_and_changes_of_devices(tmp_path: Path, devices: int, fewest: int, kills: int, seed: int) -> None:
    """Short forms of `tests.distributed.soak`."""
    plan = tmp_path / "plan.json"
    words = ("--model", "llama-tiny", "--devices", str(devices), "--hardware", "cpu", "--global-batch", "8", "-q")
    subprocess.run([sys.executable, "-m", "planner.cli.main", *words, "-o", str(plan)], check=True)
    alone = run(plan, tmp_path / "alone", Hurt(steps=20, kills=0, changes=0), "--save-every", "5")
    hurt = Hurt(steps=20, kills=kills, changes=2, seed=seed, fewer=fewest, all=devices)
    found = run(plan, tmp_path / "hurt", hurt, "--save-every", "5", "--elastic", f"{fewest}:{devices}")
    assert faults_of(alone, found, 20, changed=True) == []
    assert sum("SIGKILL" in why for why in found.restarts) == kills, found.restarts
    assert sum("number of devices" in why for why in found.restarts) == 2, found.restarts
    assert [path.name.split("-")[0] for path in (tmp_path / "hurt" / "plans").iterdir()] == [str(fewest)]


def _torchrun(plan: Path, folder: Path, *options: str, nodes: str = "1", each: int = 2, port: int = 0) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(each),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", *options,
        "-m", "runtime", str(plan), "--steps", "12", "--no-check", "--save", str(folder), "--save-every", "4",
        "--continue", "--json",
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_torchrun_restarts(two: Path, undisturbed: Found, tmp_path: Path) -> None:
    """Whoever starts torchrun has it start the ranks again; they find by themselves where to go on."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = _torchrun(two, tmp_path, "--max-restarts", "2")
    with open(tmp_path / "noise", "w") as noise:
        process = subprocess.Popen(command, stdout=noise, stderr=noise, env=environment, cwd=tmp_path)
        try:
            ends = time.monotonic() + DEADLINE
            while newest(tmp_path) is None and process.poll() is None and time.monotonic() < ends:
                time.sleep(0.05)
            victims = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/status") if _is_rank(path, process)]
            assert len(victims) == 2
            os.kill(victims[1], signal.SIGKILL)
            assert process.wait(DEADLINE) == 0, (tmp_path / "noise").read_text()
        finally:
            process.kill()
            process.wait()
    assert equal(dict(state_of(tmp_path)), undisturbed.state)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000004", "step-000008", "step-000012"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_two_agents_of_torchrun_restart(two: Path, undisturbed: Found, tmp_path: Path, victim: int) -> None:
    """Each counts its restarts, and the agent whose rank was well counts none: the ranks agree on an attempt all the
    same, and find each other rather than the addresses of the dead."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = _torchrun(two, tmp_path, "--max-restarts", "2", nodes="2", each=1, port=free_port())
    with open(tmp_path / "noise", "w") as noise:
        agents = [subprocess.Popen(command, stdout=noise, stderr=noise, env=environment, cwd=tmp_path) for _ in "ab"]
        try:
            ends = time.monotonic() + DEADLINE
            while newest(tmp_path) is None and time.monotonic() < ends:
                time.sleep(0.05)
            status = Path("/proc").glob("[0-9]*/status")
            victims = [int(path.parent.name) for path in status if _is_rank(path, agents[victim])]
            os.kill(victims[0], signal.SIGKILL)
            assert [agent.wait(DEADLINE) for agent in agents] == [0, 0], (tmp_path / "noise").read_text()
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    assert equal(dict(state_of(tmp_path)), undisturbed.state)


def _is_rank(status: Path, agent: "subprocess.Popen[bytes]") -> bool:
    try:
        return f"PPid:\t{agent.pid}\n" in status.read_text()
    except OSError:
        return False


@pytest.mark.exhaustive
def test_ranks_take_the_plan_for_as_many_as_were_started(two: Path, undisturbed: Found, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*_torchrun(two, tmp_path, each=1), "--elastic", "1:2"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plan = open_checkpoint(tmp_path).manifest.written_under()  # type: ignore[union-attr]
    assert plan is not None
    assert plan.cluster.devices == 1
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    assert losses == pytest.approx(undisturbed.losses, rel=1e-4)
