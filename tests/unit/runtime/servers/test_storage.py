"""Files of a server: after SIGKILL at any byte the rows are as if nothing had happened."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from planner.errors import RequestError
from runtime.servers import frames as frames_module
from runtime.servers import storage as storage_module
from runtime.servers.disk import RefusedWriteError, SystemDisk
from runtime.servers.frames import Frame, encode
from runtime.servers.log import recorded
from runtime.servers.shard import Shard
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.storage import Storage
from runtime.servers.tables import Table
from tests.refusals import refused

TABLE = Table(name="users", rows=12, width=3, optimizer=SparseOptimizer(name="adam"), deviation=1.0)


def records(steps: int, workers: int = 2, staleness: int | None = None) -> Iterator[Frame]:
    """What a server logs of a run."""
    generator = np.random.default_rng(0)
    yield Frame(kind="open", fields={"workers": workers, "staleness": staleness})
    yield Frame(kind="create", fields={"table": TABLE.content()})
    yield Frame(kind="ready", fields={"table": "users"})
    for step, worker in itertools.product(range(steps), range(workers)):
        rows = np.sort(generator.permutation(6)[:3])
        fields = {"worker": worker, "step": step, "tables": ["users"], "learning_rate": None}
        gradients = generator.standard_normal((3, 3), np.float32)
        yield Frame(kind="push", fields=fields, arrays={"rows0": rows, "gradients0": gradients})


def state(shard: Shard) -> list[bytes]:
    return [encode(frame) for frame in shard.snapshot()]


def take(storage: Storage, shard: Shard, record: Frame) -> None:
    """As the server does."""
    if shard.check(record):
        storage.append(record)
        shard.apply(record)


def logged(folder: Path, steps: int = 5) -> tuple[Shard, list[list[bytes]]]:
    """A server's files after a run, and its state after each record."""
    storage = Storage(folder, 0, 2)
    shard = storage.open()
    states = [state(shard)]
    for record in records(steps):
        take(storage, shard, record)
        states.append(state(shard))
    storage.close()
    return shard, states


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("staleness", [None, 1])
def test_a_log_cut_at_any_byte_gives_the_state_after_its_whole_records(
    tmp_path: Path, staleness: int | None, step: int
) -> None:
    whole = tmp_path / "whole"
    storage = Storage(whole, 0, 2)
    shard = storage.open()
    ends, states = [(whole / "log-000000").stat().st_size], [state(shard)]
    for record in records(3, staleness=staleness):
        take(storage, shard, record)
        ends.append((whole / "log-000000").stat().st_size)
        states.append(state(shard))
    storage.close()
    data = (whole / "log-000000").read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    for length in sorted({*range(0, len(data) + 1, step), *ends, *(end - 1 for end in ends)}):
        (cut / "log-000000").write_bytes(data[:length])
        again = Storage(cut, 0, 2)
        found = again.open()
        wanted = max((at for at, end in enumerate(ends) if end <= length), default=0)
        assert state(found) == states[wanted], length
        for record in records(3, staleness=staleness):  # its workers send again what was not acknowledged, and more
            take(again, found, record)
        again.close()
        assert state(found) == states[-1], length


def test_what_comes_twice_is_applied_once(tmp_path: Path) -> None:
    shard, states = logged(tmp_path)
    assert not any(shard.check(record) for record in records(5))
    assert state(shard) == states[-1]


@pytest.mark.parametrize("at", range(3, 13))
def test_a_snapshot_in_the_midst_of_a_step_changes_nothing(tmp_path: Path, at: int) -> None:
    _, states = logged(tmp_path / "plain")
    storage = Storage(tmp_path / "with", 0, 2)
    shard = storage.open()
    for number, record in enumerate(records(5), 1):
        take(storage, shard, record)
        if number == at:
            storage.snapshot(shard)
            storage.close()
            storage = Storage(tmp_path / "with", 0, 2)
            shard = storage.open()
            assert state(shard) == states[at]
    storage.close()
    assert state(shard) == states[-1]
    assert sorted(path.name for path in (tmp_path / "with").iterdir()) == ["lock", "log-000001", "snapshot-000001"]


class _KilledError(Exception):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("call", ["sync", "open", "replace", "sync_folder", "unlink"])
def test_killed_while_a_snapshot_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    storage = Storage(tmp_path, 0, 2)
    shard = storage.open()
    for record in records(5):
        take(storage, shard, record)
    storage.snapshot(shard)

    def killed(*_: object, **__: object) -> None:
        raise _KilledError

    with monkeypatch.context() as patched:
        patched.setattr(SystemDisk, call, killed)
        with pytest.raises(_KilledError):
            storage.snapshot(shard)
    storage.close()
    again = Storage(tmp_path, 0, 2)
    assert state(again.open()) == state(shard)
    assert not list(tmp_path.glob("*.part"))
    again.close()


