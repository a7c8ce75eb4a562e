"""Files and folders for their owner alone, whatever the umask: keys, certificates, logs, snapshots."""

import os
import stat
import tempfile
from pathlib import Path

from planner.errors import RequestError

FILE, FOLDER = 0o600, 0o700


def make_folder(path: Path) -> None:
    """Create a folder for its owner alone. An existing one keeps its mode, because it may hold other things as well."""
    try:
        path.mkdir(parents=True, mode=FOLDER)
        path.chmod(FOLDER)
    except FileExistsError:
        if not path.is_dir():
            raise RequestError(f"{path} is a file; give a folder") from None


def take_folder(path: Path) -> None:
    """Create a folder for our files only, or restrict an existing one to its owner. Raises RequestError where it
    belongs to another user."""
    make_folder(path)
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise RequestError(
            f"{path} belongs to user {owner}, and this is user {os.geteuid()}; start as that user, or in a new folder"
        )
    path.chmod(FOLDER)


def write_aside(path: Path, content: bytes) -> Path:
    """Create a file beside `path` with this content, for its owner alone, to be renamed or linked. It is flushed to the
    disk, so that no name ever refers to a file without its content."""
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".part-", delete=False) as file:
        os.fchmod(file.fileno(), FILE)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)
    return Path(file.name)


def write_new(path: Path, content: bytes) -> None:
    """Create a file with this content, for its owner alone, atomically. Raises FileExistsError where there is one."""
    aside = write_aside(path, content)
    try:
        os.link(aside, path)
    finally:
        aside.unlink()
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_secret(path: Path) -> str:
    """The text of a file that no other user may read. Raises RequestError where others can read it, or it belongs to
    another user, and OSError where it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        found = os.fstat(descriptor)
        if found.st_uid not in (os.geteuid(), 0):
            raise RequestError(f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}; delete it")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise RequestError(
                f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):o}); make it 600: chmod 600 {path}"
            )
        return file.read()
