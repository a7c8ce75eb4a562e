"""Logs that were cut, changed or taken away: what was lost is named, and what stands before it is kept."""

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from planner.errors import RequestError
from runtime.servers.disk import BrokenDiskError, RefusedWriteError, SystemDisk
from runtime.servers.frames import Frame, encode
from runtime.servers.shard import Shard
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.storage import Storage
from runtime.servers.tables import Table
from tests.refusals import refused

TABLE = Table(name="users", rows=12, width=3, optimizer=SparseOptimizer(name="sgd"), deviation=1.0)
PUSHES = 5


def records() -> Iterator[Frame]:
    yield Frame(kind="open", fields={"workers": 1, "staleness": None})
    yield Frame(kind="create", fields={"table": TABLE.content()})
    yield Frame(kind="ready", fields={"table": "users"})
    for step in range(PUSHES):
        fields = {"worker": 0, "step": step, "tables": ["users"], "learning_rate": 0.5}
        arrays = {"rows0": np.array([1, 5 + step]), "gradients0": np.full((2, 3), step + 1, np.float32)}
        yield Frame(kind="push", fields=fields, arrays=arrays)


def state(shard: Shard) -> list[bytes]:
    return [encode(frame) for frame in shard.snapshot()]


def logged(folder: Path) -> tuple[list[list[bytes]], list[int]]:
    """A log in a folder: the state after every record, the first one being its head, and where each ends."""
    storage = Storage(folder, 0, 1)
    shard = storage.open()
    states, ends = [state(shard)], [storage.log_bytes]
    for record in records():
        assert shard.check(record)
        storage.append(record)
        shard.apply(record)
        states.append(state(shard))
        ends.append(storage.log_bytes)
    storage.close()
    return states, ends


def opened(folder: Path, *, repaired: bool = False) -> tuple[list[bytes], list[str]]:
    """The state that files hold, and what is said about them."""
    said: list[str] = []
    storage = Storage(folder, 0, 1, repaired=repaired, say=said.append)
    try:
        return state(storage.open()), said
    finally:
        storage.close()


@pytest.mark.thorough
@pytest.mark.slow
def test_every_changed_byte_is_named_or_the_last_record(tmp_path: Path) -> None:
    """Sizes, sequences and checksums, too: on commit dca0d43 a size that was changed cut off all that followed."""
    states, ends = logged(tmp_path / "whole")
    data = (tmp_path / "whole" / "log-000000").read_bytes()
    folder = tmp_path / "changed"
    folder.mkdir()
    for at in range(len(data)):
        for old in folder.iterdir():
            old.unlink()
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        (folder / "log-000000").write_bytes(bytes(damaged))
        number = next(number for number, end in enumerate(ends) if at < end)
        before = states[number - 1] if number else state(Shard(number=0, count=1))
        refused = ""
        try:
            found, said = opened(folder)
        except RequestError as error:
            refused = str(error)
        if refused:
            start = ends[number - 1] if number else 0
            assert f"log-000000: record {number}, at byte {start} of {len(data)}, is damaged" in refused
            assert (folder / "log-000000").read_bytes() == bytes(damaged)
        else:
            assert number == len(ends) - 1, f"byte {at} is in record {number}, and nobody said so"
            assert found == before
            assert "was not written to its end" in said[-1]
            assert (folder / "log-000000.damaged-1").read_bytes() == bytes(damaged)


def test_a_torn_tail_is_cut_and_said(tmp_path: Path) -> None:
    states, ends = logged(tmp_path)
    log = tmp_path / "log-000000"
    log.write_bytes(log.read_bytes()[:-20])
    found, said = opened(tmp_path)
    assert found == states[-2]
    assert log.stat().st_size == ends[-2]
    missing = ends[-1] - ends[-2]
    wanted = (
        f"{log}: record {PUSHES + 3}, at byte {ends[-2]} of {ends[-1] - 20}, was not written to its end: the file ends"
        f" after {missing - 20} of the {missing} bytes of a record; {missing - 20} bytes are cut off"
    )
    assert said == [wanted]


def test_a_tail_of_zeros_is_cut_and_kept_aside(tmp_path: Path) -> None:
    """As a machine that lost its power leaves it."""
    states, _ = logged(tmp_path)
    log = tmp_path / "log-000000"
    data = log.read_bytes() + bytes(5000)
    log.write_bytes(data)
    found, said = opened(tmp_path)
    assert found == states[-1]
    assert (tmp_path / "log-000000.damaged-1").read_bytes() == data
    assert "5000 bytes are cut off" in said[-1]


def test_damage_in_the_middle_is_repaired_when_asked(tmp_path: Path) -> None:
    states, ends = logged(tmp_path)
    log = tmp_path / "log-000000"
    data = bytearray(log.read_bytes())
    data[ends[5] + 60] ^= 1
    log.write_bytes(bytes(data))
    with refused(RequestError, log, "record 6", len(data), "--repair"):
        opened(tmp_path)
    found, said = opened(tmp_path, repaired=True)
    assert found == states[5]
    assert (tmp_path / "log-000000.damaged-1").read_bytes() == bytes(data)
    assert any("6 records before it are kept, those that follow are not" in one for one in said)
    assert opened(tmp_path) == (states[5], [])


