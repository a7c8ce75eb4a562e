"""One rank of a run: any error becomes one line, and it leaves notes for the process that started it.

    NOTES/parent         a pipe of the process that started all ranks: a rank ends with it (`processes.lifeline`)
    NOTES/store          where the ranks find each other (`runtime.comm.rendezvous`)
    NOTES/rank3.at       what it does: written at every step, so its age says how long nothing has happened
    NOTES/rank3.json     why it failed: exit code and message
    NOTES/rank3.trace    its stack trace, when it is asked (SIGUSR1)
    NOTES/asked          the process that started all ranks asks where they wait
    NOTES/rank3.where    what it waits for, when it is asked this (see `runtime.processes.hang`)
    NOTES/rank3.done     it has done its work
    NOTES/leave          the process that started all ranks asks them to end after this step

Without notes (several nodes, torchrun started by hand) the cause of a failure is a line on stderr, and ranks watch
themselves.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from planner.errors import PlannerError
from runtime.processes.hang import Folder, HangWatch, Store, end_process
from runtime.processes.lifeline import hold_on

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as C10dStore

At = Callable[[str], None]
"""Reports what a rank is about to do."""

_GRACE = 10.0  # seconds beyond its timeout after which a rank that cannot answer ends

Joined = Callable[["C10dStore"], None]
"""Called with the store of the process group, once this process has joined it."""


def be_a_rank(work: Callable[[At, Joined], int], notes: str | None, timeout: float | None = None) -> int:
    """Do one rank's work and return its exit code. The work calls its first argument at every progress, and the second
    with the store of the process group. If it makes no progress for `timeout` seconds, the process that started the
    ranks ends them, or without notes the rank ends itself."""
    found = _Notes(folder=None if notes is None else Path(notes), rank=int(os.environ["RANK"]), timeout=timeout)
    try:
        found.start()
        code = work(found.at, found.joined)
        if code:
            found.fail(code, "")  # rank 0 has printed the error
        found.finish()
        return code
    except PlannerError as error:
        code, message = error.exit_code, str(error)
    except Exception as error:  # the process boundary: other ranks wait for this one, so it must end
        code, message = 1, f"rank {os.environ['RANK']}: {in_one_line(error)}"
    found.fail(code, message)
    sys.stdout.flush()
    os._exit(code)  # not through the process groups, which would wait for the others


class _Notes:
    """The notes of one rank, or none."""

    def __init__(self, *, folder: Path | None, rank: int, timeout: float | None) -> None:
        self._folder = folder
        self._rank = rank
        self._timeout = timeout
        self._trace: IO[str] | None = None
        own = timeout if folder is None else None
        self._hang = HangWatch(timeout=own, end=end_process)
        if folder is not None:
            self._hang.board = Folder(folder, self._write)

    def start(self) -> None:
        if self._folder is not None:
            hold_on(self._folder)
            self._trace = open(self._path("trace"), "w")  # noqa: SIM115  # as long as the process lives
            faulthandler.register(signal.SIGUSR1, file=self._trace, all_threads=True)
        if self._folder is not None or self._timeout is not None:
            self._hang.start()
        self.at("starting")

    def joined(self, store: "C10dStore") -> None:
        """From here on, ranks without notes ask each other."""
        if self._folder is None:
            self._hang.board = Store(store, self._rank, int(os.environ["WORLD_SIZE"]))

    def at(self, what: str) -> None:
        self._hang.progress(what)
        if self._folder is not None:
            try:
                self._write("at", what)
            except OSError:  # a full disk: the time of the last note still says that there is progress
                with contextlib.suppress(OSError):
                    os.utime(self._path("at"))
        elif self._timeout is not None:
            later = self._timeout + 2 * self._hang.patience + _GRACE  # for when no thread can answer
            faulthandler.dump_traceback_later(later, exit=True)

    def fail(self, code: int, message: str) -> None:
        if self._folder is not None:
            try:
                self._write("json", json.dumps({"code": code, "message": message}))
                return
            except OSError:  # a full disk: the last lines of stderr are told instead
                pass
        if message:
            sys.stderr.write(f"error: {message}\n")
            sys.stderr.flush()

    def finish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._hang.stop()
        if self._folder is not None:
            self._write("done", "")

    def _write(self, kind: str, text: str) -> None:
        """Write a note; it is whole or not there."""
        part = self._path(f"{kind}.part")
        with contextlib.suppress(FileNotFoundError):  # the reader has gone
            part.write_text(text, encoding="utf-8")
            part.replace(self._path(kind))

    def _path(self, kind: str) -> Path:
        assert self._folder is not None
        return self._folder / f"rank{self._rank}.{kind}"


def in_one_line(error: Exception) -> str:
    """Name, message and place of an error; for one that a data loader worker sent, the message inside of it too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "(no message)"
    if len(lines) > 1 and "Original Traceback" in lines[1]:
        places = [line for line in lines if line.startswith("File ")]
        place = f" ({places[-1].split(', in ')[0]})" if places else ""
        return f"{text.rstrip('.')}: {lines[-1]}{place}"
    return f"{type(error).__name__}: {text} (at {_place(error)})"


def _place(error: Exception) -> str:
    """The last frame of the user's code or of ours on the way to the error, else the last frame."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
