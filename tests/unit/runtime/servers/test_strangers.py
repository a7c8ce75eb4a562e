"""Who is no worker of the run: not heard, held in 4 KiB, and gone after a while. No input ends a server."""

import errno
import json
import os
import resource
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import RequestError, RunError
from runtime.servers.__main__ import main
from runtime.servers.addresses import Addresses, make_key, parse_address, publish
from runtime.servers.certificate import make_certificate
from runtime.servers.client import TableClient
from runtime.servers.connections import Connections, Limits
from runtime.servers.frames import Frame, FrameReader, encode
from runtime.servers.handshake import BEFORE_HELLO
from runtime.servers.serve import LOOPBACK
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.storage import Storage
from runtime.servers.tables import LARGEST_WIDTH, Table
from tests.refusals import refused, says
from tests.unit.runtime.servers.served_here import Caller, frame_of, serving

USERS = Table(name="users", rows=40, width=6, optimizer=SparseOptimizer(name="adam"))
STATUS = encode(Frame(kind="status"))
HEADERS = {
    "deep lists": b"[" * 200_000,
    "lists that end": b"[" * 900 + b"]" * 900,
    "deep objects": b'{"a":' * 900 + b"1" + b"}" * 900,
    "deep fields": b'{"kind":"a","fields":{"a":' + b"[" * 60 + b"]" * 60 + b'},"arrays":[]}',
    "a size of 2^70": b'{"kind":"a","fields":{},"arrays":[["a","<f4",[1180591620717411303424]]]}',
    "a product of 2^64": b'{"kind":"a","fields":{},"arrays":[["a","<f4",[4294967296,4294967296]]]}',
    "a product of 2^80": b'{"kind":"a","fields":{},"arrays":[["a","<f8",[1099511627775,1099511627775,1]]]}',
    "many dims": b'{"kind":"a","fields":{},"arrays":[["a","<f4",[' + b"0," * 70 + b"0]]]}",
    "a size that is true": b'{"kind":"a","fields":{},"arrays":[["a","<f4",[true]]]}',
    "an object dtype": b'{"kind":"a","fields":{},"arrays":[["a","|O",[1]]]}',
    "a list as dtype": b'{"kind":"a","fields":{},"arrays":[["a",[],[1]]]}',
    "a list": b"[]",
    "no fields": b'{"kind":"a","arrays":[]}',
    "a number of 10,000 digits": b'{"kind":"a","fields":{"a":' + b"9" * 10_000 + b'},"arrays":[]}',
    "no UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_promises_too_much_is_a_value_error(header: bytes) -> None:
    """Nothing else is raised, and no memory is taken."""
    reader = FrameReader()
    reader.feed(frame_of(header, b"1234"))
    with pytest.raises(ValueError):  # noqa: PT011
        reader.next()


def test_frames_of_strangers_have_four_kibibytes(tmp_path: Path) -> None:
    hello = b'{"kind":"hello","fields":{"program":"' + b"x" * BEFORE_HELLO + b'"},"arrays":[]}'
    with serving(tmp_path) as addresses:
        for data in (frame_of(hello), struct.pack("<4sIQI", b"PSF1", 100, 2**31, 0), struct.pack("<4sI", b"PSF1", 0)):
            with Caller(addresses) as caller:
                assert caller.heard() is not None
                caller.say(data)
                caller.end()
                assert caller.heard() is None
        with Caller(addresses) as caller:
            assert caller.enter() is not None
            caller.say(encode(Frame(kind="status", arrays={"a": np.zeros(10_000)})))  # large ones are for workers
            assert caller.heard() is not None


@pytest.mark.parametrize("kind", ["status", "snapshot", "pull", "push", "restart"])
def test_nothing_is_answered_before_the_hello(tmp_path: Path, kind: str) -> None:
    with serving(tmp_path) as addresses, Caller(addresses) as caller:
        assert caller.heard().kind == "challenge"
        caller.say(encode(Frame(kind=kind, fields={"step": 0, "tables": []})))
        assert caller.heard() is None


def test_the_key_is_proved_and_never_said(tmp_path: Path) -> None:
    with serving(tmp_path) as addresses:
        key = addresses.key()
        with Caller(addresses) as caller:
            assert caller.enter(key="another").fields["message"].startswith("this server belongs to another run")
            assert caller.heard() is None
        for changed in ({"worker": 3}, {"program": "other"}, {"proof": None}, {"proof": "é"}, {"proof": [1]}):
            with Caller(addresses) as caller:
                assert caller.enter(changed=changed).kind == "refused"
        for changed in ({"worker": -1}, {"worker": True}, {"worker": []}, {"nonce": "short"}, {"program": "x" * 300}):
            with Caller(addresses) as caller:
                assert caller.enter(changed=changed) is None
        with Caller(addresses) as caller:
            welcome = caller.enter()
            assert welcome.kind == "welcome"
            assert key not in json.dumps(dict(welcome.fields))


def test_who_listens_where_a_server_was_learns_nothing(tmp_path: Path) -> None:
    """Neither by a false welcome nor by passing on what both say: proofs cover the server's address."""
    with serving(tmp_path) as addresses, socket.create_server(("127.0.0.1", 0)) as listener:
        other = Addresses(folder=tmp_path / "other", count=1, fixed=("{}:{}".format(*listener.getsockname()),))
        other.folder.mkdir()
        (other.folder / "key").write_text(addresses.key())
        (other.folder / "key").chmod(0o600)
        heard: list[bytes] = []

        def relay() -> None:
            accepted, _ = listener.accept()
            with accepted, Caller(addresses) as caller:
                accepted.sendall(caller.socket.recv(2**16))  # the challenge
                heard.append(accepted.recv(2**16))
                caller.say(heard[0])
                accepted.sendall(caller.socket.recv(2**16))

        thread = threading.Thread(target=relay)
        thread.start()
        with refused(RunError, other.fixed[0], "address"):
            TableClient(other, [USERS], patience=0.0)
        thread.join()
        assert addresses.key().encode() not in heard[0]

        def pose() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.sendall(encode(Frame(kind="challenge", fields={"nonce": "0" * 32})))
                accepted.recv(2**16)
                accepted.sendall(encode(Frame(kind="welcome", fields={"number": 0, "count": 1, "proof": "0" * 64})))
                accepted.recv(2**16)
            listener.close()

        thread = threading.Thread(target=pose)
        thread.start()
        with refused(RunError, 0.3):
            TableClient(other, [USERS], patience=0.3)
        thread.join()


@pytest.mark.parametrize("kind", ["refused", "stopped", "waiting", "welcome"])
def test_who_has_proved_nothing_ends_no_worker(tmp_path: Path, kind: str) -> None:
    """Whatever somebody says who listens where the server was: the worker finds the server when it is back."""
    said = encode(Frame(kind=kind, fields={"message": "go away", "workers": [1], "proof": "0" * 64}))
    challenge = encode(Frame(kind="challenge", fields={"nonce": "0" * 32}))
    with serving(tmp_path) as addresses, socket.create_server(("127.0.0.1", 0)) as listener:
        where, heard = addresses.of(0), []

        def pose() -> None:
            for first in (said, challenge + said, said):
                accepted, _ = listener.accept()
                with accepted:
                    accepted.sendall(first)
                    heard.append(accepted.recv(2**16))
                    accepted.shutdown(socket.SHUT_WR)
            publish(tmp_path, 0, where)

        thread = threading.Thread(target=pose)
        thread.start()
        publish(tmp_path, 0, listener.getsockname())
        with TableClient(addresses, [USERS], patience=30.0) as client:
            client.begin()
            assert client.reconnections == 3
        thread.join()
        assert len(heard) == 3

        def pose_once() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.sendall(challenge + said)
                accepted.recv(2**16)

        thread = threading.Thread(target=pose_once)
        thread.start()
        publish(tmp_path, 0, listener.getsockname())
        host, port = listener.getsockname()
        with refused(RunError, "server 0", f"{host}:{port}", "key"):
            TableClient(addresses, [USERS], patience=0.0)
        thread.join()


@pytest.mark.parametrize("host", ["a..b", "a b", "a\0b", "x" * 70, "a." * 200 + "b", ".", "\udcff"])
def test_what_is_no_host_is_no_address(tmp_path: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with refused(RequestError, "HOST:PORT"):
        parse_address(f"{host}:1")
    if host == "a..b":
        arguments = [str(tmp_path), "--servers", "1", "--number", "0", "--listen", f"{host}:1"]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        says(error, "a..b:1", "HOST:PORT")
        assert error.count("\n") == 1
    for good in ("localhost:1", "127.0.0.1:65535", "fe80::1%eth0:7000", "bücher.example:1"):
        assert parse_address(good)[1] == int(good.rpartition(":")[2])


def test_strangers_are_few_and_workers_stay(tmp_path: Path) -> None:
    with serving(tmp_path, Limits(connections=6, strangers=3)) as addresses, TableClient(addresses, [USERS]) as client:
        client.begin()
        strangers = [Caller(addresses) for _ in range(20)]
        assert all(one.heard() is not None for one in strangers)  # each got its challenge
        assert [one.heard() for one in strangers[:17]] == [None] * 17  # the oldest went
        client.push({})
        assert client.reconnections == 0
        workers = []
        for _ in range(5):
            workers.append(Caller(addresses))
            assert workers[-1].enter().kind == "welcome"
        with Caller(addresses) as late:
            assert late.heard() is None  # all are known, and stay
        client.push({})
        assert client.reconnections == 0
        for one in (*strangers, *workers):
            one.socket.close()


def test_a_connection_is_probed_in_case_its_host_is_lost() -> None:
    """Else the rank of a lost host was taken for two hours, Linux's usual time, and its next process refused."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        connections = Connections(listener, None, lambda one, frame: None, Limits(connections=2))
        with socket.create_connection(listener.getsockname()):
            connections.serve(60.0)
            (one,) = connections
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, interval, count = (one.channel.socket.getsockopt(socket.IPPROTO_TCP, name) for name in names)
            assert one.channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        connections.close()
    assert idle + interval * count == 30


PATIENCE = 0.2


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server does once a second it does more often."""
    monkeypatch.setattr("runtime.servers.serve._PATIENCE", PATIENCE)


@pytest.mark.usefixtures("impatient")
def test_who_says_nothing_is_dropped(tmp_path: Path) -> None:
    with serving(tmp_path, Limits(connections=9, handshake=0.0)) as addresses, Caller(addresses) as silent:
        assert silent.heard().kind == "challenge"
        assert silent.heard() is None
    with serving(tmp_path, Limits(connections=9, silence=0.0)) as addresses, Caller(addresses) as worker:
        assert worker.enter().kind == "welcome"
        worker.say(struct.pack("<4sIQI", b"PSF1", 10, 2**30, 0) + b"x" * 2**21)
        assert worker.heard() is None


@pytest.mark.usefixtures("impatient")
def test_no_more_is_buffered_than_the_limit(tmp_path: Path) -> None:
    """Two frames of which each fits, but not both: the second one is read when the first one is done."""
    large = encode(Frame(kind="status", arrays={"a": np.zeros(3 * 2**20)}))  # 24 MiB, more than sockets hold
    with (
        serving(tmp_path, Limits(connections=9, buffered=36 * 2**20)) as addresses,
        Caller(addresses) as one,
        Caller(addresses) as other,
    ):
        assert (one.enter().kind, other.enter().kind) == ("welcome", "welcome")
        one.say(large[: 2 * 2**20])
        thread = threading.Thread(target=other.say, args=(large,))
        thread.start()
        with Caller(addresses) as look:
            look.enter()
            look.say(STATUS)
            assert look.heard().kind == "status"
        assert thread.is_alive()  # nobody reads the rest of it
        one.say(large[2 * 2**20 :])
        assert one.heard().kind == "status"
        assert other.heard().kind == "status"
        thread.join()


@pytest.mark.usefixtures("impatient")
def test_accept_without_descriptors_neither_ends_a_server_nor_keeps_it_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again once a second, and not for as long as the connection stays in the queue."""
    calls: list[float] = []
    accept = socket.socket.accept

    def exhausted(self: socket.socket) -> tuple[socket.socket, object]:
        calls.append(time.monotonic())
        if len(calls) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    with serving(tmp_path) as addresses:
        monkeypatch.setattr(socket.socket, "accept", exhausted)
        with Caller(addresses) as caller:
            assert caller.enter().kind == "welcome"
        assert len(calls) == 3
        assert calls[2] - calls[1] > PATIENCE


def test_connections_stay_below_the_descriptors() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 8 <= Limits.of_process().connections < soft


NAMES = ("open", "create", "load", "ready", "push", "pull", "read", "restart", "snapshot", "status", "hello", "other")
FIELDS = ("workers", "staleness", "table", "part", "worker", "step", "tables", "learning_rate", "unknown")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("users")
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
ARRAYS = st.sampled_from(
    [np.arange(3), np.array([-1]), np.array([50]), np.zeros((2, 6), np.float32), np.zeros(0), np.zeros((2, 2, 2))]
)
MESSAGES = st.builds(
    lambda kind, fields, arrays: encode(Frame(kind=kind, fields=fields, arrays=arrays)),
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
    st.dictionaries(st.sampled_from(["rows", "values", "rows0", "gradients0"]), ARRAYS, max_size=3),
)
GOOD = (
    Frame(kind="open", fields={"workers": 1, "staleness": None}),
    Frame(kind="create", fields={"table": USERS.content()}),
    Frame(kind="load", fields={"table": "users", "part": "weight"}, arrays={"rows": np.arange(2)}),
    Frame(
        kind="push",
        fields={"worker": 0, "step": 10**9, "tables": ["users"], "learning_rate": None},
        arrays={"rows0": np.arange(2), "gradients0": np.zeros((2, 6), np.float32)},
    ),
    Frame(kind="pull", fields={"step": 0, "tables": ["users"]}, arrays={"rows0": np.arange(2)}),
    Frame(kind="read", fields={"step": 0, "tables": ["users"], "part": "first"}, arrays={"rows0": np.arange(2)}),
)


def _mutated(frame: Frame, name: str, value: object) -> bytes:
    table = frame.fields.get("table")
    if isinstance(table, dict) and name not in frame.fields:
        return encode(Frame(kind=frame.kind, fields={**frame.fields, "table": {**table, name: value}}))
    return encode(Frame(kind=frame.kind, fields={**frame.fields, name: value}, arrays=frame.arrays))


MUTANTS = st.builds(
    _mutated,
    st.sampled_from(GOOD),
    st.sampled_from([*FIELDS, "name", "rows", "width", "optimizer", "dtype", "partition", "shares", "seed"]),
    VALUES | st.integers(2**31, 2**80),
)
FLIPPED = st.builds(
    lambda frame, at, bit: bytes(b ^ (bit if n == at % len(encode(frame)) else 0) for n, b in enumerate(encode(frame))),
    st.sampled_from(GOOD),
    st.integers(0, 400),
    st.integers(1, 255),
)


def _fuzzed(folder: Path, messages: list[bytes], known: bool) -> None:
    """Whatever a stranger or a worker says, the server lives, and its files are those of what it acknowledged."""
    with serving(folder) as addresses:
        with TableClient(addresses, [USERS], workers=1) as client:
            client.begin()
        for message in messages:
            with Caller(addresses) as caller:
                assert (caller.enter() if known else caller.heard()) is not None
                caller.say(message)
                caller.end()
        with Caller(addresses) as caller:
            assert caller.enter().kind == "welcome"
            caller.say(STATUS)
            assert caller.heard().kind == "status"
    storage = Storage(folder / "server-0", 0, 1)
    storage.open()
    storage.close()


@pytest.mark.slow
@pytest.mark.thorough
@given(st.lists(MESSAGES | MUTANTS | FLIPPED, min_size=1, max_size=12), st.booleans())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_message_ends_a_server(tmp_path_factory: pytest.TempPathFactory, messages: list[bytes], known: bool) -> None:
    _fuzzed(tmp_path_factory.mktemp("fuzz"), messages, known)


@pytest.mark.slow
@pytest.mark.exhaustive
@given(st.lists(MESSAGES | MUTANTS | FLIPPED, min_size=20, max_size=60), st.booleans())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_message_ends_a_server_often(
    tmp_path_factory: pytest.TempPathFactory, messages: list[bytes], known: bool
) -> None:
    _fuzzed(tmp_path_factory.mktemp("fuzz"), messages, known)


def test_a_table_that_no_host_holds_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    huge = Table(name="huge", rows=2**31 - 1, width=LARGEST_WIDTH, optimizer=SparseOptimizer(name="adam"))
    with serving(tmp_path) as addresses, refused(RequestError, "huge", "server 0", "GiB"):
        TableClient(addresses, [huge])


def test_files_are_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "servers"
    before = os.umask(0)
    try:
        with serving(folder) as addresses, TableClient(addresses, [USERS]) as client:
            client.begin()
            client.snapshot()
        make_certificate(folder)
    finally:
        os.umask(before)
    assert {path.name for path in folder.iterdir()} == {"certificate.pem", "key", "server-0", "server-0.at"}
    for path in (folder, *folder.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    make_key(tmp_path)
    publish(tmp_path, 0, ("127.0.0.1", 1))
    (tmp_path / "key").chmod(0o644)
    with refused(RequestError, tmp_path / "key", 644, 600):
        Addresses(folder=tmp_path, count=1).key()
    with refused(RequestError, tmp_path / "key", 644, 600):
        make_key(tmp_path)


@pytest.mark.parametrize("key", [b"", b"\n", b"0" * 31, b"0" * 32 + b"\n", b"A" * 32, b"0" * 64, b"\xff" * 32])
def test_what_is_no_key_is_refused(tmp_path: Path, key: bytes) -> None:
    """An empty file was one, which anybody knows: it is what a machine leaves that went down at the wrong moment."""
    (tmp_path / "key").write_bytes(key)
    (tmp_path / "key").chmod(0o600)
    for read in (Addresses(folder=tmp_path, count=1).key, lambda: make_key(tmp_path)):
        with refused(RequestError, tmp_path / "key", len(key), 32):
            read()
    (tmp_path / "key").unlink()
    assert make_key(tmp_path) == make_key(tmp_path) == Addresses(folder=tmp_path, count=1).key()


def test_private_files_are_on_the_disk_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, link = os.fsync, os.link

    def synced(descriptor: int) -> None:
        found = os.fstat(descriptor)
        events.append("folder" if stat.S_ISDIR(found.st_mode) else f"file of {found.st_size}")
        sync(descriptor)

    def linked(old: Path, new: Path) -> None:
        events.append("link")
        link(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    make_key(tmp_path)
    assert events == ["file of 32", "folder", "link", "folder"]
