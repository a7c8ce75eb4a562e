"""Watches the ranks of a run through their notes (see `runtime.rank`), and says what went wrong first.

A run is over where its ranks are, where one has failed or vanished, where it is stopped, and where no rank has made
progress for too long. Then the ranks have `_GRACE` seconds to end by themselves, torchrun as long again. Where nothing
happens all ranks are asked where they are: by a signal, which tells the line of code of whoever is not stopped, and by
a note that a thread of each rank answers (`runtime.hang`). Those that wait for others are the victims, the rest is
named.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from runtime.breakdown import standstill
from runtime.hang import ASKED, WHERE, answer_of
from runtime.rank import is_alive

LEAVE = "leave"
"""The note that asks the ranks to end after the step that they are in."""

_GRACE = 2.0  # seconds between the first failure and the end of all ranks
_LOOK = 0.1  # seconds between two looks
_ANSWER = 2.0  # seconds in which a rank says where it is


class Watch:
    """A thread beside the process that reads what the ranks print. Use it as a context: it ends with everything that
    was started. It asks `leave` now and then, and leaves the ranks a note where that is so."""

    def __init__(
        self,
        *,
        child: "subprocess.Popen[str]",
        notes: Path,
        timeout: float | None,
        leave: Callable[[], bool] = lambda: False,
    ) -> None:
        self.verdict: str | None = None  # why the run was ended, where no rank says it
        self.killed: set[int] = set()
        self._child = child
        self._notes = notes
        self._timeout = timeout
        self._leave = leave
        self._progress = time.time()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch of the ranks", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self._stopped.set()
        self._thread.join()

    def stop(self) -> None:
        """End the run."""
        self._stopped.set()

    def _watch(self) -> None:
        """Look until the run is over, then end what is left of it."""
        while self._child.poll() is None and not self._over():
            if not (self._notes / LEAVE).exists() and self._leave():
                (self._notes / LEAVE).touch()
            time.sleep(_LOOK)
        if self._child.poll() is None and (self._stopped.is_set() or self.verdict is not None):
            self._child.terminate()
        if self._child.poll() is None:
            self._await_child(_GRACE)
        self._kill_ranks()
        self._await_child(_GRACE)
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._kill_ranks()  # one that was starting

    def _await_child(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)

    def _over(self) -> bool:
        if self._stopped.is_set() or any(self._notes.glob("rank*.json")):
            return True
        if any(not is_alive(pid) and not self.has(rank, "done") for rank, pid in self.pids().items()):
            return True
        for note in self._notes.glob("rank*.at"):
            with contextlib.suppress(FileNotFoundError):
                self._progress = max(self._progress, note.stat().st_mtime)
        if self._timeout is None or time.time() - self._progress < self._timeout:
            return False
        self.verdict = self._what_hangs()
        return True

    def _kill_ranks(self) -> None:
        """Each rank is the leader of a session, so its group has all that it started."""
        for rank, pid in self.pids().items():
            if is_alive(pid):
                self.killed.add(rank)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def pids(self) -> dict[int, int]:
        return {rank: int(path.read_text(encoding="utf-8")) for rank, path in self._of_kind("pid").items()}

    def _of_kind(self, kind: str) -> dict[int, Path]:
        found = {int(path.stem.removeprefix("rank")): path for path in self._notes.glob(f"rank*.{kind}")}
        return dict(sorted(found.items()))

    def has(self, rank: int, kind: str) -> bool:
        return (self._notes / f"rank{rank}.{kind}").exists()

    def _what_hangs(self) -> str:
        """Ask all ranks where they are, name those that do not wait for others, and say for what the others wait."""
        pids = self.pids()
        done = f"no progress in {self._timeout:g} s (--timeout)"
        if not pids:
            return f"{done}: no rank has started"
        (self._notes / ASKED).touch()
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + _ANSWER
        while time.monotonic() < deadline and not all(self._trace(rank) and self.has(rank, WHERE) for rank in pids):
            time.sleep(_LOOK)
        at = [path.read_text(encoding="utf-8") for path in self._of_kind("at").values()]
        return f"{done} at {max(at, key=at.count, default='the start')}: " + standstill(
            {rank: (self._trace(rank), pid) for rank, pid in pids.items()},
            {rank: answer_of(path.read_text(encoding="utf-8")) for rank, path in self._of_kind(WHERE).items()},
        )

    def _trace(self, rank: int) -> str:
        path = self._notes / f"rank{rank}.trace"
        return path.read_text(encoding="utf-8") if path.exists() else ""
