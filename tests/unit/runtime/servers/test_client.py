"""Workers and servers on real sockets of this process: a server in a thread, what it says, and what it refuses."""

import errno
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import RequestError, RunError
from runtime.servers import connection
from runtime.servers.__main__ import main
from runtime.servers.addresses import Addresses, make_key, publish
from runtime.servers.client import TableClient
from runtime.servers.connection import Link, ask_all
from runtime.servers.disk import BrokenDiskError, SystemDisk
from runtime.servers.frames import LARGEST_HEADER, Frame, encode
from runtime.servers.serve import Server, storage_of
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.tables import Table
from tests.refusals import refused, says
from tests.unit.runtime.servers.served_here import serving

USERS = Table(name="users", rows=40, width=6, optimizer=SparseOptimizer(name="sgd", learning_rate=1.0))


def status(addresses: Addresses, server: int = 0) -> dict[str, object]:
    link = Link(addresses=addresses, server=server, worker=None, program="test")
    link.ask(Frame(kind="status"))
    try:
        return dict(link.answer().fields)
    finally:
        link.close()


def test_bytes_are_those_of_the_rows_that_were_touched(tmp_path: Path) -> None:
    with serving(tmp_path, count=3) as addresses, TableClient(addresses, [USERS]) as client:
        client.begin()
        ids = np.array([7, 3, 39, 20, 0])
        rows = client.pull({"users": ids})["users"]
        assert rows.shape == (5, 6)
        client.push({"users": (ids[:4], np.ones((4, 6), np.float32))})
        assert client.traffic.pulled_rows == 5
        assert client.traffic.pulled_bytes == 5 * 6 * 4
        assert client.traffic.pushed_bytes == 4 * 6 * 4
        assert client.traffic.id_bytes == 9 * 8
        wanted = np.zeros((40, 6), np.float32)
        wanted[ids[:4]] = -1.0
        assert np.array_equal(client.whole("users"), wanted)


def test_a_message_is_its_rows_and_little_else(tmp_path: Path) -> None:
    """What goes over the wire, counted at the sockets: frames add some hundred bytes."""
    with serving(tmp_path, count=2) as addresses, TableClient(addresses, [USERS]) as client:
        client.begin()
        before = client.wire_bytes
        ids = np.arange(30)
        client.pull({"users": ids})
        client.push({"users": (ids, np.ones((30, 6), np.float32))})
        sent, received = (after - b for after, b in zip(client.wire_bytes, before, strict=True))
        payload = 30 * 6 * 4
        assert payload + 2 * 30 * 8 < sent < payload + 2 * 30 * 8 + 4 * 300
        assert payload < received < payload + 4 * 300


def test_the_fastest_worker_waits_when_it_is_so_many_steps_ahead(tmp_path: Path) -> None:
    """By the order of events: the pull that goes too far is seen waiting at the server, and is answered after the
    slowest worker has pushed."""
    nothing = {"users": (np.zeros(0, np.int64), np.zeros((0, 6), np.float32))}
    row, events = np.array([1]), []
    with (
        serving(tmp_path, count=1) as addresses,
        TableClient(addresses, [USERS], worker=0, workers=2, staleness=2) as fast,
        TableClient(addresses, [USERS], worker=1, workers=2, staleness=2) as slow,
    ):
        fast.begin()
        for _ in range(2):  # steps 0 and 1, and it may begin step 2
            fast.pull({"users": row})
            fast.push({"users": (row, np.ones((1, 6), np.float32))})
        assert (fast.pull({"users": row})["users"] == -2.0).all()  # its own updates at once, nobody else's yet
        fast.push({"users": (row, np.ones((1, 6), np.float32))})

        def too_far() -> None:
            events.append(("answered", float(fast.pull({"users": row})["users"][0, 0])))

        thread = threading.Thread(target=too_far)
        thread.start()
        while status(addresses)["waiting"] != [0]:
            assert not events
        events.append(("pushes", 0.0))
        slow.push(nothing)
        thread.join()
    assert events == [("pushes", 0.0), ("answered", -3.0)]


