"""Starts the servers of a run on this machine, and restarts those that die.

Fleet ──┬─ python -m runtime.servers FOLDER --number 0       restarted if killed: it finds its files
        └─ ...                          a server ends when its stdin closes, so none outlives its parent

When a server is restarted, it removes the address that its predecessor left only after it has locked its files, because
another fleet of the same folder may be running.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from planner.errors import RunError
from runtime.servers.addresses import Addresses, address_file, make_key
from runtime.servers.private_files import FILE

_ROOT = Path(__file__).resolve().parents[2]
_LOOK = 0.05  # seconds between two checks of the servers
_LONGEST = 5.0  # seconds that a server has to end
_IN_A_ROW = 5
"""Number of failed starts, before it listens, after which a server is given up."""


class Fleet:
    """`count` servers with their files in `folder`. Use it as a context; workers need `addresses`."""

    def __init__(self, folder: Path, count: int, *, flushed: bool = False, repaired: bool = False) -> None:
        self.addresses = Addresses(folder=folder, count=count)
        self._flags = [*["--flush"] * flushed, *["--repair"] * repaired]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failed, self._read = [0] * count, [0] * count
        self._before: list[tuple[int, int] | None] = [None] * count
        self._fault: RunError | None = None
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self.restarts = 0

    def __enter__(self) -> Self:
        make_key(self.addresses.folder)
        try:
            for number in range(self.addresses.count):
                self._processes.append(self._start(number))
        except BaseException:
            self._end()
            raise
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._watch.join()
        self._end()

    def check(self) -> None:
        """Raises RunError where a server cannot be started any more, with what it said."""
        if self._fault is not None:
            raise self._fault

    def pid(self, number: int) -> int:
        """The current process of a server."""
        return self._processes[number].pid

    def _left(self, number: int) -> tuple[int, int] | None:
        """Identifies an address file of a server, to tell it from the next one; None where there is none."""
        try:
            found = address_file(self.addresses.folder, number).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _said(self, number: int) -> Path:
        """The file with a server's output, over all its starts."""
        return self.addresses.folder / f"server-{number}.err"

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        folder = str(self.addresses.folder)
        command = [sys.executable, "-m", "runtime.servers", folder, "--servers", str(self.addresses.count)]
        known = os.environ.get("PYTHONPATH")
        path = f"{_ROOT}{os.pathsep}{known}" if known else str(_ROOT)
        said = self._said(number)
        self._before[number] = self._left(number)
        self._read[number] = said.stat().st_size if said.exists() else 0
        with open(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE), "ab") as log:
            return subprocess.Popen(
                [*command, "--number", str(number), "--with-parent", *self._flags],
                stdin=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
            )

    def _look(self) -> None:
        while not self._ending.wait(_LOOK) and self._fault is None:
            for number, process in enumerate(self._processes):
                code = process.poll()
                if code is not None:
                    self._restart(number, code)

    def _restart(self, number: int, code: int) -> None:
        """Start a server that has ended again; a folder that is gone or cannot be written is a fault, too."""
        try:
            self._again(number, code)
        except OSError as error:
            where = error.filename or self.addresses.folder
            self._fault = RunError(f"server {number} cannot be started: {where}: {error.strerror}", exit_code=2)

    def _again(self, number: int, code: int) -> None:
        process = self._processes[number]
        if process.stdin is not None:
            process.stdin.close()
        listened = self._left(number) not in (None, self._before[number])
        by_itself = code >= 0 and not listened  # a server that was killed can be restarted
        self._failed[number] = self._failed[number] + 1 if by_itself else 0
        said = self._said(number).read_bytes()[self._read[number] :].decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else f"it ended with {code}"
        if code == 2 or self._failed[number] >= _IN_A_ROW:
            self._fault = RunError(f"server {number} cannot be started: {last.removeprefix('error: ')}", exit_code=2)
            return
        self._processes[number] = self._start(number)
        self.restarts += 1

    def _end(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(_LONGEST)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
