"""A server's file operations, call by call, so that tests can make any of them fail.

There are two kinds of failures. A write that did not happen and left nothing behind is refused: the server continues,
and the request may be sent again. If the content of a file is unknown, as after a failed fsync, the server stops.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from planner.errors import RunError
from runtime.servers.private_files import FILE

PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of a write that may succeed later: no space, or mounted read-only."""


class RefusedWriteError(RunError):
    """A write was refused, and the files are unchanged."""


class BrokenDiskError(RunError):
    """The content of a file is unknown: the server stops, and reads its files again when it is restarted."""


class Disk(Protocol):
    """Calls that change files. All raise OSError. `write` may write only a part of its data, as pwritev does."""

    def open(self, path: Path) -> int: ...

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview], at: int) -> int: ...

    def size(self, descriptor: int) -> int: ...

    def truncate(self, descriptor: int, length: int) -> None: ...

    def sync(self, descriptor: int) -> None: ...

    def close(self, descriptor: int) -> None: ...

    def replace(self, path: Path, by: Path) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def sync_folder(self, path: Path) -> None: ...


class SystemDisk:
    """The calls of the operating system."""

    def open(self, path: Path) -> int:
        """Open a file for reading and writing; created, for its owner alone, where there is none."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE)
        os.fchmod(descriptor, FILE)
        return descriptor

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview], at: int) -> int:
        return os.pwritev(descriptor, parts, at)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def truncate(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def replace(self, path: Path, by: Path) -> None:
        by.replace(path)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_all(disk: Disk, descriptor: int, parts: Sequence[bytes | memoryview], at: int) -> int:
    """Write all parts, in as many calls as needed; returns the position after them. Raises OSError."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        written = disk.write(descriptor, left, at)
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return at
