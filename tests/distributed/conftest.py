"""A pool of four gloo processes for all distributed tests, and pools of two and of eight for those that ask for them,
forked from one process that has imported what they need.

`pool.run("tasks", "function", *arguments)` calls a function of a file in this folder in every process and returns
their results. If one raises, dies or takes too long, all are ended (the others may be waiting for it in a
collective), the test fails with its traceback, and the next test gets a new pool.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.worker import work
from tests.suite_times import worked

ROOT = Path(__file__).resolve().parents[2]
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.distributed.warm"])


class WorkerPool:
    """So many processes, started when they get their first task."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []

    def run(self, module: str, function: str, *arguments: Any, timeout: float = 240.0) -> list[Any]:
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((module, function, arguments))
        results: list[Any] = [None] * self.world
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} did not answer within {timeout} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    kind, results[rank], spent = connection.recv()
                except EOFError:
                    self._fail(f"rank {rank} ended")
                worked(spent)
                if kind == "failed":
                    self._fail(f"rank {rank} raised:\n{results[rank]}")
        return results

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        store = f"{tempfile.mkdtemp(prefix='pool')}/store"
        with pytest.MonkeyPatch.context() as environment:  # of the process that is forked
            environment.setenv("PYTHONPATH", str(ROOT))
            environment.setenv("OMP_NUM_THREADS", "1")
            for rank in range(self.world):
                connection, theirs = FORKING.Pipe()
                process = FORKING.Process(target=work, args=(rank, self.world, store, theirs), name=f"rank {rank}")
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(connection)

    def _fail(self, reason: str) -> None:
        for process in self._processes:
            process.kill()
        self.close()
        pytest.fail(reason, pytrace=False)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool(4)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def pair() -> Iterator[WorkerPool]:
    workers = WorkerPool(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def eight() -> Iterator[WorkerPool]:
    """Ends with the file that asks for it: so many processes take gigabytes."""
    workers = WorkerPool(8)
    yield workers
    workers.close()
