"""One run at a time writes into a folder.

    runs/a/lock      which process holds it, since when, and a token

The file is created by an exclusive create, which is atomic on network file systems too. Its holder touches it every few
seconds. A process that finds it checks whether the holder is gone:

    the same kernel and namespace        no process of that number, or one that started at another time
    another host or container, unknown   the file was not touched for `PATIENCE` seconds while we watched; clocks of two
                                         hosts are not compared

A stale lock is replaced under a claim, a file named after the lock that it replaces, so that only one of several
processes succeeds. A holder that was suspended so long that it was taken for dead finds another token before it
publishes anything (`Lock.check`), and writes no more.
"""

import atexit
import hashlib
import json
import os
import secrets
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hardware_profiles.foreign import ForeignTextError, decoded, parse_json
from planner.errors import CheckpointError
from runtime.run_folder import private
from runtime.run_folder.process import Process, process_from, this_process

LOCK = "lock"
"""The file of a folder that says which process writes there."""

BEAT = 5.0
"""Seconds between two touches."""
PATIENCE = 30.0
"""Seconds without a touch after which a holder that cannot be seen counts as gone."""

_LARGEST = 4096  # maximum bytes of a lock
_LOOK = 0.2  # seconds between two checks of a lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The content of a lock: its holder and since when (None where that is unreadable, or was copied with the folder);
    its bytes, its inode, and the time of its last touch."""

    holder: Process | None
    since: str
    raw: bytes
    inode: int
    touched: int

    def has(self, token: str) -> bool:
        """Whether it is the lock with this token, whatever its inode: network file systems may change inodes when they
        are mounted again."""
        return token.encode() in self.raw

    def __str__(self) -> str:
        return "a process that it does not name" if self.holder is None else f"{self.holder} since {self.since}"


def held(path: Path) -> Held | None:
    """The content of a lock, whether or not its holder lives; None where the folder is not locked."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        raw, status = os.read(opened, _LARGEST), os.fstat(opened)
    finally:
        os.close(opened)
    holder, since = None, ""
    try:
        content = parse_json(decoded(raw))
        if content["inode"] == status.st_ino:
            since = str(content["since"])[:40]
            holder = process_from(content["holder"]) if since.isprintable() else None
    except (ForeignTextError, KeyError, TypeError):
        pass  # half written, or not ours: its holder is unknown
    return Held(holder=holder, since=since, raw=raw, inode=status.st_ino, touched=status.st_mtime_ns)


def check(folder: Path, token: str) -> None:
    """Raise CheckpointError where the lock of a folder is no longer the one with this token."""
    found = held(folder / LOCK)
    if found is None or not found.has(token):
        who = "nobody holds it now" if found is None else f"it is held by {found}"
        raise CheckpointError(
            f"{folder}: this run lost its lock, {who}: nothing more is written there. Resume from the last checkpoint"
            " with --continue once no other run writes there"
        )


def _left_behind(path: Path, found: Held, own: Process, patience: float) -> bool:
    """Whether the holder of a lock is gone, or is this process, which may lock again."""
    alive = None if found.holder is None else found.holder.alive
    if found.holder == own or alive is not None:
        return found.holder == own or not alive
    ends = time.monotonic() + patience
    while time.monotonic() < ends:
        time.sleep(min(_LOOK, patience / 4))
        now = held(path)
        if now is None or (now.raw, now.inode, now.touched) != (found.raw, found.inode, found.touched):
            return False
    return True


class Lock:
    """The lock of a folder, held by this process until it is released or the process ends. `taken_over` is the previous
    holder, if it left the lock behind.

    Raises CheckpointError, which names the holder, if another run holds it.
    """

    def __init__(self, folder: Path, *, patience: float = PATIENCE) -> None:
        self.path = folder / LOCK
        self.token = secrets.token_hex(16)
        self.taken_over: str | None = None
        self._folder, self._own = folder, this_process()
        self._released = threading.Event()
        try:
            self._take(patience)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}; name another place") from error
        atexit.register(self.release)
        threading.Thread(target=self._beat, name=f"lock of {folder}", daemon=True).start()

    def check(self) -> None:
        """Raise CheckpointError if another process has taken the lock."""
        check(self._folder, self.token)

    def release(self) -> None:
        """Release the lock; a no-op if it was released already, or in a process that was forked from its holder."""
        if self._released.is_set() or this_process() != self._own:
            return
        self._released.set()
        atexit.unregister(self.release)
        try:
            found = held(self.path)
            if found is not None and found.has(self.token):
                self.path.unlink(missing_ok=True)
        except OSError:
            return  # the folder is gone; the next run sees that this process is too

    def _take(self, patience: float) -> None:
        while not self._made(self.path):
            found = held(self.path)
            if found is None:
                continue
            if not _left_behind(self.path, found, self._own, patience):
                if held(self.path) is None:  # it was released meanwhile
                    continue
                raise CheckpointError(
                    f"{self._folder}: a run writes there already: {found} holds {self.path}; wait for its end, or name"
                    " another folder"
                )
            if self._replaced(found, patience):
                self.taken_over = None if found.holder == self._own else str(found)
                return

    def _made(self, path: Path) -> bool:
        """Create a lock file that names this process; False where there is one."""
        content: dict[str, object] = {"holder": self._own.content(), "token": self.token}
        content["since"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        try:
            with open(path, "xb", buffering=0, opener=private.opener) as file:
                try:
                    content["inode"] = os.fstat(file.fileno()).st_ino
                    file.write(json.dumps(content).encode())
                    os.fsync(file.fileno())
                except OSError:  # a full disk: an empty lock would keep the next run waiting
                    path.unlink(missing_ok=True)
                    raise
        except FileExistsError:
            return False
        return True

    def _replaced(self, found: Held, patience: float) -> bool:
        """Replace a stale lock, unless another process does so or has done so."""
        word = hashlib.sha256(found.raw + str(found.inode).encode()).hexdigest()[:16]
        claim = self._folder / f".{LOCK}.{word}.claim"
        if not self._made(claim):
            other = held(claim)
            if other is not None and _left_behind(claim, other, self._own, patience):
                claim.unlink(missing_ok=True)
            time.sleep(_LOOK)
            return False
        try:
            now = held(self.path)
            if now is None or (now.raw, now.inode) != (found.raw, found.inode):
                return False
            claim.replace(self.path)
        finally:
            claim.unlink(missing_ok=True)
        now = held(self.path)
        return now is not None and now.has(self.token)

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            try:
                if (found := held(self.path)) is None or not found.has(self.token):
                    return
                os.utime(self.path)
            except OSError:
                continue
