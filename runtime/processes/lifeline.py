"""How ranks notice that the process that started them has gone, whatever ended it.

It holds one end of a named pipe open and never writes to it. A thread of each rank reads the other end: when the kernel
closes the pipe, with the last process that held it, the read returns. The rank then removes the folder of notes, which
nobody else will, and kills its process group, itself and its data loader workers in it, wherever its main thread is.
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
    """The processes that are started meanwhile may live as long as this process holds the pipe."""
    path = notes / LIFELINE
    os.mkfifo(path, 0o600)
    end = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # for writing too, or opening waits for a reader
    try:
        yield
    finally:
        os.close(end)


def hold_on(notes: Path) -> None:
    """End this process, and all of its group where it leads one, once nobody holds the pipe any more."""
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
    """Remove the folder of notes, whichever rank does it first: the others finish what it began, as the end of one may
    break the messages of another, and end it, before it is through.
    """
    going = notes.with_name(f"{notes.name}.gone")  # where nobody writes another note
    with contextlib.suppress(OSError):
        notes.rename(going)
    with contextlib.suppress(OSError):
        for note in going.iterdir():
            note.unlink(missing_ok=True)
        going.rmdir()
