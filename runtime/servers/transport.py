"""Connections over which frames travel: plain on loopback, TLS 1.3 everywhere else.

Both sides have one certificate, FOLDER/certificate.pem, and take no other: who has its key is a worker or a server of
the run. `python -m runtime.servers certificate FOLDER` makes it.
"""

import ipaddress
import ssl
from pathlib import Path
from socket import socket
from typing import Any

from planner.errors import RequestError
from runtime.servers.private_files import read_secret

CERTIFICATE = "certificate.pem"
_PIECE = 2**20


def is_loopback(host: str) -> bool:
    """Whether an address, as numbers, is one of this machine alone."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def server_context(folder: Path, address: tuple[str, int]) -> ssl.SSLContext | None:
    """TLS of a server that listens at an address; None on loopback. Raises RequestError where there is no certificate,
    or the address is that of all interfaces."""
    host, port = address
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        raise RequestError(
            f"{host}:{port} is every interface of this machine; give the address of the one to listen on"
        )
    return None if is_loopback(host) else _context(ssl.PROTOCOL_TLS_SERVER, folder, f"{host}:{port}")


def client_context(folder: Path, address: tuple[str, int]) -> ssl.SSLContext | None:
    """TLS of a worker that has connected to an address; None on loopback."""
    host, port = address
    return None if is_loopback(host) else _context(ssl.PROTOCOL_TLS_CLIENT, folder, f"{host}:{port}")


def _context(protocol: int, folder: Path, where: str) -> ssl.SSLContext:
    path = folder / CERTIFICATE
    try:
        read_secret(path)  # for its owner alone
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is that of the run, on whichever host
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(path)
        context.load_verify_locations(path)
    except FileNotFoundError as error:
        raise RequestError(
            f"{where} is not on loopback, where rows travel over TLS, and {path} is missing: make it by python -m"
            f" runtime.servers certificate {folder}, and copy it where hosts do not share that folder"
        ) from error
    except OSError as error:  # ssl.SSLError is one
        raise RequestError(f"{path} is no certificate with its key: {error.strerror or error}") from error
    return context


def place_of(connection: socket, server: tuple[Any, ...]) -> tuple[str, int]:
    """The address of the server's end of a connection, for proofs; TLS proves it by its certificate."""
    return ("tls", 0) if isinstance(connection, ssl.SSLSocket) else (str(server[0]), int(server[1]))


class Channel:
    """An accepted connection that never waits; its bytes are encrypted where there is a context."""

    def __init__(self, accepted: socket, context: ssl.SSLContext | None) -> None:
        accepted.setblocking(False)
        self.established = context is None
        self.wants_to_write = False
        self.socket = (
            accepted
            if context is None
            else context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        )

    def establish(self) -> bool:
        """Go on with the handshake of TLS; whether it is done. Raises OSError where it failed."""
        if isinstance(self.socket, ssl.SSLSocket) and not self.established:
            try:
                self.socket.do_handshake()
                self.established = True
            except ssl.SSLWantReadError:
                self.wants_to_write = False
                return False
            except ssl.SSLWantWriteError:
                self.wants_to_write = True
                return False
        self.wants_to_write = False
        return self.established

    def receive(self, most: int = _PIECE) -> bytes:
        """What has come in, `most` bytes or a few more. Raises BlockingIOError where nothing has, and OSError where the
        connection is over."""
        if isinstance(self.socket, ssl.SSLSocket):
            return self._decrypted(self.socket, most)
        data = self.socket.recv(most)
        if not data:
            raise ConnectionError
        return data

    def send(self, data: memoryview) -> int:
        """How many bytes went out. Raises BlockingIOError where none fit, OSError where the connection is over."""
        try:
            return self.socket.send(data[:_PIECE])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def close(self) -> None:
        self.socket.close()

    @staticmethod
    def _decrypted(connection: ssl.SSLSocket, most: int) -> bytes:
        """Everything that is decrypted: the selector does not know of it."""
        found = bytearray()
        while len(found) < most or connection.pending():
            try:
                piece = connection.recv(most)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not found:
                    raise BlockingIOError from None
                break
            if not piece:
                if not found:
                    raise ConnectionError
                break
            found += piece
        return bytes(found)
