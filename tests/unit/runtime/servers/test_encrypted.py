"""Rows travel over TLS where an address is not loopback: here 127.0.0.2 is none, so nothing leaves the machine."""

import contextlib
import datetime
import socket
import ssl
import threading
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from planner.errors import RequestError
from runtime.servers import transport
from runtime.servers.__main__ import main
from runtime.servers.addresses import Addresses
from runtime.servers.certificate import make_certificate
from runtime.servers.client import TableClient
from runtime.servers.frames import Frame, encode
from runtime.servers.serve import Server, storage_of
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.tables import Table
from tests.refusals import refused, says
from tests.unit.runtime.servers.served_here import serving

ELSEWHERE = "127.0.0.2"
USERS = Table(name="users", rows=5000, width=64, optimizer=SparseOptimizer(name="sgd", learning_rate=1.0))
MARK = np.frombuffer(b"a row of numbers", np.float32)


@pytest.fixture(autouse=True)
def _not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "is_loopback", lambda host: host == "127.0.0.1")


def copied(addresses: Addresses, folder: Path, *, certificate: bool) -> Addresses:
    """The same servers for a worker on another host, which has a folder of its own."""
    folder.mkdir()
    where = addresses.of(0)
    assert where is not None
    for name in ("key", "certificate.pem") if certificate else ("key",):
        (folder / name).write_bytes((addresses.folder / name).read_bytes())
        (folder / name).chmod(0o600)
    return Addresses(folder=folder, count=1, fixed=(f"{where[0]}:{where[1]}",))


def answered(where: tuple[str, int], context: ssl.SSLContext | None) -> bytes:
    """What somebody hears who says hello, in plain text without a context."""
    with contextlib.suppress(ConnectionError, ssl.SSLError), socket.create_connection(where, timeout=60.0) as plain:
        stranger = plain if context is None else context.wrap_socket(plain)
        stranger.sendall(encode(Frame(kind="hello", fields={"worker": 0})))
        return stranger.recv(2**16)
    return b""


