"""What a server cannot apply is refused: it is in no log, the state is as it was, and the others are served."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import RequestError
from runtime.servers import shard as shard_module
from runtime.servers.addresses import Addresses
from runtime.servers.client import TableClient
from runtime.servers.frames import Frame, encode
from runtime.servers.shard import Shard
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.storage import Storage
from runtime.servers.tables import LARGEST_WIDTH, Table, first_values, memory_of_drawing, partition_of
from tests.refusals import refused, says
from tests.unit.runtime.servers.served_here import Caller, serving

USERS = Table(name="users", rows=40, width=6, optimizer=SparseOptimizer(name="adagrad"))
OPEN = Frame(kind="open", fields={"workers": 1, "staleness": None})
READY = Frame(kind="ready", fields={"table": "users"})


def create(**changed: Any) -> Frame:
    return Frame(kind="create", fields={"table": {**USERS.content(), **changed}})


def push(step: int, rows: list[int], value: float = 1.0) -> Frame:
    fields = {"worker": 0, "step": step, "tables": ["users"], "learning_rate": None}
    gradients = np.full((len(rows), 6), value, np.float32)
    return Frame(kind="push", fields=fields, arrays={"rows0": np.array(rows, np.int64), "gradients0": gradients})


def answers(addresses: Addresses, *frames: Frame) -> list[Frame | None]:
    """What a worker is told for each of these; None where the server hangs up."""
    with Caller(addresses) as caller:
        assert caller.enter().kind == "welcome"
        found = []
        for frame in frames:
            caller.say(encode(frame))
            found.append(caller.heard())
        return found


def state_in(folder: Path) -> bytes:
    """What another server reads from these files."""
    storage = Storage(folder / "server-0", 0, 1)
    try:
        return b"".join(encode(frame) for frame in storage.open().snapshot())
    finally:
        storage.close()


@pytest.mark.parametrize("rows", [[5, -(2**63)], [2**62, -(2**62) - 1], [-1, 3], [3, 3], [4, 3], [40]])
def test_rows_that_are_not_there_are_in_no_log(tmp_path: Path, rows: list[int]) -> None:
    """Differences of rows wrap: 5 and -2^63 were taken for ascending ones, logged, and ended the server."""
    with serving(tmp_path) as addresses:
        *_, wrong, right = answers(addresses, OPEN, create(), READY, push(0, [1, 2]), push(1, rows), push(1, [5]))
        assert wrong.kind == "refused"
        says(wrong.fields["message"], "users", 40)
        assert right.kind == "done"
    assert state_in(tmp_path)


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"optimizer": {"decay": -1.0}}, ("adagrad", "decay", -1)),
        ({"optimizer": {"initial_sum": -1.0}}, ("adagrad", "initial sum", -1)),
        ({"optimizer": {"epsilon": -1e-8}}, ("adagrad", "epsilon", -1e-08)),
        ({"shares": [1e308, 7e307]}, ("users", "1e+308, 7e+307", 1)),
        ({"shares": [1e308]}, ("users", "1e+308", "1e+15")),
        ({"width": 2**61}, ("users", 40, 2**61)),
    ],
)
def test_numbers_that_no_table_has_are_refused_when_it_is_made(
    tmp_path: Path, changed: dict[str, Any], facts: tuple[object, ...]
) -> None:
    content = {**USERS.content(), **changed}
    content["optimizer"] = {**USERS.content()["optimizer"], **changed.get("optimizer", {})}
    with refused(RequestError, *facts):
        partition_of(Table.of(content), 1)
    with serving(tmp_path) as addresses:
        _, answer, made = answers(addresses, OPEN, Frame(kind="create", fields={"table": content}), create())
        assert (answer.kind, made.kind) == ("refused", "done")
    assert state_in(tmp_path)


def test_shares_that_are_far_apart_give_bounds() -> None:
    for shares in ((1e15, 1e15), (1e-300, 1e15), (1e-300, 1e-300)):
        partition = partition_of(Table.of({**USERS.content(), "shares": shares}), 2)
        assert partition.bounds[-1] == 40


def test_a_server_without_a_row_makes_the_widest_table() -> None:
    shard = Shard(number=1, count=2)
    for record in (OPEN, create(rows=1, width=LARGEST_WIDTH)):
        assert shard.check(record)
        shard.apply(record)
    assert shard.tables["users"].weight.shape == (0, LARGEST_WIDTH)


class _FaultError(Exception):
    """A fault of ours that nobody knows of."""


@pytest.mark.parametrize("error", [_FaultError, MemoryError, IndexError, ValueError])
def test_what_fails_after_it_was_logged_is_taken_off_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """In the midst of its work, with half of the state changed: the state is that of the records before it."""
    summed = shard_module.summed

    def faulty(parts: list[tuple[Any, Any]], table: Table) -> tuple[Any, Any]:
        if any((gradient == 666.0).any() for _, gradient in parts):
            raise error("no idea")
        return summed(parts, table)

    log = tmp_path / "server-0" / "log-000000"
    with serving(tmp_path) as addresses:
        assert all(one.kind == "done" for one in answers(addresses, OPEN, create(), READY, push(0, [1, 2])))
        before = log.read_bytes()
        monkeypatch.setattr(shard_module, "summed", faulty)
        (answer,) = answers(addresses, push(1, [1, 2], 666.0))
        assert answer.kind == "refused"
        says(answer.fields["message"], "server 0", "push", "no idea")
        assert log.read_bytes() == before
        (done,) = answers(addresses, push(1, [1, 2], 3.0))
        assert (done.kind, done.fields["version"]) == ("done", 2)
    shard = Shard(number=0, count=1)
    for record in (OPEN, create(), READY, push(0, [1, 2]), push(1, [1, 2], 3.0)):
        shard.apply(record)
    assert state_in(tmp_path) == b"".join(encode(frame) for frame in shard.snapshot())


@pytest.mark.parametrize("flushed", [False, True])
def test_a_record_is_taken_off_a_log_behind_a_snapshot(tmp_path: Path, flushed: bool) -> None:
    storage = Storage(tmp_path / "server-0", 0, 1, flushed=flushed)
    shard = storage.open()
    for record in (OPEN, create(), READY, push(0, [1]), push(1, [2])):
        storage.append(record)
        shard.apply(record)
        if record.fields.get("step") == 0:
            storage.snapshot(shard)
    wanted, size = b"".join(map(encode, shard.snapshot())), storage.log_bytes
    storage.append(push(2, [3]))
    again = storage.take_back()
    assert b"".join(map(encode, again.snapshot())) == wanted
    assert storage.log_bytes == size
    storage.append(push(2, [4]))
    again.apply(push(2, [4]))
    storage.close()
    assert state_in(tmp_path) == b"".join(map(encode, again.snapshot()))


def test_a_question_that_fails_ends_its_connection_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise _FaultError("no\nidea")

    with serving(tmp_path) as addresses, TableClient(addresses, [USERS]) as client:
        client.begin()
        with monkeypatch.context() as patched:
            patched.setattr(Shard, "rows", faulty)
            pull = Frame(kind="pull", fields={"step": 0, "tables": ["users"]}, arrays={"rows0": np.arange(2)})
            answer, ended = answers(addresses, pull, pull)
            says(answer.fields["message"], "server 0", "pull", "_FaultError: no idea")
            assert ended is None
        assert client.pull({"users": np.arange(3)})["users"].shape == (3, 6)
        assert client.reconnections == 0


def test_a_question_that_fails_while_it_waits_ends_its_connection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits is told so every second, which was outside of what catches errors."""
    monkeypatch.setattr("runtime.servers.serve._PATIENCE", 0.05)

    def faulty(*_: object) -> None:
        raise _FaultError("no idea")

    with serving(tmp_path) as addresses, TableClient(addresses, [USERS]) as client:
        client.begin()
        with Caller(addresses) as caller:
            assert caller.enter().kind == "welcome"
            pull = Frame(kind="pull", fields={"step": 1, "tables": ["users"]}, arrays={"rows0": np.arange(2)})
            caller.say(encode(pull))
            assert caller.heard().kind == "waiting"
            with monkeypatch.context() as patched:
                patched.setattr(Shard, "waiting_for", faulty)
                while (heard := caller.heard()).kind == "waiting":
                    pass
                says(heard.fields["message"], "server 0", "pull", "_FaultError: no idea")
        client.push({})
        assert client.pull({"users": np.arange(3)})["users"].shape == (3, 6)


