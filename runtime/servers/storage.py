"""The files of one server: a snapshot, and a log of what has changed since.

    snapshot-000003   the state, written aside and renamed: whole or not there
    log-000003        records since then, each appended before it is acknowledged
    log-000004 ...    where the server was killed between a new log and its snapshot

A server that was killed reads the newest snapshot and replays the logs from there on. A record that was not written to
its end was not acknowledged, so that it is dropped; its worker sends it again. A record is in the hands of the
operating system before it is acknowledged, which outlives the process; with `flushed` it is on the disk, which outlives
the machine.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from planner.errors import RequestError
from runtime.servers.frames import Frame, encode, read_frames
from runtime.servers.shard import Shard

LEAST_LOG = 2**24
"""Bytes of a log below which no snapshot is made."""

_NAME = re.compile(r"(snapshot|log)-([0-9]{6})")


class Storage:
    """The files of server `number` of `count` in `folder`, which is made. `open` gives the state that they hold."""

    def __init__(self, folder: Path, number: int, count: int, *, flushed: bool = False) -> None:
        self._folder, self._number, self._count, self._flushed = folder, number, count, flushed
        self._log: BinaryIO | None = None
        self._generation = 0
        self._logged = self._kept = 0

    def open(self) -> Shard:
        """The state as it was when the last record was appended. Raises RequestError for files that are damaged, or of
        another server."""
        self._folder.mkdir(parents=True, exist_ok=True)
        shard = Shard(number=self._number, count=self._count)
        snapshots, logs = self._generations("snapshot"), self._generations("log")
        if snapshots:
            self._generation = snapshots[-1]
            shard = self._restored(self._path("snapshot", self._generation))
        for generation in (one for one in logs if one >= self._generation):
            self._generation = generation
            self._replay(shard, self._path("log", generation))
        self._open_log()
        return shard

    def append(self, record: Frame) -> None:
        """Keep a record before it is applied and acknowledged."""
        assert self._log is not None
        data = encode(record)
        self._log.write(data)
        self._log.flush()
        if self._flushed:
            os.fdatasync(self._log.fileno())
        self._logged += len(data)

    @property
    def wants_snapshot(self) -> bool:
        """Whether the log has grown larger than what a snapshot takes, so that each byte is written twice at most."""
        return self._logged > max(LEAST_LOG, self._kept)

    def snapshot(self, shard: Shard) -> None:
        """Write the state, begin a new log, and drop the old files."""
        assert self._log is not None
        self._log.close()
        self._generation += 1
        path = self._path("snapshot", self._generation)
        aside = path.with_suffix(".part")
        with aside.open("wb") as file:
            for frame in shard.snapshot():
                file.write(encode(frame))
            file.flush()
            os.fsync(file.fileno())
            self._kept = file.tell()
        aside.replace(path)
        self._sync_folder()
        self._open_log()
        for kind in ("snapshot", "log"):
            for old in self._generations(kind):
                if old < self._generation:
                    self._path(kind, old).unlink(missing_ok=True)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _open_log(self) -> None:
        path = self._path("log", self._generation)
        self._log = path.open("ab")
        self._logged = self._log.tell()
        if self._logged == 0:
            self.append(Frame(kind="log", fields={"number": self._number, "count": self._count}))

    def _restored(self, path: Path) -> Shard:
        with path.open("rb") as file:
            try:
                shard = Shard.restored(recorded.frame for recorded in read_frames(file, path.stat().st_size))
            except (ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
                raise RequestError(f"{path} is no whole snapshot: {error}; it cannot be used") from error
        self._kept = path.stat().st_size
        self._check_server(path, shard.number, shard.count)
        return shard

    def _replay(self, shard: Shard, path: Path) -> None:
        end = 0
        with path.open("rb") as file:
            try:
                for recorded in read_frames(file, path.stat().st_size):
                    frame, end = recorded.frame, recorded.end
                    if frame.kind == "log":
                        self._check_server(path, frame.fields["number"], frame.fields["count"])
                    elif shard.check(frame):
                        shard.apply(frame)
            except (ValueError, KeyError, TypeError) as error:
                raise RequestError(f"{path}: {error}; this log cannot be replayed") from error
        if end < path.stat().st_size:
            os.truncate(path, end)

    def _check_server(self, path: Path, number: int, count: int) -> None:
        if (number, count) != (self._number, self._count):
            raise RequestError(
                f"{path} is of server {number} of {count}, and this is server {self._number} of {self._count}; start as"
                " many servers as before, each with its own folder, or begin in a new one"
            )

    def _generations(self, kind: str) -> list[int]:
        return sorted(number for found, number in self._files() if found == kind)

    def _files(self) -> Iterator[tuple[str, int]]:
        for path in self._folder.iterdir():
            if found := _NAME.fullmatch(path.name):
                yield found[1], int(found[2])

    def _path(self, kind: str, generation: int) -> Path:
        return self._folder / f"{kind}-{generation:06}"

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