def test_a_log_that_has_grown_asks_for_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "LEAST_LOG", 2000)
    storage = Storage(tmp_path, 0, 2)
    shard, wanted = storage.open(), 0
    for record in records(40):
        take(storage, shard, record)
        if storage.wants_snapshot:
            storage.snapshot(shard)
            wanted += 1
    storage.close()
    assert wanted > 3
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8000
    again = Storage(tmp_path, 0, 2)
    assert state(again.open()) == state(shard)


def test_the_millionth_snapshot_is_found_again(tmp_path: Path) -> None:
    """Its name has seven digits."""
    storage = Storage(tmp_path, 0, 2)
    shard = storage.open()
    for record in records(5):
        take(storage, shard, record)
    storage._generation = 10**6 - 2
    for _ in range(3):
        storage.snapshot(shard)
    storage.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "log-1000001", "snapshot-1000001"]
    assert state(Storage(tmp_path, 0, 2).open()) == state(shard)


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    logged(tmp_path)
    log = tmp_path / "log-000000"
    with refused(RequestError, log, "server 0", 2, "server 1", 3):
        Storage(tmp_path, 1, 3).open()
    data = bytearray(log.read_bytes())
    data[200] ^= 4
    log.write_bytes(bytes(data))
    with refused(RequestError, log, "record 1", len(data), "--repair"):
        Storage(tmp_path, 0, 2).open()


def test_a_damaged_snapshot_is_not_passed_over(tmp_path: Path) -> None:
    storage = Storage(tmp_path, 0, 2)
    shard = storage.open()
    for record in records(2):
        take(storage, shard, record)
    storage.snapshot(shard)
    storage.close()
    snapshot = tmp_path / "snapshot-000001"
    snapshot.write_bytes(snapshot.read_bytes()[:-30])
    with refused(RequestError, snapshot, 57, 87):
        Storage(tmp_path, 0, 2).open()


def many_tables(storage: Storage) -> Shard:
    """A server with more tables and workers than one header has room for."""
    shard = storage.open()
    take(storage, shard, Frame(kind="open", fields={"workers": 300, "staleness": None}))
    for number in range(30):
        content = {**TABLE.content(), "name": f"users {number}"}
        take(storage, shard, Frame(kind="create", fields={"table": content}))
    take(storage, shard, Frame(kind="restart", fields={"step": 10**15}))
    for number in range(30):
        take(storage, shard, Frame(kind="ready", fields={"table": f"users {number}"}))
    return shard


def test_a_snapshot_of_many_tables_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "LARGEST_HEADER", 1000)
    storage = Storage(tmp_path, 0, 2)
    shard = many_tables(storage)
    storage.snapshot(shard)
    storage.close()
    again = Storage(tmp_path, 0, 2)
    assert state(again.open()) == state(shard)
    again.close()


def test_a_snapshot_of_version_0_1_can_be_read(tmp_path: Path) -> None:
    """Its first frame has all clocks and tables."""
    shard, states = logged(tmp_path / "log")
    head, *parts = shard.snapshot()
    tables = [{"table": held.table.content(), "ready": held.ready} for held in shard.tables.values()]
    old = Frame(kind="shard", fields={**head.fields, "clocks": shard.clocks, "tables": tables})
    rest = [frame for frame in parts if frame.kind not in ("clocks", "table")]
    (tmp_path / "old").mkdir()
    with (tmp_path / "old" / "snapshot-000003").open("wb") as file:
        for number, frame in enumerate([old, *rest]):
            file.writelines(recorded(frame, number))
    storage = Storage(tmp_path / "old", 0, 2)
    assert state(storage.open()) == states[-1]
    storage.close()


def test_a_snapshot_that_cannot_be_read_back_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the logs are deleted that it stands for."""
    storage = Storage(tmp_path, 0, 2)
    shard = storage.open()
    for record in records(5):
        take(storage, shard, record)
    with monkeypatch.context() as patched:
        patched.setattr(
            storage_module, "recorded", lambda frame, number: [*recorded(frame, 7 if number == 3 else number)]
        )
        with refused(RefusedWriteError, tmp_path / "snapshot-000001", 3, "record 7"):
            storage.snapshot(shard)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "log-000000"]
    storage.close()
    again = Storage(tmp_path, 0, 2)
    assert state(again.open()) == state(shard)
    again.close()
