"""Servers in threads of this process, and what a stranger or a worker can say to it byte by byte."""

import contextlib
import socket
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from runtime.servers.addresses import Addresses, make_key, publish
from runtime.servers.connections import Limits
from runtime.servers.frames import Frame, FrameReader, encode
from runtime.servers.handshake import WORKER, Identity, new_nonce, proof
from runtime.servers.serve import LOOPBACK, Server, storage_of
from runtime.servers.transport import place_of


@contextlib.contextmanager
def serving(folder: Path, limits: Limits | None = None, host: str = LOOPBACK, *, count: int = 1) -> Iterator[Addresses]:
    """So many servers, each in a thread that has to be alive at the end."""
    key, ended = make_key(folder), threading.Event()
    servers = [
        Server(storage_of(folder, number, count), key, (host, 0), folder=folder, limits=limits)
        for number in range(count)
    ]
    threads = [threading.Thread(target=server.serve, args=(lambda: not ended.is_set(),)) for server in servers]
    for number, (server, thread) in enumerate(zip(servers, threads, strict=True)):
        publish(folder, number, server.address)
        thread.start()
    try:
        yield Addresses(folder=folder, count=count)
        assert all(thread.is_alive() for thread in threads), "a server has ended"
    finally:
        ended.set()
        for server, thread in zip(servers, threads, strict=True):
            with contextlib.suppress(OSError):
                socket.create_connection(server.address).close()  # it looks up from its select
            thread.join()
            server.close()


class Caller:
    """A connection that says what it likes."""

    def __init__(self, addresses: Addresses) -> None:
        where = addresses.of(0)
        assert where is not None
        self.socket = socket.create_connection(where, timeout=60.0)
        self._reader, self._key = FrameReader(), addresses.key()

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, data: bytes) -> None:
        """The server may have closed the connection already."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def end(self) -> None:
        """Say nothing more."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def heard(self) -> Frame | None:
        """The next frame; None where the server has closed the connection."""
        while (frame := self._reader.next()) is None:
            try:
                data = self.socket.recv(2**16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._reader.feed(data)
        return frame

    def enter(self, key: str | None = None, changed: Mapping[str, object] | None = None) -> Frame | None:
        """Prove to know a key, that of the run unless told otherwise, and change what is said after it was proved; what
        the server says to it."""
        challenge = self.heard()
        assert challenge is not None
        identity = Identity(worker=None, program="test", nonce=new_nonce())
        place = place_of(self.socket.getpeername())
        proved = proof(key or self._key, WORKER, place, challenge.fields["nonce"], identity)
        self.say(encode(Frame(kind="hello", fields={**asdict(identity), "proof": proved, **(changed or {})})))
        return self.heard()


def frame_of(header: bytes, body: bytes = b"") -> bytes:
    """A frame with any header."""
    return struct.pack("<4sIQI", b"PSF1", len(header), len(body), zlib.crc32(header + body)) + header + body
