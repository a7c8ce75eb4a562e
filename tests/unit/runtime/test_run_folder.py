"""The parts of a run's folder: its identity, its lock, marks of what may be deleted, and replicas in memory."""

import errno
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import CheckpointError, StoppedError
from runtime.checkpoint.folder import RunFolder, checkpoints, name_of, part_of
from runtime.checkpoint.opening import open_run
from runtime.launch.holding import holding_folder
from runtime.recovery.replica_folder import holding, open_replicas, replicas_of, sweep
from runtime.recovery.state_replicas import StateReplicas
from runtime.run_folder import owned
from runtime.run_folder.identity import RECORD, Origin, own_record, read_record
from runtime.run_folder.lock import LOCK, Lock, held
from runtime.run_folder.process import process_from, this_process
from runtime.run_settings import RunSettings
from tests.refusals import refused
from tests.unit.runtime.test_run_safety import FORKED, a_checkpoint

A = Origin(run="a" * 32, folder="b" * 32)
B = Origin(run="c" * 32, folder="d" * 32)
NAME = re.compile("ours-[0-9]+")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("PLAN_STATE_REPLICAS", str(folder))
    return folder


@contextmanager
def another_process(work: Callable[[], object]) -> Iterator[int]:
    """A process that has done some work and keeps what it holds, until it is killed."""
    here, there = FORKED.Pipe()

    def run() -> None:
        kept = work()
        there.send("ready")
        signal.pause()
        del kept

    process = FORKED.Process(target=run)
    process.start()
    try:
        assert here.poll(60), "it is not ready"
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


# identity


@pytest.mark.parametrize(
    "identity", ["", "a" * 31, "a" * 33, "A" * 32, "a" * 32 + "\n", "../" + "a" * 29, "g" * 32, "a/" * 16, 7, None]
)
@pytest.mark.parametrize("field", ["run", "folder"])
def test_an_identity_has_one_form(field: str, identity: object, tmp_path: Path) -> None:
    own_record(tmp_path)
    content = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps({**content, field: identity}))
    with refused(CheckpointError, tmp_path / RECORD, f"plan checkpoint adopt {tmp_path}"):
        read_record(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 60_000, "1" * 70_000, '{"run": 1}', "\xff"])
def test_a_record_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(text, encoding="latin-1")
    with refused(CheckpointError, tmp_path / RECORD, f"plan checkpoint adopt {tmp_path}"):
        own_record(tmp_path)


def test_a_folder_is_known_again_where_it_was_moved_and_not_where_it_was_copied(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    made = own_record(first)
    assert own_record(first) == made
    moved = first.rename(tmp_path / "moved")
    assert own_record(moved) == made
    shutil.copytree(moved, tmp_path / "copied")
    with refused(CheckpointError, tmp_path / "copied", first):
        own_record(tmp_path / "copied")
    text = (moved / RECORD).read_text()
    (moved / RECORD).unlink()
    (moved / RECORD).write_text(text)  # another inode: of a folder that was moved too, both witnesses are gone
    (moved / "more").write_text("")
    found = read_record(moved)
    assert found is not None
    assert found.is_of(moved) == ((moved / RECORD).stat().st_ino == made.file)
    moved.rename(first)
    assert own_record(first) == made, "its path and its own inode are right"


# marks


def test_only_what_is_ours_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = owned.Mark(kind="checkpoint", origin=A)

    def left(path: Path, inside: Path = tmp_path) -> str | None:
        return owned.remove(path, inside=inside, name=NAME, ours=lambda found: found == mark)

    victim = tmp_path / "victim"
    owned.make(victim, mark)
    (victim / "thesis.txt").write_text("years of work")
    (tmp_path / "ours-1").symlink_to(victim)
    owned.make(tmp_path / "ours-2", owned.Mark(kind="checkpoint", origin=B))
    owned.make(tmp_path / "ours-3", owned.Mark(kind="replicas", origin=A))
    for number in (2, 3, 4, 5):
        (tmp_path / f"ours-{number}").mkdir(exist_ok=True)
        (tmp_path / f"ours-{number}" / "file").write_text("")
    (tmp_path / "ours-5" / owned.MARK).symlink_to(victim / owned.MARK)
    (tmp_path / "ours-6").write_text("a file")
    said = {
        victim: "has a name that the runtime does not use",
        tmp_path / "ours-1": "is not a folder, or is a link to one",
        tmp_path / "ours-2": f"has the mark of {B}",
        tmp_path / "ours-3": f"has the mark of {A}",
        tmp_path / "ours-4": "has no mark of the runtime",
        tmp_path / "ours-5": "has no mark of the runtime",
        tmp_path / "ours-6": "is not a folder, or is a link to one",
        tmp_path / "victim" / ".." / "ours-2": f"has the mark of {B}",
        victim / "ours-7": f"is not in {tmp_path}",
    }
    assert {path: left(path) for path in said} == said
    owned.make(tmp_path / "ours-8", mark)
    (tmp_path / "ours-8" / "link").symlink_to(victim)
    (tmp_path / "ours-8" / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "ours-8" / "inner" / "link").symlink_to(victim)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: 12345)
        assert left(tmp_path / "ours-8") == "belongs to another user"
    assert left(tmp_path / "ours-8") is None
    assert left(tmp_path / "ours-8") is None, "it is gone"
    assert not (tmp_path / "ours-8").exists()
    assert (victim / "thesis.txt").read_text() == "years of work"


