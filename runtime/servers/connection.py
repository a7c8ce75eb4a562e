"""A worker's connection to one server: sends a frame, waits for the answer, and finds the server again where it was
lost.

A question that was asked may have been answered just when the connection broke, so it is asked again: pulls change
nothing, and a push that was applied is known by its step.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.errors import RequestError, RunError
from runtime.servers.addresses import Addresses
from runtime.servers.frames import Frame, FrameReader, encode

PATIENCE = 60.0
"""Seconds that a worker looks for a server which does not answer, and waits for workers which do not push."""

_SILENCE = 15.0  # seconds after which a server that says nothing is taken for lost; one that waits speaks every second
_PAUSE = 0.05
_RECEIVED = 2**20


def program_name() -> str:
    """This process, as no other is called."""
    return f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"


@dataclass(kw_only=True, eq=False)
class Link:
    """The connection of `worker` (None: one who only looks) to server number `server`."""

    addresses: Addresses
    server: int
    worker: int | None
    program: str
    patience: float = PATIENCE
    sent: int = 0
    received: int = 0
    reconnections: int = 0
    welcome: Frame | None = None
    _socket: socket.socket | None = None
    _reader: FrameReader = field(default_factory=FrameReader)
    _asked: bytes = b""

    def ask(self, frame: Frame) -> None:
        """Send a frame; `answer` gives what comes back."""
        self._asked = encode(frame)
        self.sent += len(self._asked)
        try:
            if self._socket is not None:
                self._socket.sendall(self._asked)
        except OSError:
            self._lose()

    def answer(self) -> Frame:
        """The answer to what was asked. Raises RequestError where the server refuses it, RunError where it, or a worker
        that it waits for, is not heard of for too long."""
        until = time.monotonic() + self.patience
        while True:
            try:
                if self._socket is None:
                    self._find(until)
                return self._heard()
            except OSError:
                self._lose()
            if time.monotonic() > until:
                raise RunError(self._unheard())

    def close(self) -> None:
        self._lose()

    def _lose(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket, self._reader = None, FrameReader()
            self.reconnections += 1

    def _find(self, until: float) -> None:
        """Connect, say hello, and ask again what was asked."""
        while True:
            where = self.addresses.of(self.server)
            try:
                if where is None:
                    raise ConnectionError
                self._socket = socket.create_connection(where, timeout=_SILENCE)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise RunError(self._unheard()) from error
                time.sleep(_PAUSE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fields = {"key": self.addresses.key(), "worker": self.worker, "program": self.program}
        self._socket.sendall(encode(Frame(kind="hello", fields=fields)))
        self.welcome = self._heard()
        if self.welcome.fields["number"] != self.server or self.welcome.fields["count"] != self.addresses.count:
            raise RequestError(
                f"at {where[0]}:{where[1]} is server {self.welcome.fields['number']} of {self.welcome.fields['count']},"
                f" not {self.server} of {self.addresses.count}"
            )
        self._socket.sendall(self._asked)

    def _heard(self) -> Frame:
        """The next frame that is an answer. Raises OSError where the connection is lost."""
        assert self._socket is not None
        since = time.monotonic()
        while True:
            data = self._socket.recv(_RECEIVED)
            if not data:
                raise ConnectionError
            self.received += len(data)
            for frame in self._read(data):
                if frame.kind == "refused":
                    raise RequestError(str(frame.fields["message"]))
                if frame.kind != "waiting":
                    return frame
                if time.monotonic() - since > self.patience:
                    others = ", ".join(map(str, frame.fields["workers"]))
                    raise RunError(
                        f"worker {self.worker} has waited {self.patience:g} s at server {self.server} for a push of"
                        " worker"
                        f" {others}"
                    )

    def _read(self, data: bytes) -> list[Frame]:
        try:
            return list(self._reader.feed(data))
        except ValueError as error:
            raise ConnectionError(str(error)) from error

    def _unheard(self) -> str:
        where = self.addresses.of(self.server)
        place = (
            f"at {where[0]}:{where[1]}"
            if where is not None
            else f"which has left no address in {self.addresses.folder}"
        )
        return (
            f"server {self.server} of {self.addresses.count}, {place}, has not answered for {self.patience:g} s;"
            " start it again"
            " with the same folder, its rows are there"
        )


def ask_all(
    links: dict[int, Link], frames: dict[int, Frame], looked: Callable[[], None] = lambda: None
) -> dict[int, Frame]:
    """Ask several servers at once, and the answer of each. Raises what `Link.answer` does, when all have answered that
    do: what one refuses is not taken for the answer to the next question."""
    for server, frame in frames.items():
        links[server].ask(frame)
    looked()
    found, refusals = {}, []
    for server in frames:
        try:
            found[server] = links[server].answer()
        except RequestError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    return found
