"""The folder in memory with the state replicas of a run on one host.

    /dev/shm/plan-run-3f2a…/          32 digits: the identity of the checkpoint folder
        .plan-owned                   marks it as ours, and names its run
        alive                         locked (flock) by every process that needs the folder
        owner.json                    the process that started the ranks: it may start them again
        host                          a token: processes that see the same one are on one host
        step-000012.rank-00003.…      see `runtime.recovery.state_replicas`

The process that starts the ranks holds the folder while it runs, and deletes it at its end. What a killed process left
behind is found at the next start of any run of this user on the host: the lock is free, because the kernel releases it
when a process ends for any reason, and the owner is gone. A restart of the same run continues from what is there.
"""

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hardware_profiles.foreign import ForeignTextError, parse_json, read_text
from planner.errors import CheckpointError
from runtime.run_folder import owned
from runtime.run_folder.identity import Origin
from runtime.run_folder.private import FILE, replace_text
from runtime.run_folder.process import process_from, process_of

FOLDER = "PLAN_STATE_REPLICAS"
"""The environment variable that names another folder for replicas than shared memory."""

_NAME = re.compile(r"plan-run-[0-9a-f]{32}")
_ALIVE, _OWNER = "alive", "owner.json"


def kept_in() -> Path:
    """The folder of all replica folders on this host."""
    given = os.environ.get(FOLDER)
    return Path(given) if given else shared_memory()


def shared_memory() -> Path:
    """A folder in memory, or the folder of temporary files where there is none."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def replicas_of(origin: Origin) -> Path:
    """The folder of a run's state replicas on this host."""
    return kept_in() / f"plan-run-{origin.folder}"


def open_replicas(origin: Origin, owner: int) -> tuple[Path, int]:
    """Create the replica folder of a run, or check that it is ours; `owner` is the process that may restart the run.
    Returns it with a descriptor that keeps others from deleting it until it is closed. Raises CheckpointError where it
    cannot be created or is not ours."""
    path = replicas_of(origin)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = None
        while opened is None:
            owned.make(path, _mark(origin))
            opened = _alive(path / _ALIVE)
        replace_text(path / _OWNER, json.dumps(process_of(owner).content()))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror}; name another place with {FOLDER}"
        ) from error
    return path, opened


def _alive(path: Path) -> int | None:
    """A locked descriptor of the file that says that a process needs the folder; None where the folder was deleted
    meanwhile."""
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE)
    except FileNotFoundError:
        return None
    os.fchmod(opened, FILE)
    with suppress(OSError):  # a file system without locks: only the owner counts
        fcntl.flock(opened, fcntl.LOCK_SH)
    if os.fstat(opened).st_nlink:
        return opened
    os.close(opened)
    return None


@contextmanager
def holding(origin: Origin, wanted: bool) -> Iterator[None]:
    """Hold the replicas of a run, if it is to have some, and delete them at the end, however it ends."""
    opened = open_replicas(origin, os.getpid())[1] if wanted else None
    try:
        yield
    finally:
        delete_replicas(origin)
        if opened is not None:
            os.close(opened)


def delete_replicas(origin: Origin) -> None:
    """Delete a run's replicas on this host; files that are not ours stay."""
    with suppress(OSError):
        owned.remove(replicas_of(origin), inside=kept_in(), name=_NAME, ours=lambda mark: mark == _mark(origin))


def sweep(own: Origin | None) -> list[str]:
    """Delete the replicas on this host that no process will continue from, except those of run `own`; returns messages
    about it."""
    said = []
    try:
        there = sorted(path for path in kept_in().iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []
    for path in there:
        mark = owned.mark_of(path)
        if mark is None or mark.kind != "replicas" or mark.origin == own:
            continue
        with suppress(OSError), _left_behind(path) as gone:
            if gone and owned.remove(path, inside=path.parent, name=_NAME, ours=mark.__eq__) is None:
                said.append(f"{path} was deleted: state replicas of {mark.origin}, whose processes are gone")
    return said


@contextmanager
def _left_behind(path: Path) -> Iterator[bool]:
    """Whether no process needs a folder; a process that opens it meanwhile waits."""
    try:
        owner = process_from(parse_json(read_text(path / _OWNER, 4096, follow=False)))
        opened = os.open(path / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ForeignTextError):
        yield False  # it is being created
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield owner is not None and owner.alive is False
    finally:
        os.close(opened)


def _mark(origin: Origin) -> owned.Mark:
    return owned.Mark(kind="replicas", origin=origin)
