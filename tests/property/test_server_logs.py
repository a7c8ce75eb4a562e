"""Whatever a disk does to a server's files, the state after a restart is the replay of exactly the acknowledged
records, and at most of the one that was in flight."""

import contextlib
import errno
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.servers import storage as storage_module
from runtime.servers.disk import BrokenDiskError, RefusedWriteError, SystemDisk
from runtime.servers.frames import Frame, encode
from runtime.servers.shard import Shard
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.storage import Storage
from runtime.servers.tables import Table

TABLE = Table(name="users", rows=12, width=3, optimizer=SparseOptimizer(name="adam"), deviation=1.0)
STEPS = 9


def records() -> Iterator[Frame]:
    generator = np.random.default_rng(0)
    yield Frame(kind="open", fields={"workers": 1, "staleness": None})
    yield Frame(kind="create", fields={"table": TABLE.content()})
    yield Frame(kind="ready", fields={"table": "users"})
    for step in range(STEPS):
        fields = {"worker": 0, "step": step, "tables": ["users"], "learning_rate": None}
        gradients = generator.standard_normal((3, 3), np.float32)
        yield Frame(
            kind="push",
            fields=fields,
            arrays={"rows0": np.sort(generator.permutation(12)[:3]), "gradients0": gradients},
        )


RECORDS = tuple(records())


def state(shard: Shard) -> bytes:
    return b"".join(encode(frame) for frame in shard.snapshot())


def _states() -> list[bytes]:
    """The state of the model after each record: no file, no fault."""
    shard = Shard(number=0, count=1)
    found = [state(shard)]
    for record in RECORDS:
        assert shard.check(record)
        shard.apply(record)
        found.append(state(shard))
    return found


STATES = _states()


class KilledError(BaseException):
    """Stands for SIGKILL, or for the machine that loses its power."""


class FaultyDisk:
    """The calls of the system, some of which fail: `faults` has the number of the call, what happens, and how many
    bytes of a write are written before it does. `for_good`: it happens to all later calls of the kind, until `mend`."""

    def __init__(self, faults: dict[int, tuple[str, int]], *, for_good: bool = False) -> None:
        self._faults, self._for_good, self._system = faults, for_good, SystemDisk()
        self._always: str | None = None
        self._calls = 0
        self._paths: dict[int, Path] = {}
        self._synced: dict[Path, int] = {}

    def mend(self) -> None:
        self._always = None

    def open(self, path: Path) -> int:
        self._check("open", 0)
        descriptor = self._system.open(path)
        self._paths[descriptor] = path
        self._synced.setdefault(path, self._system.size(descriptor))
        return descriptor

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview], at: int) -> int:
        whole = b"".join(parts)
        fault, written = self._next(len(whole))
        if fault is None or self._passes(fault, "write"):
            return self._system.write(descriptor, [whole], at)
        self._system.write(descriptor, [whole[:written]], at)
        if fault == "SHORT" and written:
            return written
        raise self._error(fault)

    def size(self, descriptor: int) -> int:
        return self._system.size(descriptor)

    def truncate(self, descriptor: int, length: int) -> None:
        self._check("truncate", 0)
        self._system.truncate(descriptor, length)
        path = self._paths[descriptor]
        self._synced[path] = min(self._synced[path], length)

    def sync(self, descriptor: int) -> None:
        self._check("sync", 0)
        self._synced[self._paths[descriptor]] = self._system.size(descriptor)

    def close(self, descriptor: int) -> None:
        self._system.close(descriptor)

    def replace(self, path: Path, by: Path) -> None:
        self._check("replace", 0)
        self._system.replace(path, by)
        self._synced[path] = self._synced.pop(by)

    def unlink(self, path: Path) -> None:
        self._check("unlink", 0)
        self._system.unlink(path)
        self._synced.pop(path, None)

    def sync_folder(self, path: Path) -> None:
        self._check("sync_folder", 0)

    def lose_power(self, kept: int, *, zeros: bool) -> None:
        """Of what no sync has put on the disk, so many bytes of every file are there; the rest is zeros or cut off."""
        for path, synced in self._synced.items():
            data = path.read_bytes()
            there = data[: synced + kept]
            path.write_bytes(there + bytes(len(data) - len(there)) if zeros else there)

    def _check(self, call: str, size: int) -> None:
        fault, _ = self._next(size)
        if fault is not None and not self._passes(fault, call):
            raise self._error(fault)

    def _next(self, size: int) -> tuple[str | None, int]:
        self._calls += 1
        fault, written = self._faults.get(self._calls, (self._always, 0))
        if fault is not None and self._for_good and fault not in ("KILL", "SHORT"):
            self._always = fault
        return fault, min(written, size)

    @staticmethod
    def _passes(fault: str, call: str) -> bool:
        """A full disk frees files and flushes those that are there; one that is read-only can only be read."""
        if fault == "SHORT":
            return call != "write"
        if fault in ("ENOSPC", "EFBIG"):
            return call not in ("write", "open")
        return fault == "EROFS" and call in ("sync", "sync_folder")

    @staticmethod
    def _error(fault: str) -> BaseException:
        return KilledError() if fault == "KILL" else OSError(getattr(errno, fault, errno.EIO), fault)


