"""Connections for frames: plain on loopback, TLS 1.3 everywhere else.

Both sides have the same certificate, FOLDER/certificate.pem, and accept no other, whoever signed it: a peer with its
key is a worker or a server of the run. `python -m runtime.servers certificate FOLDER` makes it.
"""

import hashlib
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any

from planner.errors import RequestError
from runtime.servers.private_files import read_secret

CERTIFICATE = "certificate.pem"
_PIECE = 2**20


def is_loopback(host: str) -> bool:
    """Whether a numeric address is a loopback one."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Encryption:
    """TLS with one `certificate` for both ends."""

    context: ssl.SSLContext
    certificate: bytes

    def check(self, connection: ssl.SSLSocket) -> None:
        """Raise SSLCertVerificationError where the other end has another certificate."""
        if connection.getpeercert(binary_form=True) != self.certificate:
            error = ssl.SSLCertVerificationError("another certificate")
            error.verify_message = "it has another certificate, which may be of the same authority"
            raise error


def server_encryption(folder: Path, address: tuple[str, int]) -> Encryption | None:
    """TLS for a server that listens at an address; None on loopback. Raises RequestError where there is no certificate,
    or the address is that of all interfaces."""
    host, port = address
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        raise RequestError(
            f"{host}:{port} is every interface of this machine; give the address of the one to listen on"
        )
    return None if is_loopback(host) else _encryption(ssl.PROTOCOL_TLS_SERVER, folder, f"{host}:{port}")


def client_encryption(folder: Path, address: tuple[str, int]) -> Encryption | None:
    """TLS for a worker that has connected to an address; None on loopback."""
    host, port = address
    return None if is_loopback(host) else _encryption(ssl.PROTOCOL_TLS_CLIENT, folder, f"{host}:{port}")


def _encryption(protocol: int, folder: Path, where: str) -> Encryption:
    path = folder / CERTIFICATE
    try:
        certificate = _first_certificate(read_secret(path))  # a file that only its owner can read
        return Encryption(context=_context(protocol, path, certificate), certificate=certificate)
    except FileNotFoundError as error:
        raise RequestError(
            f"{where} is not on loopback, so rows are sent over TLS, but {path} is missing: make it with python -m"
            f" runtime.servers certificate {folder}, and copy it to hosts that do not share that folder"
        ) from error
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RequestError(f"{path} is not a certificate with its key: {said}") from error


def _context(protocol: int, path: Path, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate belongs to the run, on any host
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted, not its issuer
    context.load_cert_chain(path)
    context.load_verify_locations(cadata=certificate)
    return context


def _first_certificate(text: str) -> bytes:
    """The first certificate of a PEM file, which this end presents; those of its issuer may follow. Raises
    ValueError."""
    start, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if not 0 <= start < end:
        raise ValueError(f"there is no '{ssl.PEM_HEADER}'")
    return ssl.PEM_cert_to_DER_cert(text[start : end + len(ssl.PEM_FOOTER)])


def place_of(server: tuple[Any, ...], certificate: bytes | None = None) -> tuple[str, int]:
    """The server's end of a connection, for proofs: its address, or over TLS the `certificate` that it presented."""
    if certificate is not None:
        return f"tls {hashlib.sha256(certificate).hexdigest()}", 0
    return str(server[0]), int(server[1])


class Channel:
    """An accepted non-blocking connection; its bytes are encrypted if there is an encryption."""

    def __init__(self, accepted: socket, encryption: Encryption | None) -> None:
        accepted.setblocking(False)
        self.established = encryption is None
        self.wants_to_write = False
        self._encryption = encryption
        self.socket = (
            accepted
            if encryption is None
            else encryption.context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        )

    @property
    def place(self) -> tuple[str, int]:
        """The server's end, which both sides include in their proofs."""
        return place_of(self.socket.getsockname(), None if self._encryption is None else self._encryption.certificate)

    def establish(self) -> bool:
        """Continue the TLS handshake; returns whether it is done. Raises OSError where it failed."""
        if isinstance(self.socket, ssl.SSLSocket) and self._encryption is not None and not self.established:
            try:
                self.socket.do_handshake()
                self._encryption.check(self.socket)
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
        """Received bytes, at most `most` or a few more. Raises BlockingIOError where there are none, and OSError where
        the connection is over."""
        if isinstance(self.socket, ssl.SSLSocket):
            return self._decrypted(self.socket, most)
        data = self.socket.recv(most)
        if not data:
            raise ConnectionError
        return data

    def send(self, data: memoryview) -> int:
        """The number of bytes sent. Raises BlockingIOError where none fit, OSError where the connection is over."""
        try:
            return self.socket.send(data[:_PIECE])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def close(self) -> None:
        self.socket.close()

    @staticmethod
    def _decrypted(connection: ssl.SSLSocket, most: int) -> bytes:
        """All decrypted bytes, because the selector does not see them."""
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