def test_a_log_that_is_missing_is_named(tmp_path: Path) -> None:
    logged(tmp_path)
    (tmp_path / "log-000000").rename(tmp_path / "log-000002")
    with refused(RequestError, tmp_path / "log-000000", tmp_path / "log-000002"):
        opened(tmp_path)


@pytest.mark.parametrize("at", [3, 8])
def test_logs_and_snapshots_of_version_0_1_are_read(tmp_path: Path, at: int) -> None:
    """Frames without heads, the last one cut short; new records follow the old ones in the same file."""
    every = list(records())
    shard = Shard(number=0, count=1)
    old = encode(Frame(kind="log", fields={"number": 0, "count": 1}))
    for record in every[:at]:
        shard.apply(record)
        old += encode(record)
    (tmp_path / "log-000000").write_bytes(old + (encode(every[at])[:70] if at < len(every) else b""))
    storage = Storage(tmp_path, 0, 1)
    again = storage.open()
    assert state(again) == state(shard)
    for record in every[at:]:
        storage.append(record)
        again.apply(record)
    storage.close()
    assert opened(tmp_path)[0] == state(again)
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / "snapshot-000003").write_bytes(b"".join(state(again)))
    assert opened(folder)[0] == state(again)


@pytest.mark.parametrize("size", [1, 2**26])
def test_a_size_that_was_changed_in_a_log_of_version_0_1_cuts_nothing_off(tmp_path: Path, size: int) -> None:
    """Reads as a record that was not written to its end; whole ones follow it."""
    head = encode(Frame(kind="log", fields={"number": 0, "count": 1}))
    data = bytearray(head + b"".join(map(encode, records())))
    data[len(head) + 8 : len(head) + 16] = size.to_bytes(8, "little")
    (tmp_path / "log-000000").write_bytes(bytes(data))
    with refused(RequestError, tmp_path / "log-000000", "record 1", len(data), "--repair"):
        opened(tmp_path)
    assert (tmp_path / "log-000000").read_bytes() == bytes(data)


def test_two_servers_do_not_write_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.servers.storage._ENDING", 0.1)
    first = Storage(tmp_path, 0, 1)
    first.open()
    with refused(RequestError, tmp_path):
        Storage(tmp_path, 0, 1).open()
    first.close()
    Storage(tmp_path, 0, 1).open()


def failing(monkeypatch: pytest.MonkeyPatch, calls: dict[str, int]) -> None:
    """Have calls of the system fail with an error each."""

    def fails(number: int) -> object:
        def call(*_: object) -> None:
            raise OSError(number, errno.errorcode[number])

        return call

    for name, number in calls.items():
        monkeypatch.setattr(SystemDisk, name, fails(number))


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ({"write": errno.ENOSPC}, RefusedWriteError),
        ({"write": errno.EROFS, "truncate": errno.EROFS}, RefusedWriteError),
        ({"write": errno.EIO}, BrokenDiskError),
        ({"sync": errno.EIO}, BrokenDiskError),  # a second fsync would succeed, and say nothing
        ({"sync": errno.ENOSPC}, BrokenDiskError),
        ({"sync": errno.EIO, "truncate": errno.EIO}, BrokenDiskError),
    ],
)
def test_an_append_that_fails_is_taken_back_or_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: dict[str, int], error: type[Exception]
) -> None:
    _, ends = logged(tmp_path)
    storage = Storage(tmp_path, 0, 1, flushed=True)
    storage.open()
    *_, last = records()
    with monkeypatch.context() as patched:
        failing(patched, calls)
        with refused(error, tmp_path / "log-000000", errno.errorcode[next(iter(calls.values()))]):
            storage.append(last)
    size = (tmp_path / "log-000000").stat().st_size
    assert size == ends[-1] or (calls.get("truncate") == errno.EIO and error is BrokenDiskError)
    storage.close()


@pytest.mark.parametrize("call", ["write", "sync", "open"])
def test_a_snapshot_that_fails_leaves_the_log_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    said: list[str] = []
    storage = Storage(tmp_path, 0, 1, say=said.append)
    shard = storage.open()
    every = list(records())
    for record in every[:5]:
        storage.append(record)
        shard.apply(record)
    with monkeypatch.context() as patched:
        failing(patched, {call: errno.ENOSPC})
        with refused(RefusedWriteError, tmp_path / "snapshot-000001", errno.errorcode[errno.ENOSPC]):
            storage.snapshot(shard)
    assert len(said) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "log-000000"]
    for record in every[5:]:
        storage.append(record)
        shard.apply(record)
    storage.snapshot(shard)
    storage.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "log-000001", "snapshot-000001"]
    assert opened(tmp_path)[0] == state(shard)


def test_a_snapshot_without_one_of_its_pieces_is_refused(tmp_path: Path) -> None:
    storage = Storage(tmp_path, 0, 1)
    shard = storage.open()
    for record in itertools.islice(records(), 4):
        storage.append(record)
        shard.apply(record)
    storage.snapshot(shard)
    storage.close()
    path = tmp_path / "snapshot-000001"
    data = path.read_bytes()
    heads = [at for at in range(len(data)) if data.startswith(b"PSL2", at)]
    path.write_bytes(data[: heads[1]] + data[heads[2] :])
    with refused(RequestError, tmp_path / "snapshot-000001", "record 1", "record 2"):
        opened(tmp_path)
