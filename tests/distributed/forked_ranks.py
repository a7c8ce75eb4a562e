"""`plan run` and `launch` in this process, with ranks that are forked from the one that pools are forked from.

A rank that is started anew imports PyTorch for 5 CPU seconds. All else is as it was: each rank is a process that leads
a session of its own, with its own environment, and is watched, ended and read through its notes. That fresh
interpreters do it, too, is in test_launch_random.py, test_sockets.py, test_breakdown.py and test_run_folder.py.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import IO, Any

import pytest

import runtime.processes.ranks
from tests.distributed.conftest import FORKING
from tests.suite_times import worked


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Meanwhile runs of this process fork their ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.processes.ranks, "subprocess", SimpleNamespace(Popen=_started))
        yield


def _started(command: Sequence[str], **settings: Any) -> "_Forked | subprocess.Popen[bytes]":
    """Ranks of runs are forked; those of proofs, another module, are started as ever."""
    if "runtime" in command:
        return _Forked(command, **settings)
    return subprocess.Popen(command, **settings)


class _Forked:
    """As much of `subprocess.Popen` as ranks need."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | None,
        stderr: IO[str],
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        assert command[1:4] == [sys.executable, "-u", "-m", "runtime"][1:], command
        files = [Connection(os.dup(number)) for number in (1 if stdout is None else stdout, stderr.fileno())]
        self._spent, spent = FORKING.Pipe(duplex=False)
        # Connections, as these are handed to the process that is forked.
        arguments = (os.getcwd(), tuple(command[4:]), dict(env), *files, spent)
        self._process = FORKING.Process(target=_rank, args=arguments)
        self._process.start()
        for end in (*files, spent):
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        code = self._process.exitcode
        if code is not None and not self._spent.closed:
            self._count()
        return code

    def wait(self) -> int:
        self._process.join()
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        self._process.kill()

    def _count(self) -> None:
        try:
            worked(self._spent.recv())
        except EOFError:  # it has not come to its end
            pass
        finally:
            self._spent.close()


def _rank(
    folder: str,
    words: tuple[str, ...],
    environment: Mapping[str, str],
    out: Connection,
    err: Connection,
    spent: Connection,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [folder, *environment["PYTHONPATH"].split(os.pathsep)]
    for number, end in enumerate((out, err), start=1):
        os.dup2(end.fileno(), number)
        end.close()
    from runtime.launch.launch import main

    code = main(words)
    spent.send(sum(os.times()[:2]))
    sys.exit(code)
