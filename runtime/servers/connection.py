"""A worker's connection to one server: it sends a frame, waits for the answer, and reconnects where it was lost.

A request may have been processed just when the connection broke, so it is sent again: pulls change nothing, and a push
that was already applied is recognized by its step.
"""

import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from planner.errors import RequestError, RunError
from runtime.servers.addresses import Addresses
from runtime.servers.frames import Frame, FrameReader, encode
from runtime.servers.handshake import BEFORE_HELLO, REFUSAL, SERVER, WORKER, Identity, is_proof, new_nonce, proof
from runtime.servers.transport import CERTIFICATE, Encryption, client_encryption, place_of

PATIENCE = 60.0
"""Seconds for which a worker looks for a server that does not respond, and waits for workers that do not push."""

_SILENCE = 15.0  # seconds after which a silent server counts as lost; a server that waits sends a message every second
_PAUSE = 0.05
_LATER = 0.2  # seconds after which a server is asked again to write what it could not write
_RECEIVED = 2**20


def program_name() -> str:
    """A unique name of this process."""
    return f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"


@dataclass(kw_only=True, eq=False)
class Link:
    """The connection of `worker` (None: a read-only observer) to server number `server`."""

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
    _reason: str = ""

    def ask(self, frame: Frame) -> None:
        """Send a frame; `answer` returns the answer."""
        self._asked = encode(frame)
        if self._socket is None:
            return  # `answer` connects, and sends it then
        self.sent += len(self._asked)
        try:
            self._socket.sendall(self._asked)
        except OSError:
            self._lose()

    def answer(self) -> Frame:
        """The answer to the request. Raises RequestError where the server refuses it; RunError where the server, or a
        worker for which it waits, does not respond for too long, or where the server cannot write the request."""
        until = time.monotonic() + self.patience
        while True:
            try:
                if self._socket is None:
                    self._find(until)
                frame = self._heard()
                if frame.kind != "unwritten":
                    return frame
                self._unwritten(frame, until)
            except OSError as error:
                self._lose(str(error))
                if time.monotonic() > until:
                    raise RunError(self._unheard()) from error
                time.sleep(_PAUSE)

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        self._lose()

    def _unwritten(self, frame: Frame, until: float) -> None:
        """Send a request again that the server could not write: its state is unchanged, and disk space may be freed."""
        message = f"server {self.server} cannot keep what worker {self.worker} sent: {frame.fields.get('message')}"
        if time.monotonic() > until:
            raise RunError(f"{message}; nothing that was acknowledged is lost: free disk space, and resume")
        time.sleep(_LATER)
        assert self._socket is not None
        self._socket.sendall(self._asked)
        self.sent += len(self._asked)

    def _lose(self, reason: str = "") -> None:
        self._reason = reason or self._reason
        if self._socket is not None:
            self._socket.close()
            self._socket, self._reader = None, FrameReader()
            self.reconnections += 1

    def _find(self, until: float) -> None:
        """Connect, authenticate both sides, and send the request again."""
        while True:
            where = self.addresses.of(self.server)
            try:
                if where is None:
                    raise ConnectionError
                connection = socket.create_connection(where, timeout=_SILENCE)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise RunError(self._unheard()) from error
                time.sleep(_PAUSE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        try:
            self._enter(connection, where)
        except RequestError:
            self._lose()
            raise
        self._reason = ""
        self._socket.sendall(self._asked)
        self.sent += len(self._asked)

    def _enter(self, connection: socket.socket, where: tuple[str, int]) -> None:
        """Set up a new connection, before the first request."""
        peer = connection.getpeername()
        encryption, shown = client_encryption(self.addresses.folder, peer[:2]), None
        if encryption is not None:
            self._socket = self._encrypted(connection, encryption, where)
            shown = self._socket.getpeercert(binary_form=True)
        self._greet(place_of(peer, shown))
        assert self.welcome is not None
        number, count = self.welcome.fields["number"], self.welcome.fields["count"]
        if number != self.server or count != self.addresses.count:
            raise RequestError(
                f"at {where[0]}:{where[1]} is server {number} of {count}, not {self.server} of {self.addresses.count}"
            )

    def _encrypted(self, connection: socket.socket, encryption: Encryption, where: tuple[str, int]) -> ssl.SSLSocket:
        try:
            encrypted = encryption.context.wrap_socket(connection)
            self._socket = encrypted
            encryption.check(encrypted)
            return encrypted
        except ssl.SSLCertVerificationError as error:
            raise RequestError(
                f"the process at {where[0]}:{where[1]} does not have the certificate of {self.addresses.folder}:"
                f" {error.verify_message}; copy {CERTIFICATE} of the servers' folder there"
            ) from error

    def _greet(self, place: tuple[str, int]) -> None:
        """Prove that we know the key, and check that the server does. Raises OSError where it does not, whatever it
        says: another process may listen at the server's address. Raises RequestError where the server refuses us."""
        assert self._socket is not None
        self._reader.largest = BEFORE_HELLO
        challenge, key = self._next(), self.addresses.key()
        identity = Identity(worker=self.worker, program=self.program, nonce=new_nonce())
        said = (place, str(challenge.fields.get("nonce")), identity)
        fields = {**asdict(identity), "proof": proof(key, WORKER, *said)}
        hello = encode(Frame(kind="hello", fields=fields))
        self._socket.sendall(hello)
        self.sent += len(hello)
        self.welcome = self._next()
        if self.welcome.kind == "refused":
            message = str(self.welcome.fields.get("message"))
            if is_proof(self.welcome.fields.get("proof"), proof(key, REFUSAL, *said)):
                raise RequestError(message)
            raise ConnectionError(
                f"the process there did not prove that it has the key of the run, and said {message!r}"
            )
        if not is_proof(self.welcome.fields.get("proof"), proof(key, SERVER, *said)):
            raise ConnectionError("the process there does not have the key of the run")
        self._reader.largest = FrameReader().largest

    def _heard(self) -> Frame:
        """The next frame that is an answer. Raises OSError where the connection is lost."""
        since = time.monotonic()
        while True:
            frame = self._next()
            if frame.kind == "refused":
                raise RequestError(str(frame.fields.get("message")))
            if frame.kind == "stopped":
                raise ConnectionError(f"it has stopped: {frame.fields.get('message')}")
            if frame.kind != "waiting":
                return frame
            if time.monotonic() - since > self.patience:
                others = str(frame.fields.get("workers")).strip("[]")
                raise RunError(
                    f"worker {self.worker} has waited {self.patience:g} s at server {self.server} for a push of worker"
                    f" {others}"
                )

    def _next(self) -> Frame:
        """The next frame, whatever it is. Raises OSError where the connection is lost."""
        assert self._socket is not None
        try:
            while (frame := self._reader.next()) is None:
                data = self._socket.recv(_RECEIVED)
                if not data:
                    raise ConnectionError
                self.received += len(data)
                self._reader.feed(data)
        except ValueError as error:
            raise ConnectionError(str(error)) from error
        return frame

    def _unheard(self) -> str:
        where = self.addresses.of(self.server)
        place = (
            f"at {where[0]}:{where[1]}"
            if where is not None
            else f"which has left no address in {self.addresses.folder}"
        )
        return (
            f"server {self.server} of {self.addresses.count}, {place}, has not answered for {self.patience:g} s"
            + (f" ({self._reason})" if self._reason else "")
            + "; restart it with the same folder, which holds its rows"
        )


def ask_all(
    links: dict[int, Link], frames: dict[int, Frame], looked: Callable[[], None] = lambda: None
) -> dict[int, Frame]:
    """Ask several servers at once; returns the answer of each. Raises what `Link.answer` raises, after all servers that
    respond have answered, so that no late answer is taken for the answer to the next request. Connections on which an
    answer may still come are closed."""
    found: dict[int, Frame] = {}
    refusals: dict[int, RequestError] = {}
    try:
        for server, frame in frames.items():
            links[server].ask(frame)
        looked()
        for server in frames:
            try:
                found[server] = links[server].answer()
            except RequestError as error:
                refusals[server] = error
    finally:
        for server in frames.keys() - found.keys() - refusals.keys():
            links[server].close()
    if refusals:
        raise next(iter(refusals.values()))
    return found
