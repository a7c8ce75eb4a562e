"""Watches the ranks of a run, and reports the first cause of a failure.

A run is over when all its ranks have ended, when one has failed or ended before its work was done, when it is stopped,
and when no rank has made progress for too long. Then all ranks are asked to end (SIGTERM), and after `_GRACE` seconds
the remaining ones are killed. If nothing happens, all ranks are asked where they are: by a signal, to which every rank
that is not stopped answers with its line of code, and by a note that a thread of each rank answers
(`runtime.processes.hang`). Ranks that wait for others are the victims; the others are named.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType

from runtime.processes.breakdown import standstill
from runtime.processes.hang import ASKED, WHERE, answer_of

LEAVE = "leave"
"""The note that asks the ranks to end after the step that they are in."""

_GRACE = 2.0  # seconds between the first failure and the end of all ranks
_LOOK = 0.1  # seconds between two checks
_ANSWER = 2.0  # seconds in which a rank says where it is


class Watch:
    """A thread beside the process that reads the ranks' output. Use it as a context: at its end no started process is
    left. It calls `leave` now and then, and leaves the ranks a note when that returns True. Each rank leads a process
    group with all processes that it started."""

    def __init__(
        self,
        *,
        ranks: Mapping[int, "subprocess.Popen[bytes]"],
        notes: Path,
        timeout: float | None,
        leave: Callable[[], bool] = lambda: False,
    ) -> None:
        self.verdict: str | None = None  # why the run was ended, if no rank says so
        self.ended: dict[int, int] = {}  # return codes of the ranks that ended by themselves, in their order
        self._running = dict(ranks)
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

    def wait(self) -> None:
        """Wait until the run is over and none of its processes is left."""
        self._thread.join()

    @property
    def over(self) -> bool:
        """Whether the run is over and none of its processes is left."""
        return not self._thread.is_alive()

    @property
    def done(self) -> int:
        """The number of ranks that have ended well, with their work done."""
        return sum(not code and self._has(rank, "done") for rank, code in self.ended.items())

    def _has(self, rank: int, kind: str) -> bool:
        return (self._notes / f"rank{rank}.{kind}").exists()

    def _watch(self) -> None:
        """Watch until the run is over, then end the remaining ranks."""
        try:
            while not self._over():
                if not (self._notes / LEAVE).exists() and self._leave():
                    (self._notes / LEAVE).touch()
                self._stopped.wait(_LOOK)
        finally:
            self._end()

    def _over(self) -> bool:
        self.ended |= self._reaped()
        if self._stopped.is_set() or not self._running or any(self._notes.glob("rank*.json")):
            return True
        if any(code or not self._has(rank, "done") for rank, code in self.ended.items()):
            return True
        for note in self._of_kind("at").values():
            with contextlib.suppress(FileNotFoundError):
                self._progress = max(self._progress, note.stat().st_mtime)
        if self._timeout is None or time.time() - self._progress < self._timeout:
            return False
        self.verdict = self._what_hangs()
        return True

    def _end(self) -> None:
        """End the remaining ranks. Ranks that have reported a failure end by themselves."""
        failing = self._of_kind("json").keys()
        if self.verdict is None and not self._stopped.is_set():
            self._await(failing)
        self._signal(signal.SIGTERM)
        self._await(list(self._running))
        self._signal(signal.SIGKILL)
        for process in self._running.values():
            process.wait()

    def _await(self, ranks: Collection[int]) -> None:
        deadline = time.monotonic() + _GRACE
        while not self._running.keys().isdisjoint(ranks) and time.monotonic() < deadline:
            time.sleep(_LOOK / 10)
            self._reaped()

    def _reaped(self) -> dict[int, int]:
        """The ranks that have ended since the last check, and their return codes. Remaining processes of their groups
        are killed at once, while no other group can have the same number."""
        found = {rank: code for rank, process in self._running.items() if (code := process.poll()) is not None}
        for rank in found:
            _signal_group(self._running.pop(rank).pid, signal.SIGKILL)
        return found

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            _signal_group(process.pid, number)

    def _of_kind(self, kind: str) -> dict[int, Path]:
        found = {int(path.stem.removeprefix("rank")): path for path in self._notes.glob(f"rank*.{kind}")}
        return dict(sorted(found.items()))

    def _what_hangs(self) -> str:
        """Ask all ranks, name those that do not wait for others, and say what the others wait for."""
        started = {rank: self._running[rank].pid for rank in self._of_kind("at") if rank in self._running}
        done = f"no progress in {self._timeout:g} s (--timeout)"
        if not started:
            return f"{done}: no rank has started"
        (self._notes / ASKED).touch()
        for pid in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + _ANSWER
        while time.monotonic() < deadline and not all(self._trace(rank) and self._has(rank, WHERE) for rank in started):
            time.sleep(_LOOK)
        at = [path.read_text(encoding="utf-8") for path in self._of_kind("at").values()]
        return f"{done} at {max(at, key=at.count, default='the start')}: " + standstill(
            {rank: (self._trace(rank), pid) for rank, pid in started.items()},
            {rank: answer_of(path.read_text(encoding="utf-8")) for rank, path in self._of_kind(WHERE).items()},
        )

    def _trace(self, rank: int) -> str:
        path = self._notes / f"rank{rank}.trace"
        return path.read_text(encoding="utf-8") if path.exists() else ""


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a zombie
        os.killpg(leader, number)