def test_a_synchronous_step_is_the_sum_of_all_workers_applied_once(tmp_path: Path) -> None:
    table = Table(name="users", rows=40, width=6, optimizer=SparseOptimizer(name="adagrad", learning_rate=1.0))
    row = np.array([1])
    with (
        serving(tmp_path, count=2) as addresses,
        TableClient(addresses, [table], worker=0, workers=2) as one,
        TableClient(addresses, [table], worker=1, workers=2) as other,
    ):
        one.begin()
        other.push({"users": (row, np.full((1, 6), 3.0, np.float32))})
        assert [status(addresses, server)["version"] for server in range(2)] == [0, 0]
        one.push({"users": (row, np.full((1, 6), 1.0, np.float32))})
        assert one.pull({"users": row})["users"][0, 0] == -1.0  # of a sum of 4: two updates would give less than -1
        assert [status(addresses, server)["version"] for server in range(2)] == [1, 1]


def test_first_values_are_those_of_the_first_worker(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((40, 6), np.float32)
    with (
        serving(tmp_path, count=2) as addresses,
        TableClient(addresses, [USERS], worker=0, workers=2) as one,
        TableClient(addresses, [USERS], worker=1, workers=2) as other,
    ):
        other.begin({"users": np.zeros((40, 6), np.float32)})
        with refused(RequestError, "users", "(40, 5)", 40, 6):
            one.begin({"users": np.zeros((40, 5), np.float32)})
        one.begin({"users": values})
        assert np.array_equal(other.whole("users"), values)
        one.begin({"users": values + 1})
        assert np.array_equal(one.whole("users"), values)


@pytest.mark.parametrize(
    ("made", "facts"),
    [
        ({"worker": 2, "workers": 2}, ("worker 2", 2, 0)),
        ({"workers": 2}, ("server 0", "1 workers", "2 workers")),
        ({"staleness": 3}, ("server 0", "1 workers", "1 workers", 3)),
        ({"staleness": -1}, ("staleness", -1, 0, None)),
        ({"rows": 30}, ("users", "server 0", "rows", 40, 30)),
        ({"width": 5}, ("users", "server 0", "width", 6, 5)),
        ({}, ("worker 0", os.getpid(), os.getpid())),
    ],
)
def test_workers_that_do_not_fit_are_refused(tmp_path: Path, made: dict[str, int], facts: tuple[object, ...]) -> None:
    table = {name: made[name] for name in ("rows", "width") if name in made}
    client = {name: value for name, value in made.items() if name not in table}
    optimizer = SparseOptimizer(name="sgd", learning_rate=1.0)
    with serving(tmp_path, count=1) as addresses:
        first = TableClient(addresses, [USERS])
        if made:
            first.close()
        other = Table(name="users", optimizer=optimizer, **{"rows": 40, "width": 6, **table})
        with refused(RequestError, *facts):
            TableClient(addresses, [other], **client)
        first.close()


def test_a_client_that_was_refused_leaves_its_place_to_the_next_one(tmp_path: Path) -> None:
    """As in a notebook, whose last error keeps the refused client alive."""
    with serving(tmp_path) as addresses:
        with TableClient(addresses, [USERS]):
            pass
        with pytest.raises(RequestError, match="width") as kept:
            TableClient(addresses, [replace(USERS, width=7)])
        with TableClient(addresses, [USERS]) as client:
            client.begin()
        assert kept.value.__traceback__ is not None


def test_every_frame_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request was counted before there was a connection, and again when it was sent; the hello was not."""
    made: list[int] = []
    monkeypatch.setattr(connection, "encode", lambda frame: (made.append(len(encode(frame))), encode(frame))[1])
    with serving(tmp_path) as addresses:
        link = Link(addresses=addresses, server=0, worker=None, program="test")
        for _ in range(2):
            link.ask(Frame(kind="status"))
            link.answer()
        link.close()
    assert len(made) == 3  # two requests and a hello
    assert link.sent == sum(made)


def test_a_request_that_cannot_be_sent_to_all_leaves_no_answer_behind(tmp_path: Path) -> None:
    with serving(tmp_path, count=2) as addresses, TableClient(addresses, [USERS]) as client:
        client.begin({"users": np.arange(240, dtype=np.float32).reshape(40, 6)})
        pull = Frame(kind="pull", fields={"step": 0, "tables": ["users"]}, arrays={"rows0": np.arange(3)})
        with pytest.raises(RequestError, match="header"):
            ask_all(client._links, {0: pull, 1: Frame(kind="pull", fields={"tables": ["x" * LARGEST_HEADER]})})
        ids = np.array([39, 0, 7])
        assert client.pull({"users": ids})["users"][:, 0].tolist() == [234.0, 0.0, 42.0]


def test_rows_and_tables_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, count=2) as addresses, TableClient(addresses, [USERS]) as client:
        client.begin()
        with refused(RequestError, "users", 40, 0, 39):
            client.pull({"users": np.array([1, 40])})
        with refused(RequestError, "users", -1, 40, 0, 39):
            client.pull({"users": np.array([1, -1])})
        with refused(RequestError, "user", "users"):
            client.pull({"user": np.array([1])})
        with refused(RequestError, "users", 20):
            client.push({"users": (np.array([1, 1]), np.zeros((2, 6), np.float32))})
        with refused(RequestError, "users", 6, "(1, 5)", "float32"):
            client.push({"users": (np.array([1]), np.zeros((1, 5), np.float32))})


def test_who_does_not_know_the_key_is_not_heard(tmp_path: Path) -> None:
    with serving(tmp_path / "one", count=1) as addresses:
        make_key(tmp_path / "other")
        publish(tmp_path / "other", 0, addresses.of(0))
        where = ":".join(map(str, addresses.of(0)))
        with refused(RunError, "server 0", where, 0.2, "key", "another run"):
            TableClient(Addresses(folder=tmp_path / "other", count=1), [USERS], patience=0.2)
        assert (tmp_path / "one" / "key").stat().st_mode & 0o077 == 0


def test_no_servers_and_silent_servers_are_told(tmp_path: Path) -> None:
    with refused(RequestError, tmp_path, "python -m runtime.servers"):
        Addresses(folder=tmp_path, count=2).key()
    make_key(tmp_path)
    with refused(RunError, "server 0", 1, tmp_path, 0.2):
        TableClient(Addresses(folder=tmp_path, count=1), [USERS], patience=0.2)


def test_who_waits_for_a_worker_says_for_which(tmp_path: Path) -> None:
    with (
        serving(tmp_path, count=1) as addresses,
        TableClient(addresses, [USERS], worker=0, workers=2, patience=0.5) as client,
    ):
        client.begin()
        client.push({})
        with refused(RunError, "worker 0", 0.5, "server 0", "worker 1"):
            client.pull({"users": np.array([1])})


def test_a_server_whose_disk_fails_says_so_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the worker has no answer; another server with the same files has all that was acknowledged."""
    server = Server(storage_of(tmp_path, 0, 1), make_key(tmp_path), folder=tmp_path)
    publish(tmp_path, 0, server.address)
    ends: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve()
        except BrokenDiskError as error:
            ends.append(error)
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    client = TableClient(Addresses(folder=tmp_path, count=1), [USERS], patience=1.0)
    client.begin()
    row = np.array([1])
    client.push({"users": (row, np.ones((1, 6), np.float32))})

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(SystemDisk, "write", broken)
        with refused(RunError, "server 0", "log-000000", os.strerror(errno.EIO)):
            client.push({"users": (row, np.ones((1, 6), np.float32))})
    thread.join()
    assert len(ends) == 1
    with serving(tmp_path, count=1):
        assert client.pull({"users": row})["users"][0, 0] == -1.0
        client.push({"users": (row, np.ones((1, 6), np.float32))})
        assert client.pull({"users": row})["users"][0, 0] == -2.0
    client.close()


def test_a_second_server_is_refused_and_leaves_the_address_of_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runtime.servers.storage._ENDING", 0.1)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # this process keeps its own
    with serving(tmp_path) as addresses:
        where = addresses.of(0)
        assert main([str(tmp_path), "--servers", "1", "--number", "0"]) == 2
        assert addresses.of(0) == where
    says(capsys.readouterr().err, tmp_path / "server-0", "in use")


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    """One who gave up waiting at one server has not heard the others: on commit dca0d43 the next pull got the rows of
    the one before it."""
    with (
        serving(tmp_path, count=2) as addresses,
        TableClient(addresses, [USERS], worker=0, workers=2, staleness=0) as client,
        TableClient(addresses, [USERS], worker=1, workers=2, staleness=0) as other,
    ):
        client.begin({"users": np.arange(240, dtype=np.float32).reshape(40, 6)})
        other.push({})
        client.push({})
        fields = {"worker": 1, "step": 1, "tables": [], "learning_rate": None}
        other._links[1].ask(Frame(kind="push", fields=fields))
        other._links[1].answer()
        client.push({})
        client._links[0].patience = 0.5
        with refused(RunError, 0.5, "server 0", "worker 1"):
            client.pull({"users": np.arange(40)})
        client._links[0].patience = 60.0
        other._links[0].ask(Frame(kind="push", fields=fields))
        other._links[0].answer()
        ids = np.array([39, 0, 7])
        assert client.pull({"users": ids})["users"][:, 0].tolist() == [234.0, 0.0, 42.0]


def test_a_worker_that_went_away_between_two_servers_is_told(tmp_path: Path) -> None:
    with serving(tmp_path, count=2) as addresses:
        with TableClient(addresses, [USERS], workers=2) as client:
            client.begin()
            fields = {"worker": 0, "step": 0, "tables": [], "learning_rate": None}
            client._links[1].ask(Frame(kind="push", fields=fields))
            client._links[1].answer()
        with TableClient(addresses, [USERS], workers=2) as client:
            facts = ("worker 0", "0, 1")
            for work in (lambda: client.pull({"users": np.array([1])}), lambda: client.push({})):
                with refused(RequestError, *facts):
                    work()


def test_tables_that_are_restarted_have_the_contents_that_were_read(tmp_path: Path) -> None:
    """Also on servers of another number, that have trained something else, and are killed afterwards: the losses of all
    that follow are those of the first servers."""
    rows = Table(name="users", rows=41, width=3, optimizer=SparseOptimizer(name="adam"), deviation=1.0)
    parts, ids = ("weight", "first", "second"), np.arange(rows.rows)

    def trained(client: TableClient, seed: int) -> np.ndarray:
        for step in range(2):
            gradients = np.random.default_rng(seed + step).standard_normal((5, 3), np.float32)
            client.push({"users": (np.array([40, 2, 7, 11, 30]), gradients)})
        return np.concatenate([client.read("users", part, ids) for part in parts])

    with serving(tmp_path / "first", count=2) as addresses, TableClient(addresses, [rows]) as client:
        client.begin()
        trained(client, 0)
        kept = {part: client.read("users", part, ids) for part in parts}
        wanted = trained(client, 10)
    with serving(tmp_path / "other", count=3) as addresses, TableClient(addresses, [rows]) as client:
        client.begin()
        trained(client, 20)
        trained(client, 30)
        client.restart(2)
        for part, values in kept.items():
            client.write("users", part, ids, values)
        client.ready()
    with (
        serving(tmp_path / "other", count=3) as addresses,
        TableClient(addresses, [rows]) as client,
    ):  # replayed from the log
        assert client.step == 2
        with refused(RequestError, "users", "third"):
            client.read("users", "third", ids)
        assert np.array_equal(trained(client, 10), wanted)


def test_a_torn_push_is_mended_by_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, count=2) as addresses:
        with TableClient(addresses, [USERS]) as client:
            client.begin()
            fields = {"worker": 0, "step": 0, "tables": [], "learning_rate": None}
            client._links[1].ask(Frame(kind="push", fields=fields))
            client._links[1].answer()
        with TableClient(addresses, [USERS]) as client:
            client.restart(5)
            client.write("users", "weight", np.arange(40), np.ones((40, 6), np.float32))
            client.ready()
            assert client.step == 5
            assert client.pull({"users": np.array([3])})["users"].tolist() == [[1.0] * 6]