def test_a_pull_that_is_too_large_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven kilobytes that name one table 200 times made 3.3 GB."""
    monkeypatch.setattr(shard_module, "LARGEST_BODY", 400)
    rows = {f"rows{number}": np.arange(40) for number in range(200)}
    twice = Frame(kind="pull", fields={"step": 0, "tables": ["users"] * 200}, arrays=rows)
    large = Frame(kind="pull", fields={"step": 0, "tables": ["users"]}, arrays=rows)
    read = Frame(kind="read", fields={"step": 0, "tables": ["users"], "part": "sum"}, arrays=rows)
    small = Frame(kind="pull", fields={"step": 0, "tables": ["users"]}, arrays={"rows0": np.arange(16)})
    looked_up: list[int] = []
    look_up = Shard.rows
    monkeypatch.setattr(Shard, "rows", lambda *given: looked_up.append(given[2].size) or look_up(*given))
    with serving(tmp_path) as addresses:
        *_, one, two, three, four = answers(addresses, OPEN, create(), READY, twice, large, read, small)
        says(one.fields["message"], "pull", "twice")
        for answer in (two, three):
            says(answer.fields["message"], 960, 400)
        assert four.arrays["values0"].shape == (16, 6)
        assert looked_up == [16]


def test_a_table_is_filled_in_little_more_memory_than_it_takes() -> None:
    """Its first values took 6 to 12 times as much while they were drawn."""
    shard = Shard(number=0, count=2)
    tracemalloc.start()
    try:
        for record in (OPEN, create(rows=2**18, width=16, deviation=1.0)):
            assert shard.check(record)
            shard.apply(record)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = shard.tables["users"]
    assert peak < held.weight.nbytes + held.state["sum"].nbytes + memory_of_drawing(held.table)
    assert np.array_equal(held.weight, first_values(held.table, held.partition.ids_of(0, 0, 2**17)))


def test_a_table_without_room_is_in_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "server-0" / "log-000000"
    with serving(tmp_path) as addresses:
        answers(addresses, OPEN)
        before = log.read_bytes()
        with monkeypatch.context() as patched:
            patched.setattr(shard_module, "available_bytes", lambda: 2.0**30)
            (answer,) = answers(addresses, create(rows=2**27))
            says(answer.fields["message"], "users", "server 0", "6.0 GiB", "1.0 GiB")
            patched.setattr(shard_module, "first_values", lambda *_: np.zeros(2**56))
            (answer,) = answers(addresses, create(deviation=1.0))
            says(answer.fields["message"], "server 0", "create", "MemoryError")
            assert log.read_bytes() == before
        assert [one.kind for one in answers(addresses, create(), READY, push(0, [1]))] == ["done"] * 3
    assert state_in(tmp_path)
