"""The files of one server: a snapshot, and a log of the changes since.

    snapshot-000003   the state, written to another name and renamed: whole or not there
    log-000003        records since then, each appended before it is acknowledged
    log-000004 ...    if the server was killed between starting a log and writing its snapshot

A restarted server reads the newest snapshot and replays the logs from there on. Before a record is acknowledged it has
been passed to the operating system, so it survives the process; with `flushed` it is on the disk, so it survives the
machine. `log.py` defines appends and the end of a log.

A log that was damaged afterwards is refused, because its missing records were acknowledged. With `repaired` the server
continues with the records before the damage; the original log and later ones are kept as log-000003.damaged-1.
"""

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from planner.errors import RequestError
from runtime.servers.disk import BrokenDiskError, Disk, RefusedWriteError, SystemDisk, write_all
from runtime.servers.faults import described
from runtime.servers.frames import Frame
from runtime.servers.log import Ending, LogReader, LogWriter, recorded
from runtime.servers.private_files import FILE, take_folder
from runtime.servers.shard import Shard

LEAST_LOG = 2**24
"""Bytes of a log below which no snapshot is made."""

_NAME = re.compile(r"(snapshot|log)-([0-9]{6,})")
_PART = re.compile(r"snapshot-[0-9]{6,}\.part")
_ENDING = 5.0  # seconds for which another process of the same server may take to end
_PAUSE = 0.05

Say = Callable[[str], None]


def quiet(message: str) -> None:
    """Ignore the message."""


