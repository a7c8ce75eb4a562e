"""Starts the ranks of a run on this machine, and sees to it that all of them end.

    run_ranks ── torchrun ──┬─ rank 0
        │                   ├─ rank 1           each leaves notes (see `runtime.rank`)
        └── watch (thread) ─┴─ ...

torchrun ends the other ranks where one has failed, but waits up to 30 seconds for a rank that does not listen, never
notices one that does nothing, and knows nothing of the workers of data loaders. So a thread looks at the notes: where a
rank failed, vanished, or nothing has happened for too long, all ranks have a few seconds left and are then killed, each
with the processes that it started.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from planner.errors import RunError, StoppedError
from runtime.breakdown import failure_of
from runtime.watch import Watch

_PATIENCE = 12.0  # seconds until everything is over after a signal; the watch kills before that


def run_ranks(
    module: str,
    arguments: Sequence[str],
    processes: int,
    on_line: Callable[[str], None] | None = None,
    timeout: float | None = None,
    leave: Callable[[], bool] = lambda: False,
) -> int:
    """Run `python -m module` in so many processes of this machine, on loopback, and return the exit code.

    The module takes `--notes FOLDER`, for `be_a_rank`. What the ranks print goes to stdout, or line by line to
    `on_line`. Where `leave` says so they get the note that asks them to end (`runtime.watch.LEAVE`). Raises RunError,
    with what went wrong first, where a rank fails, is killed, or where no rank makes progress for `timeout` seconds
    (None: for ever). Nothing that was started is left when this returns or raises.
    """
    with tempfile.TemporaryDirectory(prefix="plan-run-") as notes, tempfile.TemporaryFile("w+") as noise:
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "1", "--nproc-per-node", str(processes),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
            "-m", module, *arguments, "--notes", notes,
        ]  # fmt: skip
        (Path(notes) / "parent").write_text(str(os.getpid()), encoding="utf-8")
        sys.stdout.flush()
        returned, watch = _run(command, noise, _environment(processes), on_line, Path(notes), timeout, leave)
        if returned == 0 and watch.verdict is None:
            return 0
        noise.seek(0)
        if watch.verdict is not None:
            raise RunError(watch.verdict)
        code, message = failure_of(
            Path(notes),
            returned=returned,
            noise=noise.read(),
            killed_by_us=watch.killed,
            unfinished=[rank for rank in watch.pids() if not watch.has(rank, "done")],
        )
        if message:
            raise RunError(message, exit_code=code)
        return code


def threads_per_rank(processes: int) -> int:
    """Threads of each of so many processes on this machine: its cores shared out, one at least."""
    return max(1, (os.cpu_count() or 1) // processes)


def _run(
    command: Sequence[str],
    noise: IO[str],
    environment: Mapping[str, str],
    on_line: Callable[[str], None] | None,
    notes: Path,
    timeout: float | None,
    leave: Callable[[], bool],
) -> tuple[int, Watch]:
    """Run torchrun to its end. Where this process is told to stop, torchrun is told first, which ends its ranks."""
    ours = threading.current_thread() is threading.main_thread()  # only there can a signal be handled
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP) if ours}
    child = None
    try:
        child = subprocess.Popen(
            command, env=environment, stderr=noise, stdout=None if on_line is None else subprocess.PIPE, text=True
        )
        with Watch(child=child, notes=notes, timeout=timeout, leave=leave) as watch:
            try:
                if on_line is not None and child.stdout is not None:
                    for line in child.stdout:
                        on_line(line.rstrip("\n"))
                return child.wait(), watch
            except BaseException:
                watch.stop()
                child.wait(_PATIENCE)
                raise
    finally:
        if child is not None and child.stdout is not None:
            child.stdout.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise StoppedError(128 + number)


def _environment(processes: int) -> dict[str, str]:
    """The ranks must find this package, wherever the caller stands, and share the cores unless the caller says more."""
    root = str(Path(__file__).resolve().parents[1])
    known = os.environ.get("PYTHONPATH")
    path = f"{root}{os.pathsep}{known}" if known else root
    return {"OMP_NUM_THREADS": str(threads_per_rank(processes)), **os.environ, "PYTHONPATH": path}