def trained(folder: Path, disk: FaultyDisk, *, flushed: bool = False, power: tuple[int, bool] | None = None) -> int:
    """Keep all records in files, as a server and its worker do: what is refused is asked again, and a server that stops
    or is killed is started again. Checks the state after every start. The number of starts."""
    acknowledged = starts = 0
    while acknowledged < len(RECORDS):
        starts += 1
        assert starts < 100, "it never ends"
        storage = Storage(folder, 0, 1, flushed=flushed, disk=disk)
        try:
            shard = storage.open()
            assert state(shard) in STATES[acknowledged : acknowledged + 2]
            while acknowledged < len(RECORDS):
                try:
                    _kept(storage, shard, RECORDS[acknowledged])
                    acknowledged += 1
                except RefusedWriteError:
                    assert state(shard) == STATES[acknowledged]
                    assert storage.log_bytes == max(folder.glob("log-??????")).stat().st_size
                    disk.mend()
        except (BrokenDiskError, RefusedWriteError):
            disk.mend()
        except KilledError:
            storage.close()
            if power is not None and flushed:
                disk.lose_power(power[0], zeros=power[1])
        storage.close()
    storage = Storage(folder, 0, 1)
    assert state(storage.open()) == STATES[-1]
    storage.close()
    return starts


def _kept(storage: Storage, shard: Shard, record: Frame) -> None:
    """As the server does."""
    if shard.check(record):
        storage.append(record)
        shard.apply(record)
        if storage.wants_snapshot:
            with contextlib.suppress(RefusedWriteError):
                storage.snapshot(shard)


@pytest.fixture(autouse=True, scope="module")
def _snapshots_come_often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storage_module, "LEAST_LOG", 700)
        yield


KINDS = st.sampled_from(["ENOSPC", "EFBIG", "EROFS", "EIO", "SHORT", "KILL"])
FAULTS = st.dictionaries(st.integers(1, 60), st.tuples(KINDS, st.integers(0, 400)), min_size=1, max_size=5)
POWER = st.none() | st.tuples(st.integers(0, 300), st.booleans())


def _any_faults(faults: dict[int, tuple[str, int]], for_good: bool, flushed: bool, power: tuple[int, bool]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trained(Path(folder), FaultyDisk(faults, for_good=for_good), flushed=flushed, power=power)


@given(FAULTS, st.booleans(), st.booleans(), POWER)
@settings(max_examples=80)
def test_the_state_is_that_of_the_acknowledged_records(faults, for_good, flushed, power) -> None:
    _any_faults(faults, for_good, flushed, power)


@pytest.mark.exhaustive
@pytest.mark.slow
@given(FAULTS, st.booleans(), st.booleans(), POWER)
@settings(max_examples=1000)
def test_the_state_is_that_of_the_acknowledged_records_often(faults, for_good, flushed, power) -> None:
    _any_faults(faults, for_good, flushed, power)


TAILS = st.one_of(
    st.binary(min_size=1, max_size=27),
    st.integers(1, 27).map(bytes),
    st.integers(1, 27).map(lambda size: b"\xff" * size),
    st.builds(lambda head, rest: head + rest, st.sampled_from([b"PSF1", b"PSL2", b"PS"]), st.binary(max_size=23)),
)


@pytest.mark.thorough
@given(TAILS)
@settings(max_examples=150)
def test_a_log_with_any_short_tail_is_opened(tail: bytes) -> None:
    """Zeros and ones are what a file system leaves where the power went: tails below the size of a head were read as
    one."""
    with tempfile.TemporaryDirectory() as folder:
        said: list[str] = []
        assert trained(Path(folder), FaultyDisk({})) == 1
        log = max(Path(folder).glob("log-??????"))
        whole = log.read_bytes()
        log.write_bytes(whole + tail)
        storage = Storage(Path(folder), 0, 1, say=said.append)
        assert state(storage.open()) == STATES[-1]
        storage.close()
        assert log.read_bytes() == whole
        assert said[-1].endswith(f"; {len(tail)} bytes are cut off")
        kept = [path.read_bytes() for path in Path(folder).glob("*.damaged-1")]
        assert kept == ([] if len(said) == 1 else [whole + tail])
        assert kept or tail.startswith((b"PSL2"[: len(tail)], b"PSF1"[: len(tail)]))  # not simply cut short: kept aside


@pytest.mark.parametrize("fault", ["ENOSPC", "EROFS", "EIO", "SHORT", "KILL"])
@pytest.mark.parametrize("call", [*range(1, 12), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(12, 60))])
def test_each_call_fails_once(tmp_path: Path, fault: str, call: int) -> None:
    """With some bytes of a write written before: a torn record each time."""
    trained(tmp_path, FaultyDisk({call: (fault, 40)}), flushed=True)


@pytest.mark.cases(0, 3)
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "KILL"])
@pytest.mark.parametrize("call", [10, 17, 24])  # of a snapshot, of the head of a log, of an append
def test_a_write_is_torn_at_every_byte(fault: str, call: int) -> None:
    for written in range(420):
        with tempfile.TemporaryDirectory() as folder:
            trained(Path(folder), FaultyDisk({call: (fault, written)}))


def test_the_faulty_disk_is_faulty(tmp_path: Path) -> None:
    """A disk whose faults are not noticed would prove nothing."""
    assert trained(tmp_path / "none", FaultyDisk({})) == 1
    assert trained(tmp_path / "kill", FaultyDisk({12: ("KILL", 7)})) == 2
    assert trained(tmp_path / "eio", FaultyDisk({12: ("EIO", 7)}, for_good=True)) == 2
    assert trained(tmp_path / "full", FaultyDisk({12: ("ENOSPC", 7)}, for_good=True)) == 1