class Storage:
    """The files of server `number` of `count` in `folder`, which is created. `open` returns the state that they hold.
    `say` receives messages about data that was cut off, kept aside or not written."""

    def __init__(
        self,
        folder: Path,
        number: int,
        count: int,
        *,
        flushed: bool = False,
        repaired: bool = False,
        disk: Disk | None = None,
        say: Say = quiet,
    ) -> None:
        self._folder, self._number, self._count = folder, number, count
        self._flushed, self._repaired, self._disk, self._say = flushed, repaired, disk or SystemDisk(), say
        self._log: LogWriter | None = None
        self._lock: int | None = None
        self._generation = self._kept = 0
        self._enough = LEAST_LOG

    def lock(self) -> None:
        """Lock the files for this process. Raises RequestError where another process has them, or the folder belongs to
        another user."""
        if self._lock is None:
            take_folder(self._folder)
            self._take_lock()

    def open(self) -> Shard:
        """The state after the last appended record. Raises RequestError for files that are damaged, or of another
        server, and BrokenDiskError where they cannot be read or cut."""
        try:
            return self._open()
        except OSError as error:
            self.close()
            raise BrokenDiskError(f"{error.filename or self._folder}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def append(self, record: Frame) -> None:
        """Store a record before it is applied and acknowledged. Raises RefusedWriteError where it is not stored, and
        BrokenDiskError where that is unknown."""
        assert self._log is not None
        self._log.append(record)

    def take_back(self) -> Shard:
        """Cut off the last appended record, because it cannot be applied; returns the state in the files without it.
        Raises BrokenDiskError where they cannot be cut or read."""
        assert self._log is not None
        self._log.take_back()
        self._log.close()
        self._log = None
        try:
            return self._read()
        except OSError as error:
            raise BrokenDiskError(f"{error.filename or self._folder}: {error.strerror}") from error
        except (MemoryError, RequestError) as error:
            raise BrokenDiskError(f"{self._folder} cannot be read again: {described(error)}") from error

    @property
    def log_bytes(self) -> int:
        """Bytes of the log's whole records."""
        assert self._log is not None
        return self._log.end

    @property
    def wants_snapshot(self) -> bool:
        """Whether the log is larger than a snapshot, so that each byte is written at most twice."""
        return self.log_bytes > self._enough

    def snapshot(self, shard: Shard) -> None:
        """Write the state, read it back, start a new log, and delete the old files. Raises RefusedWriteError where that
        was not possible: the old log continues."""
        assert self._log is not None
        generation = self._generation + 1
        path = self._path("snapshot", generation)
        aside = path.with_suffix(".part")
        try:
            kept = self._write(aside, shard)
            log = self._begin_log(generation)
        except (OSError, MemoryError, RefusedWriteError, RequestError, ValueError) as error:
            self._enough = self._log.end + LEAST_LOG
            self._take_back(aside, self._path("log", generation))
            fault = error.strerror if isinstance(error, OSError) else described(error)
            said = f"{path}: not written, the log continues: {fault}"
            self._say(said)
            raise RefusedWriteError(said) from error
        try:
            self._disk.replace(path, aside)
            self._disk.sync_folder(self._folder)
        except OSError as error:
            log.close()
            raise BrokenDiskError(f"{path}: cannot be put in its place: {error.strerror}") from error
        self._log.close()
        self._log, self._generation, self._kept = log, generation, kept
        self._enough = max(LEAST_LOG, self._kept)
        with contextlib.suppress(OSError):  # they are no longer read, and are removed with the next ones
            for kind, old in self._files():
                if old < generation:
                    self._disk.unlink(self._path(kind, old))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open(self) -> Shard:
        self.lock()
        for path in self._folder.iterdir():
            if _PART.fullmatch(path.name):
                self._disk.unlink(path)
        return self._read()

    def _read(self) -> Shard:
        """The state in the files, with the log open after its last whole record."""
        self._generation = self._kept = 0
        shard = Shard(number=self._number, count=self._count)
        snapshots, logs = self._generations("snapshot"), self._generations("log")
        if snapshots:
            self._generation = snapshots[-1]
            shard = self._restored(self._path("snapshot", self._generation))
        ending = Ending(end=0, size=0, records=0)
        left = [one for one in logs if one >= self._generation]
        self._check_chain(left)
        for at, generation in enumerate(left):
            self._generation = generation
            ending = self._replay(shard, generation, left[at + 1 :])
            if ending.damaged:
                break
        self._enough = max(LEAST_LOG, self._kept)
        self._log = self._continued(ending)
        return shard

    def _take_lock(self) -> None:
        """Lock the files; another process that is ending gets some seconds."""
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE)
        until = time.monotonic() + _ENDING
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RequestError(
                        f"{self._folder} is in use by another server; stop it, or start in another folder"
                    ) from None
            time.sleep(_PAUSE)

    def _check_chain(self, logs: list[int]) -> None:
        """Raise RequestError where a log is missing between those that are there."""
        missing = [one for one in range(self._generation, logs[-1]) if one not in logs] if logs else []
        if missing:
            raise RequestError(
                f"{self._path('log', missing[0])} is missing, and {self._path('log', logs[-1])} follows it: put it back"
            )

    def _restored(self, path: Path) -> Shard:
        with path.open("rb") as file:
            reader = LogReader(file)
            try:
                shard = Shard.restored(one.frame for one in reader)
            except OSError:
                raise
            except Exception as error:
                ending = reader.ending
                where = f" (byte {ending.end}, record {ending.records}: {ending.fault})" if ending.fault else ""
                raise RequestError(
                    f"{path} is not a complete snapshot: {described(error)}{where}; it cannot be used"
                ) from error
        self._kept = path.stat().st_size
        self._check_server(path, shard.number, shard.count)
        return shard

    def _replay(self, shard: Shard, generation: int, later: list[int]) -> Ending:
        """Apply the whole records of a log; returns what follows the last one."""
        path = self._path("log", generation)
        with path.open("rb") as file:
            reader = LogReader(file)
            for one in reader:
                try:
                    self._take(path, shard, one.frame)
                except Exception as error:
                    raise RequestError(
                        f"{path}: record {one.number}: {described(error)}; this log cannot be replayed"
                    ) from error
        ending = reader.ending
        if ending.fault is None:
            return ending
        place = f"{path}: record {ending.records}, at byte {ending.end} of {ending.size}"
        if ending.damaged or later:
            return self._damaged(generation, later, f"{place}, is damaged: {ending.fault}", ending)
        if ending.unsure:
            self._say(f"{path} as it was is kept as {self._kept_aside(path)}")
        self._say(f"{place}, was not written to its end: {ending.fault}; {ending.size - ending.end} bytes are cut off")
        return ending

    def _take(self, path: Path, shard: Shard, frame: Frame) -> None:
        if frame.kind == "log":
            self._check_server(path, frame.fields["number"], frame.fields["count"])
        elif shard.check(frame):
            shard.apply(frame)

    def _damaged(self, generation: int, later: list[int], said: str, ending: Ending) -> Ending:
        """Refuse a log that was changed afterwards, or keep it aside and continue with the records before the
        damage."""
        if not self._repaired:
            raise RequestError(
                f"{said}; the {ending.records} records before it are whole, and others follow. Put back a copy of the"
                " file, or continue without those that follow: --repair keeps the damaged file aside"
            )
        self._say(f"{said}; {ending.records} records before it are kept, those that follow are not")
        self._say(
            f"{self._path('log', generation)} as it was is kept as {self._kept_aside(self._path('log', generation))}"
        )
        for one in later:
            path = self._path("log", one)
            self._say(f"{path} is kept as {self._kept_aside(path)}")
            self._disk.unlink(path)
        return Ending(end=ending.end, size=ending.size, records=ending.records, fault=ending.fault, damaged=True)

    def _kept_aside(self, path: Path) -> Path:
        """A copy of a file under a new name."""
        names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
        kept = next(name for name in names if not name.exists())
        with path.open("rb") as old, open(self._disk.open(kept), "wb") as new:
            shutil.copyfileobj(old, new, 2**20)
            new.flush()
            os.fsync(new.fileno())
        return kept

    def _continued(self, ending: Ending) -> LogWriter:
        """The log to append to, without what follows its last whole record."""
        path = self._path("log", self._generation)
        log = LogWriter(path, self._disk, flushed=self._flushed, end=ending.end, records=ending.records)
        log.cut()
        if ending.records == 0:
            self._head(log)
        if self._flushed:  # records that were written before a kill are acknowledged when they are sent again
            log.sync()
        return log

    def _begin_log(self, generation: int) -> LogWriter:
        log = LogWriter(self._path("log", generation), self._disk, flushed=self._flushed)
        try:
            log.cut()
            self._head(log)
            log.sync()
        except BaseException:
            log.close()
            raise
        return log

    def _head(self, log: LogWriter) -> None:
        """Write which server the log belongs to."""
        log.append(Frame(kind="log", fields={"number": self._number, "count": self._count}))
        self._disk.sync_folder(self._folder)

    def _write(self, path: Path, shard: Shard) -> int:
        """Write a snapshot, and check that it can be read; returns its bytes. Raises ValueError where it cannot."""
        descriptor, end, records = self._disk.open(path), 0, 0
        try:
            for frame in shard.snapshot():
                end = write_all(self._disk, descriptor, recorded(frame, records), end)
                records += 1
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)
        with path.open("rb") as file:
            reader = LogReader(file)
            for _ in reader:
                pass
        found = reader.ending
        if (found.records, found.end, found.fault) != (records, end, None):
            raise ValueError(
                f"{found.records} of {records} records can be read back: {found.fault or 'it is cut short'}"
            )
        return end

    def _take_back(self, *paths: Path) -> None:
        """Remove the files of a failed snapshot. Raises BrokenDiskError where they stay, because a log that begins
        there would be replayed after this one."""
        for path in paths:
            try:
                self._disk.unlink(path)
            except OSError as error:
                raise BrokenDiskError(f"{path}: cannot be removed: {error.strerror}") from error

    def _check_server(self, path: Path, number: int, count: int) -> None:
        if (number, count) != (self._number, self._count):
            raise RequestError(
                f"{path} is of server {number} of {count}, and this is server {self._number} of {self._count}; start as"
                " many servers as before, each with its own folder, or begin in a new one"
            )

    def _generations(self, kind: str) -> list[int]:
        return sorted(number for found, number in self._files() if found == kind)

    def _files(self) -> Iterator[tuple[str, int]]:
        for path in sorted(self._folder.iterdir()):
            if found := _NAME.fullmatch(path.name):
                yield found[1], int(found[2])

    def _path(self, kind: str, generation: int) -> Path:
        return self._folder / f"{kind}-{generation:06}"
