"""One server: answers workers on a socket, one frame after the other, in one thread.

    hello ──> who it is             record ──> check, log, apply, acknowledge
    pull  ──> rows, at once or when the other workers are far enough; meanwhile it is told every second whom it waits
    for

A frame that the shard refuses is answered with what is wrong, and changes nothing. What is no frame ends the
connection.
"""

import hmac
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, RequestError
from runtime.servers.frames import Frame, FrameReader, encode
from runtime.servers.shard import RECORDS, WEIGHT, Shard
from runtime.servers.storage import Storage

LOOPBACK = "127.0.0.1"
_RECEIVED = 2**20
_PATIENCE = 1.0  # seconds between two words to one who waits


@dataclass(kw_only=True, eq=False)
class _Connection:
    """A connection: what came in, what has to go out, and who is there; `worker` is None for one who only looks."""

    socket: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outgoing: list[memoryview] = field(default_factory=list)
    known: bool = False
    worker: int | None = None
    program: str = ""
    waits: Frame | None = None
    closed: bool = False

    def send(self, kind: str, fields: dict[str, Any] | None = None, arrays: dict[str, Any] | None = None) -> None:
        self.outgoing.append(memoryview(encode(Frame(kind=kind, fields=fields or {}, arrays=arrays or {}))))


class Server:
    """Listens for workers of the run that knows `key`. `address` is where; `serve` answers until `alive` says no."""

    def __init__(self, storage: Storage, key: str, address: tuple[str, int] = (LOOPBACK, 0)) -> None:
        self._storage, self._key = storage, key
        self.shard: Shard = storage.open()
        self._selector = selectors.DefaultSelector()
        self._told = time.monotonic()
        try:
            self._listener = socket.create_server(address, backlog=128)
        except OSError as error:
            raise RequestError(f"cannot listen on {address[0]}:{address[1]}: {error.strerror}") from error
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        host, port, *_ = self._listener.getsockname()
        self.address: tuple[str, int] = (host, port)

    def serve(self, alive: Callable[[], bool] = lambda: True) -> None:
        while alive():
            for event, mask in self._selector.select(_PATIENCE):
                connection = event.data
                if connection is None:
                    self._accept()
                elif connection.closed:
                    continue
                elif mask & selectors.EVENT_READ:
                    self._receive(connection)
                elif mask & selectors.EVENT_WRITE:
                    self._flush(connection)
            if time.monotonic() - self._told > _PATIENCE:
                self._tell()

    def close(self) -> None:
        for connection in self._connections():
            connection.socket.close()
        self._listener.close()
        self._selector.close()
        self._storage.close()

    def _connections(self) -> list[_Connection]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._selector.register(accepted, selectors.EVENT_READ, _Connection(socket=accepted))

    def _drop(self, connection: _Connection) -> None:
        if not connection.closed:
            connection.closed = True
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_RECEIVED)
            if not data:
                raise ConnectionError
            for frame in connection.reader.feed(data):
                self._answer(connection, frame)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError):  # gone, or no frame of ours
            self._drop(connection)
            return
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        if connection.closed:
            return
        try:
            while connection.outgoing:
                sent = connection.socket.send(connection.outgoing[0])
                if sent == len(connection.outgoing[0]):
                    connection.outgoing.pop(0)
                else:
                    connection.outgoing[0] = connection.outgoing[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
        self._selector.modify(connection.socket, events, connection)

    def _answer(self, connection: _Connection, frame: Frame) -> None:
        try:
            if frame.kind == "hello":
                self._hello(connection, frame)
            elif not connection.known:
                raise RequestError("say hello first")
            elif frame.kind in RECORDS:
                self._record(connection, frame)
            elif frame.kind in ("pull", "read"):
                connection.waits = frame
                self._give(connection)
            else:
                self._look(connection, frame)
        except PlannerError as error:
            connection.waits = None
            connection.send("refused", {"message": str(error)})

    def _hello(self, connection: _Connection, frame: Frame) -> None:
        if not hmac.compare_digest(str(frame.fields["key"]), self._key):
            raise RequestError("this server belongs to another run: the key is not its own")
        worker, program = frame.fields["worker"], str(frame.fields["program"])
        for other in self._connections():
            if worker is not None and other is not connection and other.worker == worker:
                if other.program != program:
                    raise RequestError(
                        f"worker {worker} is connected already, as {other.program}, and {program} says that it is"
                        " worker"
                        f" {worker}, too: give every worker its own rank"
                    )
                other.worker = None  # the same program has lost that connection
        connection.known, connection.worker, connection.program = True, worker, program
        shard = self.shard
        clock = shard.clocks[worker] if worker is not None and worker < len(shard.clocks) else 0
        connection.send(
            "welcome", {"number": shard.number, "count": shard.count, "clock": clock, "version": shard.version}
        )

    def _record(self, connection: _Connection, frame: Frame) -> None:
        if self.shard.check(frame):
            self._storage.append(frame)
            self.shard.apply(frame)
            if self._storage.wants_snapshot:
                self._storage.snapshot(self.shard)
        connection.send("done", {"version": self.shard.version})
        for other in self._connections():
            if other.waits is not None and other is not connection:
                self._answer(other, other.waits)
                self._flush(other)

    def _give(self, connection: _Connection) -> None:
        """Answer a question for rows, if the time has come for it."""
        frame = connection.waits
        assert frame is not None
        if not self.shard.may_pull(int(frame.fields["step"]), frame.fields["tables"]):
            return
        names, connection.waits = frame.fields["tables"], None
        part = frame.fields.get("part", WEIGHT)
        arrays = {
            f"values{number}": self.shard.rows(name, frame.arrays[f"rows{number}"], part)
            for number, name in enumerate(names)
        }
        connection.send("rows", {"version": self.shard.version}, arrays)

    def _look(self, connection: _Connection, frame: Frame) -> None:
        """Questions that wait for nobody."""
        shard = self.shard
        if frame.kind == "snapshot":
            self._storage.snapshot(shard)
            connection.send("done", {"version": shard.version})
        elif frame.kind == "status":
            waiting = sorted(c.worker for c in self._connections() if c.waits is not None and c.worker is not None)
            ready = {name: held.ready for name, held in shard.tables.items()}
            fields = {
                "clocks": shard.clocks,
                "version": shard.version,
                "waiting": waiting,
                "ready": ready,
                "pid": os.getpid(),
            }
            connection.send("status", fields)
        else:
            raise RequestError(f"unknown question '{frame.kind}'")

    def _tell(self) -> None:
        """Say to all who wait for whom they wait."""
        self._told = time.monotonic()
        for connection in self._connections():
            if connection.waits is not None:
                fields = connection.waits.fields
                workers = self.shard.waiting_for(int(fields["step"]), fields["tables"])
                connection.send("waiting", {"workers": workers})
                self._flush(connection)


def storage_of(folder: Path, number: int, count: int, *, flushed: bool = False) -> Storage:
    """The files of a server in the folder of all."""
    return Storage(folder / f"server-{number}", number, count, flushed=flushed)
