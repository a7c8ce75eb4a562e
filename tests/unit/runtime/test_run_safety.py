"""What a run must not do to other folders, other runs and other people; said with what a user calls."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import runtime
from planner.cli.main import app
from planner.errors import CheckpointError
from runtime.checkpoint import tensor_files, writing
from runtime.checkpoint.folder import checkpoints, finished
from runtime.checkpoint.manifest import FORMAT_VERSION, Manifest, Progress, SavedFile, write_manifest
from runtime.checkpoint.source import located
from runtime.checkpoint.tensor_files import write_tensors
from runtime.launch.checkpointing import RunCheckpoints
from runtime.run_settings import RunSettings
from tests.refusals import refused
from tests.unit.runtime.checkpoint_states import plan_of, write
from tests.unit.runtime.test_finiteness import step_of

FORKED = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replicas of these runs lie beside them."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("PLAN_STATE_REPLICAS", str(folder))
    return folder


def a_checkpoint(folder: Path, step: int, **more: object) -> Path:
    """A whole one, of no tensors."""
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    progress = Progress(step=step, updates=step, samples=step, seed=0)
    manifest = Manifest(
        format_version=FORMAT_VERSION, kind="sliced", progress=progress, optimizer="sgd", files=(), tensors={}, **more
    )
    write_manifest(path, manifest)
    return path


def of_run(folder: Path, *steps: int) -> None:
    """Checkpoints that a run in a folder has written."""
    checkpoints = runtime.Checkpoints(folder)
    for step in steps:
        a_checkpoint(folder, step, origin=checkpoints.origin)
    checkpoints.close()


def ended(folder: Path, **settings: object) -> RunCheckpoints:
    """A run with copies in memory, to its end."""
    given = RunSettings(save=str(folder), state_replicas=True, check=False, **settings)  # type: ignore[arg-type]
    run = RunCheckpoints(given, lambda what: None)
    run.wait()
    return run


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[int]:
    """A run that another process has begun in a folder; gives its number, and kills it at the end."""
    here, there = FORKED.Pipe()

    def hold() -> None:
        checkpoints = runtime.Checkpoints(folder)
        there.send(str(checkpoints.folder))
        signal.pause()

    process = FORKED.Process(target=hold)
    process.start()
    try:
        assert here.poll(60)
        assert here.recv() == str(folder)
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("name", ["run", "run.json"])
@pytest.mark.parametrize("inside_json", [False, True])
def test_no_text_in_the_folder_leads_out_of_it(
    name: str, inside_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PLAN_STATE_REPLICAS")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("years of work")
    way = f"x/{'../' * 10}{victim.relative_to('/')}"
    save = tmp_path / "save"
    save.mkdir()
    record = {"run": "1" * 32, "folder": way, "inode": save.stat().st_ino, "file": 0, "path": "", "host": ""}
    (save / name).write_text(json.dumps(record) if inside_json else way)
    with suppress(CheckpointError):
        ended(save)
    assert (victim / "thesis.txt").read_text() == "years of work"
    shutil.rmtree("/dev/shm/plan-run-x", ignore_errors=True)  # what the fault left there


def test_the_folder_of_replicas_may_have_other_things_in_it(tmp_path: Path, replicas: Path) -> None:
    for name in ("step-notes.txt", "thesis.txt"):
        (replicas / name).write_text("years of work")
    ended(tmp_path / "save")
    assert sorted(path.name for path in replicas.iterdir()) == ["step-notes.txt", "thesis.txt"]


def test_a_copied_folder_does_not_go_on_as_the_run(tmp_path: Path) -> None:
    of_run(tmp_path / "a", 10)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with refused(CheckpointError, tmp_path / "b", "--save NEW", f"plan checkpoint adopt {tmp_path / 'b'}"):
        runtime.Checkpoints(tmp_path / "b")
    with refused(CheckpointError, tmp_path / "b", "--save NEW", f"plan checkpoint adopt {tmp_path / 'b'}"):
        ended(tmp_path / "b", go_on=True)
    os.rename(tmp_path / "a", tmp_path / "moved")
    found = runtime.Checkpoints(tmp_path / "moved")
    assert found.newest() == tmp_path / "moved" / "step-000010"
    found.close()
    adopted = CliRunner().invoke(app, ["checkpoint", "adopt", str(tmp_path / "b")])
    assert adopted.exit_code == 0, adopted.stderr
    again = runtime.Checkpoints(tmp_path / "b")
    assert again.newest() == tmp_path / "b" / "step-000010"
    assert again.origin.run == found.origin.run
    assert again.origin.folder != found.origin.folder
    again.close()


def test_checkpoints_of_another_run_are_not_gone_on_from(tmp_path: Path) -> None:
    of_run(tmp_path / "a", 10, 20)
    of_run(tmp_path / "b", 15)
    shutil.copytree(tmp_path / "a" / "step-000020", tmp_path / "b" / "step-000020")
    found = runtime.Checkpoints(tmp_path / "b")
    assert found.newest() == tmp_path / "b" / "step-000015"
    assert [note for note in found.notes if "step-000020 belongs to run" in note and "left alone" in note]
    shutil.rmtree(tmp_path / "b" / "step-000015")
    with refused(CheckpointError, "--continue", tmp_path / "b" / "step-000020", "--resume PATH"):
        found.newest()
    found.close()


def test_a_second_run_is_refused_and_one_that_was_killed_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with held_by_another_process(folder) as holder:
        with refused(CheckpointError, folder, f"process {holder}"):
            runtime.Checkpoints(folder)
        with refused(CheckpointError, folder, f"process {holder}"):
            ended(folder)
        assert runtime.Checkpoints(folder, read_only=True).newest() is None
    found = runtime.Checkpoints(folder)
    assert [note for note in found.notes if f"was locked by process {holder}" in note and "which has ended" in note]
    found.close()
    assert runtime.Checkpoints(folder).notes == ()


def test_a_checkpoint_without_a_manifest_is_said(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, 10)
    (a_checkpoint(tmp_path, 20) / "manifest.json").unlink()
    shown = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path)])
    assert shown.exit_code == 0
    said = "step-000020 has no manifest.json, so the checkpoint is incomplete; the newest checkpoint is step-000010"
    assert said in shown.stdout.replace("\n", " ")
    going_on = runtime.Checkpoints(tmp_path)
    assert going_on.newest() == tmp_path / "step-000010"
    assert [note for note in going_on.notes if said in note]
    going_on.close()
    (tmp_path / "step-000010" / "manifest.json").unlink()
    nothing = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path)])
    assert nothing.exit_code == 2
    assert "step-000020 has no manifest.json" in nothing.stderr.replace("\n", " ")


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_what_holds_weights_is_for_its_owner_alone(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        ended(tmp_path / "runs")
        write("llama", plan_of("llama", "zero3", (2,)), tmp_path / "runs" / "step-000007")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]}
    assert len(modes) > 5
    assert {path: oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}


def test_a_restart_does_not_undo_a_rollback(tmp_path: Path) -> None:
    settings = RunSettings(save=str(tmp_path / "a"), save_every=2, state_replicas=True, check=False, go_on=True)
    step, run = step_of(lambda x, w: x * w), RunCheckpoints(settings, lambda what: None)
    for _ in range(3):  # the checkpoint is of step 2, state replicas are of steps 2 and 3
        step(torch.ones(4, 8))
        run.save(step, None)
    run.go_back(step)
    run.close()
    again, restarted = step_of(lambda x, w: x * w), RunCheckpoints(settings, lambda what: None)
    restarted.restore(again)
    restarted.close()
    assert (step.steps, again.steps) == (2, 2)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_that_went_back_continues_its_own_line(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    of_run(folder, 1, 2, 3)
    start = RunSettings(save=str(folder), save_every=1, check=False, resume=str(folder / "step-000001"))
    step, run = step_of(lambda x, w: x * w), RunCheckpoints(replace(start, resume=None), lambda what: None)
    for _ in range(3):
        step(torch.ones(4, 8))
        run.save(step, None)
    run.wait()
    run.close()

    def last(**settings: object) -> tuple[int, tuple[str, ...]]:
        """Starts the run once more, without a step; the step from which it begins, and what it says."""
        run = RunCheckpoints(replace(start, **settings), lambda what: None)  # type: ignore[arg-type]
        run.restore(again := step_of(lambda x, w: x * w))
        run.close()
        return again.steps, run.notes

    assert last(resume=None, go_on=True)[0] == 3
    begun, notes = last()
    assert begun == 1
    assert [n for n in notes if n.startswith(f"step-000002, step-000003 in {folder} are left aside")]
    assert last(resume=None, go_on=True)[0] == 1  # also before it has saved again
    going_on = step_of(lambda x, w: x * w)
    run = RunCheckpoints(replace(start, keep=1), lambda what: None)
    run.restore(going_on)
    going_on(torch.ones(4, 8))
    run.save(going_on, None)
    run.wait()
    run.close()
    assert last(resume=None, go_on=True)[0] == 2
    assert [path.name for path in checkpoints(folder)] == ["step-000002", "step-000003"], "those aside are not deleted"
    assert last(resume=str(folder))[0] == 2
    assert finished(replace(start, resume=None, go_on=True, steps=3)) is None
    damaged = next((folder / "step-000002").glob("rank-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as found:
        last(resume=None, go_on=True)
    assert "step-000003" not in str(found.value)
    assert last(resume=str(folder / "step-000003"))[0] == 3
    assert last(resume=None, go_on=True)[0] == 3


def test_a_start_elsewhere_leaves_all_checkpoints_of_the_folder_aside(tmp_path: Path) -> None:
    for name in ("a", "b"):
        of_run(tmp_path / name, 10, 20, 30)
    opened = runtime.Checkpoints(tmp_path / "b")
    opened.go_back(tmp_path / "a" / "step-000010")
    assert [note for note in opened.notes if "step-000010, step-000020, step-000030" in note and "aside" in note]
    assert opened.newest(may_start=True) is None
    with refused(CheckpointError, tmp_path / "b", "left aside", f"--resume {tmp_path / 'b' / 'step-000030'}"):
        opened.newest()
    opened.close()
    assert located(tmp_path / "b") == tmp_path / "b" / "step-000030"


def test_every_block_of_a_checkpoint_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a large one would be taken for a hang."""
    said: list[str] = []

    def slowly(*given: Any) -> SavedFile:
        """Writes a block again and again, until the thread that waits has noticed."""
        *_, on_block = given
        for _ in range(1000):
            if any("writing a checkpoint" in one for one in said):
                break
            on_block()
            time.sleep(0.005)
        return write_tensors(*given)

    monkeypatch.setattr(writing, "write_tensors", slowly)
    monkeypatch.setattr(tensor_files, "_PART", 64)
    settings = RunSettings(save=str(tmp_path), save_every=1, check=False)
    step, run = step_of(lambda x, w: x * w), RunCheckpoints(settings, said.append)
    step(torch.ones(4, 8))
    run.save(step, None)
    run.wait()
    run.close()
    assert [one for one in said if one.startswith("writing a checkpoint, block")]
    said.clear()
    again = RunCheckpoints(replace(settings, go_on=True), said.append)
    again.restore(step_of(lambda x, w: x * w))
    again.close()
    path = tmp_path / "step-000001"
    size = sum(one.stat().st_size for one in path.glob("rank-*"))
    assert said.count(f"verifying {path}") >= size // 64 > 1
    assert [one for one in said if one.startswith("loading '") and one.endswith(str(path))]
