"""Starts the ranks of a run on this machine, and makes sure that all of them end.

    run_ranks ──┬─ rank 0
        │       ├─ rank 1           each leaves notes (see `runtime.processes.rank`)
        │       └─ ...
        └── watch (thread)

Each rank is a process that leads its own session, with the environment that torchrun would set. Ranks find each other
in a file in the folder of notes, which only its owner may enter; only the sockets of collectives listen, on loopback
(`runtime.comm.rendezvous`). A thread watches the processes and their notes: if a rank fails or vanishes, or nothing
happens for too long, all ranks are ended, each with the processes that it started.
"""

import codecs
import contextlib
import io
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from hardware_profiles import GIB, MIB
from planner.errors import RequestError, RunError
from planner.limits import available_bytes
from runtime.launchers.launched import LOOPBACK
from runtime.launchers.own import environment_of
from runtime.processes.breakdown import failure_of
from runtime.processes.lifeline import held
from runtime.processes.watch import Watch
from runtime.stopping import stopped_by_signals

_OWN = 140 * MIB
"""Private memory of a process after importing PyTorch, before it does anything; measured with 2.13."""

_PIECE = 2**16  # bytes read from the ranks at a time
_LOOK = 100  # milliseconds between two checks whether the ranks have ended


def run_ranks(
    module: str,
    arguments: Sequence[str],
    processes: int,
    on_line: Callable[[str], None] | None = None,
    timeout: float | None = None,
    leave: Callable[[], bool] = lambda: False,
) -> int:
    """Run `python -m module` in `processes` processes on this machine, and return the exit code.

    The module takes `--notes FOLDER`, for `be_a_rank`. The output of the ranks goes to stdout, or line by line to
    `on_line`. When `leave` returns True they get the note that asks them to end (`runtime.processes.watch.LEAVE`).
    Raises RunError, with the first cause, where a rank fails or is killed, or where no rank makes progress for
    `timeout` seconds (None: no limit); RequestError where this machine has too little memory for the processes. No
    started process is left when this returns or raises.
    """
    _check_memory(processes)
    with stopped_by_signals(), tempfile.TemporaryDirectory(prefix="plan-run-") as folder:
        notes = Path(folder)
        command = [sys.executable, "-u", "-m", module, *arguments, "--notes", folder]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as noise:
            watch = _run(command, _environments(processes, notes / "store"), noise, on_line, notes, timeout, leave)
            if watch.verdict is not None:
                raise RunError(watch.verdict)
            if watch.done == processes:
                return 0
            noise.seek(0)
            code, message = failure_of(notes, ended=watch.ended, noise=noise.read())
        if message:
            raise RunError(message, exit_code=code)
        return code


def _check_memory(processes: int) -> None:
    """Raise RequestError where the processes need more memory than is free, even before they do anything."""
    free = available_bytes()
    if free is not None and processes * _OWN > free:
        raise RequestError(
            f"{processes:,} processes need {processes * _OWN / GIB:,.1f} GiB of this machine's memory to start, and"
            f" {free / GIB:.1f} GiB are free; start fewer, or free memory"
        )


def threads_per_rank(processes: int) -> int:
    """Threads of each of `processes` processes on this machine: its cores divided among them, at least one."""
    return max(1, (os.cpu_count() or 1) // processes)


def _run(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    noise: IO[str],
    on_line: Callable[[str], None] | None,
    notes: Path,
    timeout: float | None,
    leave: Callable[[], bool],
) -> Watch:
    """Run the ranks to their end; they also end if this process is told to stop."""
    sys.stdout.flush()
    with held(notes), contextlib.ExitStack() as ends:
        if on_line is None:
            ranks, read = _started(command, environments, noise, None), None
        else:
            read, write = os.pipe()
            ends.callback(os.close, read)
            try:
                ranks = _started(command, environments, noise, write)
            finally:
                os.close(write)
        with Watch(ranks=ranks, notes=notes, timeout=timeout, leave=leave) as watch:
            if read is not None and on_line is not None:
                for line in _lines(read, watch):
                    on_line(line)
            watch.wait()
        return watch


def _lines(read: int, watch: Watch) -> Iterator[str]:
    """The lines that the ranks write into a pipe, until no process holds its other end, or all ranks have ended: a
    process that a rank started in a session of its own, such as a logger's service, may hold it for longer."""
    text = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    poll, begun = select.poll(), ""
    poll.register(read, select.POLLIN)
    while True:
        over = watch.over  # asked first: what the ranks wrote before their end is in the pipe
        if poll.poll(0 if over else _LOOK):
            data = os.read(read, _PIECE)
            *whole, begun = (begun + text.decode(data, final=not data)).split("\n")
            yield from whole
            if data:
                continue
        elif not over:
            continue
        if begun:
            yield begun
        return


def _started(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], noise: IO[str], stdout: int | None
) -> dict[int, "subprocess.Popen[bytes]"]:
    """All ranks, or none where one of them cannot be started."""
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank, environment in enumerate(environments):
            ranks[rank] = subprocess.Popen(
                command, env=environment, stdout=stdout, stderr=noise, start_new_session=True
            )
    except BaseException:
        for process in ranks.values():
            process.kill()
            process.wait()
        raise
    return ranks


def _environments(processes: int, store: Path) -> list[dict[str, str]]:
    """The environments of all ranks. A rank must find this package from any working directory, and the ranks share the
    cores unless the caller's environment says otherwise. Variables of a torchrun around the caller are removed."""
    root = str(Path(__file__).resolve().parents[1])
    known = os.environ.get("PYTHONPATH")
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    shared = {
        "OMP_NUM_THREADS": str(threads_per_rank(processes)),
        **outer,
        "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else root,
    }
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    return [{**shared, **environment_of(rank, processes, str(store), port)} for rank in range(processes)]
