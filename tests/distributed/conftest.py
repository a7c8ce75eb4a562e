"""A pool of four gloo processes, started once for all distributed tests, and pools of two and of eight for those that
ask for them.

`pool.run("tasks", "function", *arguments)` calls a function of a file in this folder in every process and returns
their results. If one raises, dies or takes too long, all are ended (the others may be waiting for it in a
collective), the test fails with its traceback, and the next test gets a new pool.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

from tests.suite_times import worked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class WorkerPool:
    """So many processes, started when they get their first task."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[subprocess.Popen[bytes]] = []
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
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="pool")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        address = f"{folder}/socket"
        with Listener(address, family="AF_UNIX", backlog=self.world) as listener:
            listener._listener._socket.settimeout(120)  # type: ignore[attr-defined]
            for rank in range(self.world):
                command = [
                    sys.executable,
                    str(HERE / "worker.py"),
                    str(rank),
                    str(self.world),
                    f"{folder}/store",
                    address,
                ]
                self._processes.append(subprocess.Popen(command, env=environment, cwd=ROOT))
            by_rank = {}
            for _ in range(self.world):
                connection = listener.accept()
                by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in range(self.world)]

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
