"""Opens the folder of a run to write checkpoints into it: one process does it for all ranks.

`plan run` does so before it starts the ranks, and gives them the token of the lock. Under another launcher, and in your
own programs, the first rank does it.
"""

from dataclasses import dataclass
from pathlib import Path

from planner.errors import CheckpointError
from runtime.checkpoint.folder import RunFolder, checkpoints
from runtime.checkpoint.manifest import read_manifest
from runtime.run_folder import lock as locking
from runtime.run_folder.identity import Origin, RunRecord, adopt, own_record, read_record
from runtime.run_folder.lock import Lock
from runtime.run_folder.private import ensure_folder


@dataclass(kw_only=True)
class OpenedRun:
    """The folder of a run, locked by this process (`lock`) or by the one that started it; `token` is the token of the
    lock. `notes` are messages for the user who watches the run."""

    folder: RunFolder
    token: str
    lock: Lock | None
    notes: tuple[str, ...]

    def check(self) -> None:
        """Raise CheckpointError where another run has taken the folder."""
        locking.check(self.folder.path, self.token)

    def close(self) -> None:
        """Release the folder, so that another run can write there."""
        if self.lock is not None:
            self.lock.release()


def open_run(path: Path, token: str | None = None, *, patience: float = locking.PATIENCE) -> OpenedRun:
    """Create the folder of a run, or continue in it, under a lock: the lock with this token, held by the process that
    started this one, or a new lock of this process.

    Raises CheckpointError where it cannot be written, another run writes there, or it is a copy of another folder.
    """
    try:
        ensure_folder(path)
        known = read_record(path)
        if known is not None:
            own_record(path)  # a copy is refused as a copy, even if a lock was copied with it
        lock = None if token is not None else Lock(path, patience=patience)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}; name another place") from error
    try:
        if token is not None:
            locking.check(path, token)
        older = known is None and None in _origins(path)
        folder = RunFolder(path=path, record=own_record(path, older=older))
        notes = [f"{path} was locked by {lock.taken_over}, which has ended"] if lock and lock.taken_over else []
        if older:
            notes.append(f"{path} was written before runs had ids: its checkpoints are taken as those of one run")
        left = folder.prepare()
        notes += left if lock is not None else ()  # else the process that holds the lock has shown them
    except OSError as error:
        _release(lock)
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}; name another place") from error
    except BaseException:
        _release(lock)
        raise
    return OpenedRun(folder=folder, token=token or (lock.token if lock else ""), lock=lock, notes=tuple(notes))


def adopt_run(path: Path) -> RunRecord:
    """Give a folder that was moved, restored or put together an identity, and make all checkpoints in it its own.
    Raises CheckpointError where there are none, or a run writes there."""
    if not path.is_dir() or not checkpoints(path):
        raise CheckpointError(f"{path}: has no complete checkpoint; give the folder of a run")
    try:
        lock = Lock(path)
        try:
            return adopt(path, frozenset(_origins(path)))
        finally:
            lock.release()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error


def _origins(path: Path) -> list[Origin | None]:
    found: list[Origin | None] = []
    for one in checkpoints(path):
        try:
            found.append(read_manifest(one).origin)
        except CheckpointError:
            continue
    return found


def _release(lock: Lock | None) -> None:
    if lock is not None:
        lock.release()
