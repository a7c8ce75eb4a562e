"""The connections of one server, with limits for each: descriptors, memory and time.

    accepted ──challenge──> hello within `handshake` seconds, in a frame of 4 KiB ──> known
    known    ──> one request at a time: nothing more is read while the peer does not take the answer

Unauthenticated connections are `strangers`; if there are too many, the oldest is closed. A partly received frame counts
with its full size; a connection that would exceed `buffered` bytes in total waits for others. No input ends the server:
invalid input ends only its connection.
"""

import errno
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime.servers.disk import BrokenDiskError
from runtime.servers.frames import LARGEST_BODY, Frame, FrameReader, encode
from runtime.servers.handshake import BEFORE_HELLO, new_nonce
from runtime.servers.transport import Channel, Encryption

_SPARE = 64  # descriptors that the process needs for other purposes
_MOST = 4096
_SMALL = 2**20  # bytes of a frame that are not counted
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""After 30 s (15 s without a byte, three probes) a connection ends whose other host is gone; Linux waits 2 hours."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The maximum number of connections, and of unauthenticated `strangers` among them; seconds for authentication, and
    for progress of a frame or an answer that has begun; total bytes of frames and answers in progress."""

    connections: int
    strangers: int = 64
    handshake: float = 10.0
    silence: float = 60.0
    buffered: int = 2 * LARGEST_BODY

    @staticmethod
    def of_process() -> "Limits":
        """As many connections as this process has descriptors for."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = _MOST if descriptors == resource.RLIM_INFINITY else min(_MOST, descriptors - _SPARE)
        return Limits(connections=max(room, 8))


@dataclass(kw_only=True, eq=False)
class Connection:
    """A connection: received bytes, bytes to send, and the peer; `worker` is None for a read-only observer.

    `coming` are the bytes of a large frame that has begun, `unsent` the bytes to send; a `paused` connection waits for
    memory for its frame. A `last` connection is closed once its answer is sent.
    """

    channel: Channel
    since: float
    heard: float
    challenge: str = field(default_factory=new_nonce)
    reader: FrameReader = field(default_factory=lambda: FrameReader(BEFORE_HELLO))
    outgoing: deque[memoryview] = field(default_factory=deque)
    unsent: int = 0
    coming: int = 0
    paused: bool = False
    events: int = 0
    known: bool = False
    worker: int | None = None
    program: str = ""
    waits: Frame | None = None
    last: bool = False
    closed: bool = False

    def send(self, kind: str, fields: dict[str, Any] | None = None, arrays: dict[str, Any] | None = None) -> None:
        data = memoryview(encode(Frame(kind=kind, fields=fields or {}, arrays=arrays or {})))
        self.outgoing.append(data)
        self.unsent += len(data)


