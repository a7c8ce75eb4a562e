"""Real runs whose folder is copied, asked for twice, or left by a launcher that was killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from planner.cli.main import app
from planner.plan.file import save_plan
from runtime.checkpoint.folder import checkpoints, newest
from tests.distributed.forked_ranks import forked_ranks
from tests.distributed.test_launch import plan_for

DEADLINE = 240.0
ENDLESS = 100_000


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "plan.json"
    save_plan(plan_for("llama-tiny", 8), path)
    return path


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("PLAN_STATE_REPLICAS", str(folder))
    return folder


def words(plan: Path, folder: Path, steps: int) -> list[str]:
    return ["run", str(plan), "--steps", str(steps), "--no-check", "--json", "--save", str(folder)]


def ran(plan: Path, folder: Path, steps: int, *options: str) -> Result:
    """A `plan run` of this process, which has ended."""
    with forked_ranks():
        return CliRunner().invoke(app, [*words(plan, folder, steps), *options])


def events(kind: str, said: str) -> Iterator[dict[str, object]]:
    found = (json.loads(line) for line in said.splitlines() if line.startswith("{") and line.endswith("}"))
    yield from (event for event in found if event["event"] == kind)


def steps(said: str) -> list[int]:
    return [int(str(event["step"])) for event in events("step", said)]


class Run:
    """A `plan run` of a process of its own, with copies in memory, in a folder."""

    def __init__(self, plan: Path, folder: Path, steps: int, *options: str) -> None:
        self.out = folder.parent / f"{folder.name}.{time.monotonic_ns()}"
        command = [sys.executable, "-m", "planner.cli.main", *words(plan, folder, steps), *options]
        with open(self.out, "w") as out, open(f"{self.out}.err", "w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    def until(self, done: Callable[[], bool]) -> None:
        ends = time.monotonic() + DEADLINE
        while not done():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < ends, self.said()
            time.sleep(0.05)

    def ended(self) -> int:
        return self.process.wait(DEADLINE)

    def said(self) -> str:
        return Path(f"{self.out}.err").read_text()

    def steps(self) -> list[int]:
        return steps(self.out.read_text())


@pytest.mark.exhaustive
def test_a_killed_launcher_a_second_run_and_a_copy(two: Path, memory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    first = Run(two, folder, ENDLESS, "--save-every", "5", "--state-replicas")
    try:
        first.until(lambda: newest(folder) is not None)
        second = ran(two, folder, ENDLESS, "--continue")
        assert second.exit_code == 2
        assert f"a run writes there already: process {first.process.pid} on " in second.stderr
        at = max(first.steps())
        first.until(lambda: max(first.steps()) >= at + 7)
    finally:
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    assert len(list(memory.glob("plan-run-*"))) == 1
    shutil.copytree(folder, tmp_path / "copied", ignore=shutil.ignore_patterns(".*.part"))  # of ranks that end
    copied = ran(two, tmp_path / "copied", ENDLESS, "--continue")
    assert copied.exit_code == 2
    assert "copied: is a copy of the folder of run" in copied.stderr

    last = max(first.steps())
    then = ran(two, folder, last + 4, "--save-every", "1000", "--continue", "--state-replicas")
    assert then.exit_code == 0, then.output
    notices = [str(event["text"]) for event in events("notice", then.stdout)]
    assert f"was locked by process {first.process.pid} on " in notices[0]
    (went_on,) = [note for note in notices if note.startswith("resuming from state replicas in memory, step ")]
    assert min(steps(then.stdout)) == int(went_on.rpartition(" ")[2]) + 1 >= last
    assert list(memory.iterdir()) == []
    assert not (folder / "lock").exists()
    assert {oct(path.stat().st_mode & 0o077) for path in folder.rglob("*")} == {"0o0"}

    assert CliRunner().invoke(app, ["checkpoint", "adopt", str(tmp_path / "copied")]).exit_code == 0
    step = int(checkpoints(tmp_path / "copied")[-1].name[5:])
    copied = ran(two, tmp_path / "copied", step + 1, "--continue")
    assert copied.exit_code == 0, copied.output
    assert steps(copied.stdout) == [step + 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["SIGTERM", "a rank is killed"])
def test_a_run_that_is_stopped_leaves_no_memory_and_no_lock(how: str, two: Path, memory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    run = Run(two, folder, ENDLESS, "--save-every", "1000", "--state-replicas")
    try:
        run.until(lambda: len(run.steps()) >= 3)
        if how == "SIGTERM":
            run.process.send_signal(signal.SIGTERM)
        else:
            os.kill(_a_rank(memory), signal.SIGKILL)
        assert run.ended() == (143 if how == "SIGTERM" else 1)
    finally:
        run.process.kill()
        run.process.wait()
    assert list(memory.iterdir()) == []
    assert not (folder / "lock").exists()


def _a_rank(memory: Path) -> int:
    """The process of rank 1 of the run with copies in this folder."""
    wanted = {f"PLAN_STATE_REPLICAS={memory}".encode(), b"LOCAL_RANK=1"}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted <= {*environment}:
            return int(path.parent.name)
    raise AssertionError("there is no rank")