class Overheard:
    """Passes on what two say to each other, and keeps it."""

    def __init__(self, where: tuple[str, int]) -> None:
        self.listener = socket.create_server((ELSEWHERE, 0))
        self.said = b""
        self._where = where
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        accepted, _ = self.listener.accept()
        other = socket.create_connection(self._where)
        for one, to in ((accepted, other), (other, accepted)):
            threading.Thread(target=self._pass_on, args=(one, to), daemon=True).start()

    def _pass_on(self, one: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other end has gone first
            while data := one.recv(2**16):
                self.said += data
                to.sendall(data)
        to.close()


def test_rows_are_encrypted_where_the_address_is_not_loopback(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    with serving(tmp_path, host=ELSEWHERE) as addresses:
        wire = Overheard(addresses.of(0))
        there = copied(addresses, tmp_path / "there", certificate=True)
        host, port, *_ = wire.listener.getsockname()
        through = Addresses(folder=there.folder, count=1, fixed=(f"{host}:{port}",))
        with TableClient(through, [USERS]) as client:
            client.begin()
            ids = np.arange(5000)
            values = np.tile(MARK, (5000, 16))
            client.push({"users": (ids, values)})
            assert np.array_equal(client.pull({"users": ids})["users"], -values)
        assert len(wire.said) > 2 * values.nbytes
        assert MARK.tobytes() not in wire.said
        assert b"PSF1" not in wire.said
        assert b'"kind"' not in wire.said
        wire.listener.close()


def test_a_server_listens_elsewhere_with_a_certificate_only(tmp_path: Path) -> None:
    storage = storage_of(tmp_path, 0, 1)
    with refused(RequestError, tmp_path / "certificate.pem", f"python -m runtime.servers certificate {tmp_path}"):
        Server(storage, "key", (ELSEWHERE, 0), folder=tmp_path)
    with refused(RequestError, "interface") as caught:
        Server(storage, "key", ("0.0.0.0", 0), folder=tmp_path)
    assert str(caught.value).startswith("0.0.0.0:")
    (tmp_path / "certificate.pem").write_text("nothing")
    with refused(RequestError, tmp_path / "certificate.pem"):
        Server(storage, "key", (ELSEWHERE, 0), folder=tmp_path)
    (tmp_path / "certificate.pem").chmod(0o600)
    with refused(RequestError, tmp_path / "certificate.pem", "certificate"):
        Server(storage, "key", (ELSEWHERE, 0), folder=tmp_path)


def test_who_has_no_certificate_or_another_one_is_not_heard(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    with serving(tmp_path, host=ELSEWHERE) as addresses:
        without = copied(addresses, tmp_path / "without", certificate=False)
        with refused(RequestError, without.folder / "certificate.pem"):
            TableClient(without, [USERS])
        make_certificate(without.folder)
        with refused(RequestError, without.folder, "certificate.pem"):
            TableClient(without, [USERS])
        unsure = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unsure.check_hostname, unsure.verify_mode = False, ssl.CERT_NONE
        for certificate in (None, without.folder / "certificate.pem"):  # takes any server, and has no key of the run
            if certificate is not None:
                unsure.load_cert_chain(certificate)
            assert answered(addresses.of(0), unsure) == b""
        assert b"nonce" not in answered(addresses.of(0), None)
        with TableClient(addresses, [USERS]) as client:
            client.begin()
            assert client.pull({"users": np.arange(3)})["users"].shape == (3, 64)


def signed(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name) -> None:
    """A folder with a certificate that an authority has signed, its key, and the authority's certificate."""
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)

    def made(subject: str, of: ec.EllipticCurvePrivateKey, authority: bool) -> x509.Certificate:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(issuer)
            .public_key(of.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )

    own = ec.generate_private_key(ec.SECP256R1())
    secret = own.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    both = (made(name, own, False), made("an authority", key, True))
    folder.mkdir()
    path = folder / "certificate.pem"
    path.write_bytes(secret + b"".join(one.public_bytes(serialization.Encoding.PEM) for one in both))
    path.chmod(0o600)


def _trusting(protocol: int, path: Path, certificate: bytes) -> ssl.SSLContext:
    """A context that takes whatever the authority has signed."""
    context = ssl.SSLContext(protocol)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_cert_chain(path)
    context.load_verify_locations(path)
    return context


@pytest.mark.parametrize("trusting", [False, True])
def test_another_certificate_of_the_same_authority_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusting: bool
) -> None:
    """By the context and, where that takes it, by the comparison behind the handshake."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority")])
    for name in ("ours", "theirs"):
        signed(tmp_path / name, name, key, issuer)
    if trusting:
        monkeypatch.setattr(transport, "_context", _trusting)
    with serving(tmp_path / "ours", host=ELSEWHERE) as addresses:
        with TableClient(addresses, [USERS]) as client:
            client.begin()
        host, port = addresses.of(0)
        (tmp_path / "theirs" / "key").write_text(addresses.key())
        (tmp_path / "theirs" / "key").chmod(0o600)
        theirs = Addresses(folder=tmp_path / "theirs", count=1, fixed=(f"{host}:{port}",))
        with refused(RequestError, f"{host}:{port}", tmp_path / "theirs", "certificate.pem"):
            TableClient(theirs, [USERS], patience=2.0)
        unsure = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unsure.check_hostname, unsure.verify_mode = False, ssl.CERT_NONE
        unsure.load_cert_chain(tmp_path / "theirs" / "certificate.pem")
        assert answered((host, port), unsure) == b""


def test_the_proofs_cover_the_certificate() -> None:
    assert len({transport.place_of(("10.0.0.1", 1), one) for one in (None, b"", b"a", b"b")}) == 4


def test_a_certificate_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certificate", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'certificate.pem'}\n"
    assert main(["certificate", str(tmp_path / "run")]) == 2
    assert "is there already; delete it on all hosts to make another one" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["certificate.pem"]


def test_a_folder_for_a_certificate_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["certificate", str(tmp_path / "file" / "run")]) == 2
    error = capsys.readouterr().err
    says(error, tmp_path / "file" / "run", "Not a directory")
    assert error.count("\n") == 1
    assert main([str(tmp_path / "file" / "run"), "--servers", "1", "--number", "0"]) == 1
    error = capsys.readouterr().err
    says(error, tmp_path / "file" / "run", "Not a directory")
    assert error.count("\n") == 1