class Connections:
    """The connections of a listening socket. `answer` is called with every frame of a connection. An error in it ends
    the connection, except BrokenDiskError, which ends the server."""

    def __init__(
        self,
        listener: socket.socket,
        encryption: Encryption | None,
        answer: Callable[[Connection, Frame], None],
        limits: Limits,
    ) -> None:
        self._listener, self._encryption, self._answer, self._limits = listener, encryption, answer, limits
        self._selector = selectors.DefaultSelector()
        self._everyone: dict[Connection, None] = {}
        self._listening = False
        self._pauses = False
        self._listen()

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._everyone))

    def serve(self, timeout: float) -> None:
        """Process all events; wait at most `timeout` seconds for one."""
        for event, mask in self._selector.select(timeout):
            connection = event.data
            if connection is None:
                self._accept()
            elif not connection.closed:
                self._work(connection, mask)

    def tick(self) -> None:
        """Called once a second: close idle connections, and listen again after descriptors had run out."""
        now = time.monotonic()
        for connection in self:
            under_way = connection.outgoing or connection.coming
            late = connection.heard + self._limits.silence if under_way else now
            if now > (late if connection.known else connection.since + self._limits.handshake):
                self.drop(connection)
        self._listen()
        self._resume()

    def close(self) -> None:
        for connection in self:
            self.drop(connection)
        self._listener.close()
        self._selector.close()

    @property
    def full(self) -> bool:
        """Whether so many bytes are in progress that nothing large should be added."""
        return self._under_way() > self._limits.buffered

    def know(self, connection: Connection) -> None:
        """Mark the connection as authenticated: its frames may be large."""
        connection.known, connection.reader.largest = True, FrameReader().largest

    def drop(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed, connection.waits, connection.paused = True, None, False
        self._watch(connection, 0)
        del self._everyone[connection]
        connection.channel.close()

    def flush(self, connection: Connection) -> None:
        """Send as much as fits."""
        if connection.closed or not connection.channel.established:
            return
        try:
            while connection.outgoing:
                sent = connection.channel.send(connection.outgoing[0])
                connection.heard = time.monotonic()
                connection.unsent -= sent
                if sent == len(connection.outgoing[0]):
                    connection.outgoing.popleft()
                else:
                    connection.outgoing[0] = connection.outgoing[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.drop(connection)
            return
        if connection.last and not connection.outgoing:
            self.drop(connection)
        elif not connection.paused:
            self._watch(connection, selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ)

    def _listen(self) -> None:
        if not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listening = True

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # the connection would stay in the queue and wake us at once
                self._selector.unregister(self._listener)
                self._listening = False
            return
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                if hasattr(socket, name):  # macOS has its own
                    accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            channel = Channel(accepted, self._encryption)
        except OSError:
            accepted.close()
            return
        strangers = [one for one in self._everyone if not one.known]
        if len(strangers) >= self._limits.strangers or len(self._everyone) >= self._limits.connections:
            if not strangers:
                channel.close()
                return
            self.drop(strangers[0])
        now = time.monotonic()
        connection = Connection(channel=channel, since=now, heard=now)
        self._everyone[connection] = None
        connection.send("challenge", {"nonce": connection.challenge})
        self._establish(connection)

    def _establish(self, connection: Connection) -> None:
        """Continue the TLS handshake, if there is one, and then send the challenge."""
        try:
            done = connection.channel.establish()
        except OSError:
            self.drop(connection)
            return
        if done:
            self.flush(connection)
        else:
            wants = connection.channel.wants_to_write
            self._watch(connection, selectors.EVENT_WRITE if wants else selectors.EVENT_READ)

    def _watch(self, connection: Connection, events: int) -> None:
        if events == connection.events:
            return
        if not events:
            self._selector.unregister(connection.channel.socket)
        elif not connection.events:
            self._selector.register(connection.channel.socket, events, connection)
        else:
            self._selector.modify(connection.channel.socket, events, connection)
        connection.events = events

    def _work(self, connection: Connection, mask: int) -> None:
        if not connection.channel.established:
            self._establish(connection)
            return
        if mask & selectors.EVENT_WRITE:
            self.flush(connection)
        elif not self._receive(connection):
            return
        self._answer_all(connection)

    def _receive(self, connection: Connection) -> bool:
        """Whether anything was received."""
        try:
            data = connection.channel.receive(_SMALL if connection.known else BEFORE_HELLO)
        except BlockingIOError:
            return False
        except OSError:
            self.drop(connection)
            return False
        connection.heard = time.monotonic()
        connection.reader.feed(data)
        return True

    def _answer_all(self, connection: Connection) -> None:
        """Answer complete frames one after the other, while the peer takes the answers."""
        try:
            while not (connection.closed or connection.outgoing):
                frame = connection.reader.next()
                if frame is None:
                    self._count(connection)
                    return
                connection.coming = 0
                self._answer(connection, frame)
                self.flush(connection)
        except BrokenDiskError:  # ends the server
            raise
        except Exception:  # not a frame of ours, or not enough memory
            self.drop(connection)
        self._resume()

    def _under_way(self) -> int:
        return sum(one.unsent + one.coming for one in self._everyone)

    def _count(self, connection: Connection) -> None:
        """Count a large frame that has begun; pause its connection while there is too little memory and others use
        some."""
        wanted = connection.reader.wanted
        if wanted <= _SMALL or connection.coming or connection.closed:
            return
        others = any(one.coming for one in self._everyone)
        connection.paused = others and self._under_way() + wanted > self._limits.buffered
        connection.coming = 0 if connection.paused else wanted
        self._pauses = self._pauses or connection.paused
        self._watch(connection, 0 if connection.paused else selectors.EVENT_READ)

    def _resume(self) -> None:
        """Count paused connections again, because others may be done."""
        if self._pauses:
            for connection in self:
                if connection.paused:
                    self._count(connection)
            self._pauses = any(one.paused for one in self._everyone)