def test_what_a_killed_process_left_can_be_deleted_whenever_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark comes first and goes last: after each call that changes a disk."""
    mark, path = owned.Mark(kind="checkpoint", origin=A), tmp_path / "ours-1"
    calls = ("mkdir", "chmod", "open", "fchmod", "rename", "unlink", "rmdir")

    class DiedError(BaseException):
        pass

    def work() -> None:
        owned.make(path, mark)
        for name in "abc":
            (path / name).write_text("")
        owned.remove(path, inside=tmp_path, name=NAME, ours=lambda found: found == mark)

    for last in range(1, 200):
        count = iter(range(last))
        with monkeypatch.context() as patched:
            for name in calls:
                real = getattr(os, name)

                def dying(
                    *given: object, real: Callable[..., object] = real, left: Iterator[int] = count, **named: object
                ) -> object:
                    if next(left, None) is None:
                        raise DiedError
                    return real(*given, **named)

                patched.setattr(os, name, dying)
            try:
                work()
                break
            except DiedError:
                pass
        names = re.compile(r"ours-1(\.[0-9a-f]{8}\.new)?")
        for left in list(tmp_path.glob("ours-1*")):
            assert owned.remove(left, inside=tmp_path, name=names, ours=lambda found: found == mark) is None
            assert not left.exists(), last
    assert last > 10


def test_what_is_there_already_is_not_written_into(tmp_path: Path) -> None:
    mark = owned.Mark(kind="replicas", origin=A)
    (tmp_path / "victim").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_text("")
    owned.make(tmp_path / "other", owned.Mark(kind="replicas", origin=B))
    for name, fact in (("link", "a link"), ("foreign", "no mark of the runtime"), ("other", B.run[:8])):
        with refused(CheckpointError, tmp_path / name, fact):
            owned.make(tmp_path / name, mark)
    owned.make(tmp_path / "ours", mark)
    owned.make(tmp_path / "ours", mark)
    assert not list(tmp_path.glob("*.new"))


# the lock


def written_lock(folder: Path, **changes: object) -> None:
    """A lock of a process like this one, but for what is said."""
    path = folder / LOCK
    path.write_text("")
    holder = {**this_process().content(), **changes}
    content = {"holder": holder, "token": "t", "since": "some time", "inode": path.stat().st_ino}
    path.write_text(json.dumps(content))


def test_a_lock_is_held_by_one_process_until_its_end(tmp_path: Path) -> None:
    with (
        another_process(lambda: Lock(tmp_path)) as holder,
        refused(CheckpointError, f"process {holder}", tmp_path / LOCK),
    ):
        Lock(tmp_path)
    lock = Lock(tmp_path)
    assert lock.taken_over is not None
    assert f"process {holder} " in lock.taken_over
    lock.check()
    child = FORKED.Process(target=lock.release)
    child.start()
    child.join()
    lock.check()
    lock.release()
    assert held(tmp_path / LOCK) is None
    with refused(CheckpointError, tmp_path, "nobody", "--continue"):
        lock.check()


def test_a_lock_whose_file_has_another_number_is_still_ours(tmp_path: Path) -> None:
    """As on a network file system that was mounted anew while the run held it."""
    lock = Lock(tmp_path)
    os.link(tmp_path / LOCK, tmp_path / "kept")  # so that the number is not given again
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).write_bytes((tmp_path / "kept").read_bytes())
    lock.check()
    lock.release()
    assert held(tmp_path / LOCK) is None


def test_a_full_disk_leaves_no_empty_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("runtime.run_folder.lock.os.fsync", full)
        with refused(CheckpointError, tmp_path / LOCK, os.strerror(errno.ENOSPC)):
            Lock(tmp_path)
    assert held(tmp_path / LOCK) is None
    Lock(tmp_path, patience=1e6).release()


def test_a_number_that_was_given_to_another_process_is_no_holder(tmp_path: Path) -> None:
    written_lock(tmp_path, pid=os.getppid(), start="12345")
    lock = Lock(tmp_path, patience=1e6)
    assert f"process {os.getppid()} " in str(lock.taken_over)
    lock.release()


@pytest.mark.parametrize("text", [None, "", "{", '{"holder": 1}', "[" * 4000])
def test_a_holder_that_cannot_be_seen_is_gone_where_it_does_not_touch_the_lock(
    text: str | None, tmp_path: Path
) -> None:
    """Of another host, or of a lock that was half written."""

    def begin() -> None:
        written_lock(tmp_path, boot="another")
        if text is not None:
            (tmp_path / LOCK).write_text(text)

    begin()
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.01):
            os.utime(tmp_path / LOCK)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with refused(CheckpointError, tmp_path, tmp_path / LOCK):
            Lock(tmp_path, patience=5.0)
    finally:
        ended.set()
        beating.join()
    lock = Lock(tmp_path, patience=0.05)
    assert lock.taken_over is not None
    lock.release()


def test_a_lock_that_was_copied_with_its_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lock = Lock(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    other = Lock(tmp_path / "b", patience=0.05)
    lock.check()
    other.check()
    lock.release()
    other.release()


def test_of_several_takers_of_a_lock_one_wins(tmp_path: Path) -> None:
    written_lock(tmp_path, pid=2**22 + 1)
    here, there = FORKED.Pipe()
    begin, end = FORKED.Event(), FORKED.Event()

    def take() -> None:
        begin.wait(60)
        try:
            lock = Lock(tmp_path)
            there.send(lock.token)
            end.wait(60)
        except CheckpointError as error:
            there.send(str(error))

    takers = [FORKED.Process(target=take) for _ in range(6)]
    for process in takers:
        process.start()
    begin.set()
    said = [here.recv() for _ in takers if here.poll(60)]
    winners = [one for one in said if "a run writes there already" not in one]
    found = held(tmp_path / LOCK)
    end.set()
    for process in takers:
        process.join()
    assert len(said) == len(takers)
    assert found is not None
    assert [found.has(winner) for winner in winners] == [True]


def test_what_is_written_of_a_process_is_read_strictly() -> None:
    own = this_process()
    assert own.alive is True
    assert replace(own, start="1").alive is False
    assert replace(own, boot="x").alive is None
    assert process_from(own.content()) == own
    for wrong in (
        None,
        [],
        {},
        {**own.content(), "pid": "1"},
        {**own.content(), "pid": 0},
        {**own.content(), "host": "\x1b[2J"},
        {**own.content(), "more": 1},
    ):
        assert process_from(wrong) is None


# the folder


def a_folder(path: Path) -> RunFolder:
    opened = open_run(path)
    opened.close()
    return opened.folder


def part_with_manifest(folder: RunFolder, step: int, token: str) -> Path:
    part = folder.make_part(step, token)
    a_checkpoint(folder.path / "made", step, origin=folder.record.origin)
    (folder.path / "made" / name_of(step) / "manifest.json").rename(part / "manifest.json")
    shutil.rmtree(folder.path / "made")
    return part


def test_only_checkpoints_of_this_run_and_before_this_step_make_place(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "runs")
    foreign = a_checkpoint(folder.path, 5, origin=B)
    unnamed = a_checkpoint(folder.path, 6)
    for step in (10, 20, 30, 15):
        gone = folder.publish(part_with_manifest(folder, step, "aa"), step, "aa", keep=1)
        folder.delete(gone)
    assert [path.name for path in checkpoints(folder.path)] == [foreign.name, unnamed.name, *map(name_of, (15, 30))]
    assert not list(folder.path.glob(".step*"))
    with refused(CheckpointError, folder.path / "step-000005"):
        folder.publish(part_with_manifest(folder, 5, "bb"), 5, "bb", keep=1)
    assert foreign.is_dir()
    strange = part_of(folder.path, 7, "cc")
    strange.mkdir()
    (strange / "thesis.txt").write_text("years of work")
    assert [note.split(": ")[0] for note in folder.prepare()] == [f"{strange} has no mark of the runtime"]
    assert sorted(path.name for path in folder.path.glob(".step*")) == [strange.name], "what was left is cleared"


def test_a_folder_of_an_older_version_is_taken_over(tmp_path: Path) -> None:
    for step in (10, 20):
        a_checkpoint(tmp_path, step)
    opened = open_run(tmp_path)
    assert [note for note in opened.notes if "before runs had ids" in note]
    opened.folder.delete(opened.folder.publish(part_with_manifest(opened.folder, 30, "aa"), 30, "aa", keep=1))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000030"]
    opened.close()
    again = open_run(tmp_path)
    assert (again.notes, again.folder) == ((), opened.folder)
    again.close()


def test_a_run_that_lost_its_lock_publishes_nothing(tmp_path: Path) -> None:
    first = open_run(tmp_path)
    second = open_run(tmp_path)  # of the same process, which may begin anew
    second.check()
    with refused(CheckpointError, tmp_path, f"process {os.getpid()}", "--continue"):
        first.check()
    first.close()
    second.check()
    second.close()


# replicas in memory


def test_replicas_of_a_killed_process_are_deleted_at_the_next_start(memory: Path) -> None:
    foreign = memory / f"plan-run-{'e' * 32}"
    foreign.mkdir()
    (foreign / "file").write_text("")
    with another_process(lambda: open_replicas(A, os.getpid())) as holder:
        assert sweep(B) == []
        assert replicas_of(A).is_dir()
    assert holder
    assert sweep(A) == [], "the run itself goes on from them"
    said = sweep(B)
    assert len(said) == 1
    assert "was deleted: state replicas of run aaaaaaaa" in said[0]
    assert sorted(memory.iterdir()) == [foreign]


def test_replicas_stay_while_one_who_needs_them_lives(memory: Path) -> None:
    """The ranks of a launcher of others die, and it starts them again."""
    with another_process(lambda: open_replicas(A, os.getppid())):
        pass
    assert sweep(B) == []
    with another_process(lambda: open_replicas(A, 2**22 + 1)):
        assert sweep(B) == []
    assert len(sweep(B)) == 1


def test_a_link_in_the_place_of_replicas_is_refused(memory: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "step-000001.rank-00000.json").write_text("years of work")
    replicas_of(A).symlink_to(victim)
    with refused(CheckpointError, replicas_of(A)):
        StateReplicas(A)
    with holding(A, wanted=False):
        pass
    assert [path.name for path in victim.iterdir()] == ["step-000001.rank-00000.json"]


@pytest.mark.parametrize("end", ["return", "error", "interrupt", "SIGTERM", "SIGHUP"])
def test_memory_and_lock_are_given_up_at_every_end(end: str, memory: Path, tmp_path: Path) -> None:
    ends = {"error": ValueError, "interrupt": KeyboardInterrupt, "SIGTERM": StoppedError, "SIGHUP": StoppedError}
    settings = RunSettings(save=str(tmp_path / "runs"), state_replicas=True)

    def run() -> None:
        with holding_folder(settings, lambda report: None) as given:
            found = held(tmp_path / "runs" / LOCK)
            assert found is not None
            assert found.has(given.lock)
            (folder,) = memory.iterdir()
            (folder / "step-000001.rank-00000.safetensors").write_text("")
            assert {path.stat().st_mode & 0o077 for path in (folder, folder / "alive", folder / "owner.json")} == {0}
            if end.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, end))
                signal.sigtimedwait([], 5)
            elif end != "return":
                raise ends[end]

    if end == "return":
        run()
    else:
        with pytest.raises(ends[end]):
            run()
    assert list(memory.iterdir()) == []
    assert held(tmp_path / "runs" / LOCK) is None
