"""One server: answers workers on a socket, one frame after the other, in one thread.

    hello ──> authenticate          record ──> check, log, apply, acknowledge
    pull  ──> rows, at once or when the other workers are far enough; meanwhile the worker is told every second for whom
    it waits

A frame that the shard refuses is answered with the error, and changes nothing. Anything that is not a frame ends the
connection (`connections.py`). A record that cannot be written is not acknowledged: its worker is told, and sends it
again. A record that cannot be applied, because of a bug or lack of memory, is removed from the log, and the state is
read again. Any other error ends the connection that it came from. If the content of the files is unknown, the server
tells all workers and stops.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from planner.errors import RequestError
from runtime.servers.connections import Connection, Connections, Limits
from runtime.servers.disk import BrokenDiskError, RefusedWriteError
from runtime.servers.faults import described
from runtime.servers.frames import Frame
from runtime.servers.handshake import REFUSAL, SERVER, WORKER, Identity, is_proof, proof
from runtime.servers.messages import check_message
from runtime.servers.shard import RECORDS, WEIGHT, Shard
from runtime.servers.storage import Say, Storage, quiet
from runtime.servers.transport import server_encryption

LOOPBACK = "127.0.0.1"
_PATIENCE = 1.0  # seconds between two messages to a waiting worker


class Server:
    """Listens for workers of the run with this `key`; its certificate is in `folder`, where one is needed. `address` is
    where it listens; `serve` answers until `alive` returns False. `say` receives messages for the owner.

    Raises RequestError where it cannot listen, or files are damaged.
    """

    def __init__(
        self,
        storage: Storage,
        key: str,
        address: tuple[str, int] = (LOOPBACK, 0),
        *,
        folder: Path,
        limits: Limits | None = None,
        say: Say = quiet,
    ) -> None:
        self._storage, self._key, self._say = storage, key, say
        self._told, self._said = time.monotonic(), ""
        listener = _listen(address)
        try:
            host, port, *_ = listener.getsockname()
            self.address: tuple[str, int] = (host, port)
            encryption = server_encryption(folder, self.address)
            self.shard: Shard = storage.open()
        except BaseException:
            listener.close()
            raise
        self._connections = Connections(listener, encryption, self._answer, limits or Limits.of_process())

    def serve(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Raises BrokenDiskError where records can no longer be kept; existing records stay valid."""
        try:
            while alive():
                self._connections.serve(_PATIENCE)
                if time.monotonic() - self._told > _PATIENCE:
                    self._tell()
        except BrokenDiskError as error:
            for connection in self._connections:
                if connection.known:
                    connection.send("stopped", {"message": str(error)})
                    self._connections.flush(connection)
            raise

    def close(self) -> None:
        self._connections.close()
        self._storage.close()

    def _answer(self, connection: Connection, frame: Frame, *, again: bool = False) -> None:
        """Answer a frame; with `again`, tell a waiting worker for whom it waits. Raises ValueError for an
        unauthenticated peer that sends anything but a hello, and BrokenDiskError; any other error belongs to the
        connection."""
        try:
            if not connection.known:
                self._hello(connection, frame)
                return
            check_message(frame)
            if frame.kind in RECORDS:
                self._record(connection, frame)
            elif frame.kind in ("pull", "read"):
                connection.waits = frame
                self._give(connection)
                if again and connection.waits is not None:
                    workers = self.shard.waiting_for(frame.fields["step"], frame.fields["tables"])
                    connection.send("waiting", {"workers": workers})
            else:
                self._look(connection, frame)
        except RequestError as error:
            connection.waits = None
            connection.send("refused", {"message": str(error)})
        except RefusedWriteError as error:
            self._say_once(str(error))
            connection.send("unwritten", {"message": str(error)})
        except Exception as error:
            if isinstance(error, BrokenDiskError) or not connection.known:
                raise
            said = f"server {self.shard.number} cannot answer a '{frame.kind}': {described(error)}"
            self._say_once(said)
            connection.waits, connection.last = None, True
            connection.send("refused", {"message": said})

    def _hello(self, connection: Connection, frame: Frame) -> None:
        identity = Identity.of(frame)
        worker, program = identity.worker, identity.program
        said = (connection.channel.place, connection.challenge, identity)
        connection.last = True
        if not is_proof(frame.fields.get("proof"), proof(self._key, WORKER, *said)):
            raise RequestError(
                "this server belongs to another run: the key is not its own, or its address is not the one that the"
                " worker has connected to"
            )
        for other in self._connections:
            if worker is not None and other is not connection and other.worker == worker:
                if other.program != program:
                    message = (
                        f"worker {worker} is connected already, as {other.program}, and {program} says that it is"
                        f" worker {worker}, too: give every worker its own rank"
                    )
                    connection.send("refused", {"message": message, "proof": proof(self._key, REFUSAL, *said)})
                    return
                other.worker = None  # the same process has lost that connection
        connection.last, connection.worker, connection.program = False, worker, program
        self._connections.know(connection)
        shard = self.shard
        clock = shard.clocks[worker] if worker is not None and worker < len(shard.clocks) else 0
        connection.send(
            "welcome",
            {
                "number": shard.number, "count": shard.count, "clock": clock, "version": shard.version,
                "proof": proof(self._key, SERVER, *said),
            },
        )  # fmt: skip

    def _record(self, connection: Connection, frame: Frame) -> None:
        if self.shard.check(frame):
            self.shard.check_room(frame)
            self._storage.append(frame)
            self._apply(frame)
            if self._storage.wants_snapshot:
                with contextlib.suppress(RefusedWriteError):  # reported, and the log continues
                    self._storage.snapshot(self.shard)
        connection.send("done", {"version": self.shard.version})
        for other in self._connections:
            if other.waits is not None and other is not connection:
                self._answer(other, other.waits)
                self._connections.flush(other)

    def _apply(self, frame: Frame) -> None:
        """Apply the record in the log. If that fails it may be half applied: the record is removed from the log, and
        the state is read from the files. Raises RequestError then."""
        try:
            self.shard.apply(frame)
            return
        except Exception as error:
            fault = described(error)
        self.shard.tables.clear()  # they are read again, and memory may not suffice for both
        self.shard = self._storage.take_back()
        said = f"server {self.shard.number} cannot apply this '{frame.kind}': {fault}; nothing has changed"
        self._say_once(said)
        raise RequestError(said)

    def _give(self, connection: Connection) -> None:
        """Answer a pull, if its rows may be given out."""
        frame = connection.waits
        assert frame is not None
        if not self.shard.may_pull(frame.fields["step"], frame.fields["tables"]) or self._connections.full:
            return
        names, connection.waits = frame.fields["tables"], None
        part = frame.fields.get("part", WEIGHT)
        self.shard.check_pull(names, frame.arrays, part)
        arrays = {
            f"values{number}": self.shard.rows(name, frame.arrays[f"rows{number}"], part)
            for number, name in enumerate(names)
        }
        connection.send("rows", {"version": self.shard.version}, arrays)

    def _look(self, connection: Connection, frame: Frame) -> None:
        """Answer requests that never wait."""
        shard = self.shard
        if frame.kind == "snapshot":
            self._storage.snapshot(shard)
            connection.send("done", {"version": shard.version})
        else:
            waiting = sorted(c.worker for c in self._connections if c.waits is not None and c.worker is not None)
            ready = {name: held.ready for name, held in shard.tables.items()}
            fields = {
                "clocks": shard.clocks,
                "version": shard.version,
                "waiting": waiting,
                "ready": ready,
                "pid": os.getpid(),
            }
            connection.send("status", fields)

    def _say_once(self, message: str) -> None:
        """Report a repeated message only once."""
        if message != self._said:
            self._said = message
            self._say(message)

    def _tell(self) -> None:
        """Tell all waiting workers for whom they wait, and close idle connections."""
        self._told = time.monotonic()
        self._connections.tick()
        for connection in self._connections:
            frame = connection.waits
            if frame is None or connection.outgoing:
                continue
            self._answer(connection, frame, again=True)  # it may have waited for memory
            self._connections.flush(connection)


def _listen(address: tuple[str, int]) -> socket.socket:
    try:
        listener = socket.create_server(address, backlog=128)
    except OSError as error:
        raise RequestError(f"cannot listen on {address[0]}:{address[1]}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def storage_of(
    folder: Path, number: int, count: int, *, flushed: bool = False, repaired: bool = False, say: Say = quiet
) -> Storage:
    """The files of one server, in the folder of all servers."""
    return Storage(folder / f"server-{number}", number, count, flushed=flushed, repaired=repaired, say=say)
