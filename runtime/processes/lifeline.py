"""How ranks notice that the process that started them is gone, however it ended.

That process holds one end of a named pipe open and never writes to it. A thread of each rank reads the other end: when
the last process that held the pipe ends, the kernel closes it, and the read returns. The rank then removes the folder
of notes, which no other process will do, and kills its process group, with itself and its data loader workers, wherever
its main thread is.
"""

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

LIFELINE = "parent"
"""The pipe, in the folder of notes."""


@contextlib.contextmanager
def held(notes: Path) -> Iterator[None]:
    """Processes that are started inside of this context live only as long as this process holds the pipe."""
    path = notes / LIFELINE
    os.mkfifo(path, 0o600)
    end = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # read-write, because opening for writing waits for a reader
    try:
        yield
    finally:
        os.close(end)


def hold_on(notes: Path) -> None:
    """End this process, and its process group if it leads one, once no process holds the pipe any more."""
    try:
        pipe = os.open(notes / LIFELINE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        os._exit(1)  # the run is over already
    assert stat.S_ISFIFO(os.fstat(pipe).st_mode), f"{notes / LIFELINE} is no pipe"
    os.set_blocking(pipe, True)
    threading.Thread(target=_end_behind, args=(pipe, notes), name="lifeline", daemon=True).start()


def _end_behind(pipe: int, notes: Path) -> None:
    os.read(pipe, 1)
    _delete(notes)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _delete(notes: Path) -> None:
    """Remove the folder of notes. Any rank may do it; others finish what one began, because a rank's end may break the
    communication of another, and end that before it is done.
    """
    going = notes.with_name(f"{notes.name}.gone")  # there no process writes new notes
    with contextlib.suppress(OSError):
        notes.rename(going)
    with contextlib.suppress(OSError):
        for note in going.iterdir():
            note.unlink(missing_ok=True)
        going.rmdir()
