"""The folder in memory that has the state replicas of a run on one host.

    /dev/shm/plan-run-3f2a…/          32 digits: the identity of the folder of checkpoints
        .plan-owned                   that it is ours, and of which run
        alive                         locked (flock) by every process that needs the folder
        owner.json                    the process that started the ranks: it may start them again
        host                          a token: processes that see the same one are on one host
        step-000012.rank-00003.…      see `runtime.recovery.state_replicas`

Whoever starts ranks holds the folder as long as it runs, and deletes it at its end. What a process that was killed
left behind is found at the next start of any run of this user on the host: nobody holds the lock, which the kernel
takes from a process at whatever end, and the owner is gone. The run itself goes on from what is there.
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
"""The environment variable that names the folder in which replicas are kept, where it is not shared memory."""

_NAME = re.compile(r"plan-run-[0-9a-f]{32}")
_ALIVE, _OWNER = "alive", "owner.json"


def kept_in() -> Path:
    """Where folders of replicas lie on this host."""
    given = os.environ.get(FOLDER)
    return Path(given) if given else shared_memory()


def shared_memory() -> Path:
    """A folder whose files lie in memory, or that of temporary files where there is none."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def replicas_of(origin: Origin) -> Path:
    """Where the state replicas of a run are kept on this host."""
    return kept_in() / f"plan-run-{origin.folder}"


def open_replicas(origin: Origin, owner: int) -> tuple[Path, int]:
    """Make the folder of the replicas of a run, or see that it is ours; `owner` is the process that may start the run
    again. Returns it with a descriptor that keeps others from deleting it until it is closed. Raises CheckpointError
    where it cannot be made or is not ours."""
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
    """A descriptor of the file that says that somebody needs the folder, locked; None where the folder was deleted
    meanwhile."""
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE)
    except FileNotFoundError:
        return None
    os.fchmod(opened, FILE)
    with suppress(OSError):  # a file system without locks: the owner alone counts
        fcntl.flock(opened, fcntl.LOCK_SH)
    if os.fstat(opened).st_nlink:
        return opened
    os.close(opened)
    return None


@contextmanager
def holding(origin: Origin, wanted: bool) -> Iterator[None]:
    """Hold the replicas of a run, where it is to have some, and delete them at the end, whichever it is."""
    opened = open_replicas(origin, os.getpid())[1] if wanted else None
    try:
        yield
    finally:
        delete_replicas(origin)
        if opened is not None:
            os.close(opened)


def delete_replicas(origin: Origin) -> None:
    """Delete what is kept of a run on this host; what is not ours stays."""
    with suppress(OSError):
        owned.remove(replicas_of(origin), inside=kept_in(), name=_NAME, ours=lambda mark: mark == _mark(origin))


def sweep(own: Origin | None) -> list[str]:
    """Delete the replicas of runs on this host that nobody goes on with, but those of one run; returns what is to be
    said of it."""
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
    """Whether nobody needs a folder; whoever opens it meanwhile waits."""
    try:
        owner = process_from(parse_json(read_text(path / _OWNER, 4096, follow=False)))
        opened = os.open(path / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ForeignTextError):
        yield False  # it is being made
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield owner is not None and owner.alive is False
    finally:
        os.close(opened)


def _mark(origin: Origin) -> owned.Mark:
    return owned.Mark(kind="replicas", origin=origin)
