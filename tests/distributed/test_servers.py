"""Parameter servers as processes: DLRM on two workers and two servers, and servers that are killed."""

import contextlib
import errno
import importlib.util
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from planner.errors import RunError
from runtime.processes.run_servers import servers_of
from runtime.run_settings import RunSettings
from runtime.servers.addresses import Addresses
from runtime.servers.client import TableClient
from runtime.servers.fleet import Fleet
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.tables import Table
from tests.refusals import refused, says


def _tasks() -> ModuleType:
    specification = importlib.util.spec_from_file_location(
        "tasks_servers", Path(__file__).with_name("tasks_servers.py")
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["tasks_servers"] = module
    specification.loader.exec_module(module)
    return module


TORCH = {
    "adam": lambda weights: torch.optim.SparseAdam(weights, lr=0.05),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.05),
}


def unsharded(optimizer: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and tables of the plain model in this process, with torch's sparse gradients and optimizers."""
    tasks = _tasks()
    module = tasks.model()
    tables = {name: weight for name, weight in module.named_parameters() if name.startswith("tables")}
    for table in module.tables:
        table.sparse = True
    sparse = TORCH[optimizer](list(tables.values()))
    dense = torch.optim.SGD(
        [weight for weight in module.parameters() if all(weight is not t for t in tables.values())], lr=0.1
    )
    losses = []
    for step in range(tasks.STEPS):
        loss = module(*tasks.batch(step))
        loss.backward()
        for one in (sparse, dense):
            one.step()
            one.zero_grad()
        losses.append(loss.item())
    return losses, {name.removesuffix(".weight"): weight.detach() for name, weight in tables.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("adagrad", marks=pytest.mark.thorough)])
def test_dlrm_on_two_workers_and_two_servers_is_the_unsharded_model(pair, tmp_path: Path, optimizer: str) -> None:
    losses, tables = unsharded(optimizer)
    with Fleet(tmp_path, 2) as fleet:
        answers = pair.run("tasks_servers", "train", str(tmp_path), 2, optimizer, None)
        assert fleet.restarts == 0
    for found, whole, (touched, rows, nbytes), _ in answers:
        assert found == pytest.approx(losses, rel=2e-6)
        assert rows == touched
        assert nbytes == touched * 8 * 4  # rows of eight float32
        for name, weight in tables.items():
            assert np.allclose(whole[name], weight.numpy(), atol=2e-6), name


@pytest.mark.thorough
def test_dlrm_trains_with_stale_rows(pair, tmp_path: Path) -> None:
    with Fleet(tmp_path, 2):
        answers = pair.run("tasks_servers", "train", str(tmp_path), 2, "adagrad", 2)
    for losses, whole, _, _ in answers:
        assert np.isfinite(losses).all()
        assert all(np.isfinite(table).all() for table in whole.values())


ITEMS = Table(name="items", rows=50, width=8, optimizer=SparseOptimizer(name="adam"), deviation=1.0, seed=1)


def together(fleet: Fleet, steps: int, kill: random.Random | None) -> tuple[np.ndarray, int]:
    """The table after two workers made their steps, with gradients that depend on the rows they see; and how often a
    server was killed: at random moments within random steps."""
    found: list[np.ndarray | None] = [None, None]
    made, further = [0, 0], threading.Condition()

    def work(worker: int) -> None:
        generator = np.random.default_rng(worker)
        with TableClient(fleet.addresses, [ITEMS], worker=worker, workers=2) as client:
            client.begin()
            for _ in range(steps):
                ids = np.sort(generator.permutation(50)[:10])
                rows = client.pull({"items": ids})["items"]
                client.push({"items": (ids, rows * np.float32(0.3) + np.float32(0.1))})
                with further:
                    made[worker] += 1
                    further.notify_all()
            found[worker] = client.whole("items")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    killed, at = 0, 0
    while kill is not None and (at := at + kill.randrange(1, 20)) < steps:
        with further:
            further.wait_for(lambda at=at: max(made) >= at or not any(thread.is_alive() for thread in threads), 120.0)
        time.sleep(kill.uniform(0.0, 0.003))
        with contextlib.suppress(ProcessLookupError):  # it is being started again just now
            os.kill(fleet.pid(kill.randrange(2)), signal.SIGKILL)
            killed += 1
    for thread in threads:
        thread.join()
    assert found[0] is not None
    assert np.array_equal(*found)
    return found[0], killed


@pytest.mark.parametrize("steps", [60, pytest.param(150, marks=pytest.mark.thorough)])
def test_killed_servers_lose_nothing_and_apply_nothing_twice(tmp_path: Path, steps: int) -> None:
    with Fleet(tmp_path / "alive", 2) as fleet:
        wanted, _ = together(fleet, steps, None)
    with Fleet(tmp_path / "killed", 2) as fleet:
        found, killed = together(fleet, steps, random.Random(steps))
    assert killed > steps // 30
    assert np.array_equal(found, wanted)


@pytest.mark.thorough
def test_a_second_run_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    ids = np.arange(50)
    with Fleet(tmp_path, 2) as fleet, TableClient(fleet.addresses, [ITEMS]) as client:
        client.begin()
        client.push({"items": (ids, np.ones((50, 8), np.float32))})
        before = client.whole("items")
    with Fleet(tmp_path, 2) as fleet, TableClient(fleet.addresses, [ITEMS]) as client:
        client.begin()
        assert client.step == 1
        assert np.array_equal(client.whole("items"), before)


def test_no_server_outlives_the_fleet(tmp_path: Path) -> None:
    with Fleet(tmp_path, 3) as fleet:
        pids = [fleet.pid(number) for number in range(3)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_fleet_whose_folder_is_gone_says_so(tmp_path: Path) -> None:
    with Fleet(tmp_path / "servers", 1) as fleet:
        while fleet.addresses.of(0) is None:
            time.sleep(0.05)
        shutil.rmtree(tmp_path / "servers")
        os.kill(fleet.pid(0), signal.SIGKILL)
        fleet._watch.join(60.0)
        says(str(_fault(fleet)), "server 0", tmp_path / "servers" / "server-0.err")


def test_a_run_says_why_its_server_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "server-0").mkdir()
    (tmp_path / "server-0" / "snapshot-000001").write_bytes(b"no snapshot")
    plan = SimpleNamespace(training=SimpleNamespace(update=SimpleNamespace(placed=(("tables.*", "servers"),))))
    settings = RunSettings(server_folder=str(tmp_path), servers=1)
    with (
        refused(RunError, "server 0", tmp_path / "server-0" / "snapshot-000001"),
        servers_of(plan, settings) as folder,
    ):
        TableClient(Addresses(folder=Path(folder), count=1), [ITEMS], patience=5.0)


@pytest.mark.thorough
def test_a_second_fleet_is_refused_and_leaves_the_first_one_alone(tmp_path: Path) -> None:
    """It removed the addresses of the servers that ran, before it was told that it may not start."""
    with Fleet(tmp_path, 1) as first, TableClient(first.addresses, [ITEMS]) as client:
        client.begin()
        where = first.addresses.of(0)
        with Fleet(tmp_path, 1) as second:
            while not (fault := _fault(second)):
                assert first.addresses.of(0) == where
                time.sleep(0.05)
        says(str(fault), "server 0", tmp_path / "server-0", "in use")
        assert first.addresses.of(0) == where
        client.close()
        assert client.pull({"items": np.arange(3)})["items"].shape == (3, 8)  # found again
        assert first.restarts == 0


@pytest.mark.thorough
def test_an_address_that_was_left_is_removed_by_the_next_server_and_counts_for_no_start(tmp_path: Path) -> None:
    with Fleet(tmp_path, 1) as fleet, TableClient(fleet.addresses, [ITEMS]) as client:
        client.begin()
    assert fleet.addresses.of(0) is not None
    (tmp_path / "server-0" / "log-000000").rename(tmp_path / "log")
    (tmp_path / "server-0" / "log-000000").mkdir()
    with Fleet(tmp_path, 1) as fleet:
        while not (fault := _fault(fleet)):
            time.sleep(0.05)
    says(str(fault), "server 0", "log-000000")
    assert fleet.addresses.of(0) is None


def test_files_of_other_servers_are_refused_by_name(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2) as fleet, TableClient(fleet.addresses, [ITEMS]) as client:
        client.begin()
    with Fleet(tmp_path, 1) as fleet:
        while not (fault := _fault(fleet)):
            pass
    assert "server 0 cannot be started" in str(fault)
    assert "log-000000 is of server 0 of 2, and this is server 0 of 1" in str(fault)
    assert fault.exit_code == 2


def _fault(fleet: Fleet) -> RunError | None:
    try:
        fleet.check()
    except RunError as error:
        return error
    return None


def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """The limit of a file's size is a full disk that needs no root: a write is cut short, and the next one fails."""
    ids = np.arange(50)
    rows = Table(name="items", rows=50, width=8, optimizer=SparseOptimizer(name="sgd", learning_rate=1.0))
    with Fleet(tmp_path, 1) as fleet, TableClient(fleet.addresses, [rows]) as client:
        client.begin()
        for full in range(3):
            client.push({"items": (ids, np.ones((50, 8), np.float32))})
            room = (tmp_path / "server-0" / "log-000000").stat().st_size + 500
            pid = int(client._status()[0].fields["pid"])
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            client._links[0].patience = 0.5
            with refused(RunError, "server 0", "worker 0", "log-000000", os.strerror(errno.EFBIG)):
                client.push({"items": (ids, np.full((50, 8), 100.0, np.float32))})
            client._links[0].patience = 60.0
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            client.push({"items": (ids, np.ones((50, 8), np.float32))})
            os.kill(pid, signal.SIGKILL)
            assert np.array_equal(client.whole("items"), np.full((50, 8), -2.0 * (full + 1), np.float32))
        fleet.check()
        assert client.step == 6


def _said(fleet: Fleet, data: bytes) -> bytes:
    """What a stranger is told who says this, until the server has had enough of him."""
    where = fleet.addresses.of(0)
    assert where is not None
    with (
        socket.create_connection(where, timeout=60.0) as stranger,
        contextlib.suppress(OSError),
    ):  # who has had enough has gone
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: stranger.recv(2**16), b""))
    return b""


def _frame(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<4sIQI", b"PSF1", len(header), len(body), zlib.crc32(header + body)) + header + body


def test_no_stranger_ends_a_server(tmp_path: Path) -> None:
    """Nests, shapes and promises that are too large, and more connections than descriptors: the process lives, and its
    worker goes on. On commit dca0d43 the process ended."""
    shape = b'{"kind":"hello","fields":{},"arrays":[["a","<f4",[1180591620717411303424]]]}'
    with Fleet(tmp_path, 1) as fleet, TableClient(fleet.addresses, [ITEMS]) as client:
        client.begin()
        pid = fleet.pid(0)
        for data in (
            _frame(b"[" * 2000),
            _frame(b'{"a":' * 700),
            _frame(b"[" * 200_000),
            _frame(shape),
            _frame(shape.replace(b"1180591620717411303424", b"4294967296,4294967296")),
            _frame(b'{"kind":"hello","fields":[],"arrays":[]}'),
            _frame(b'{"kind":"hello","fields":{"key":1e999,"worker":Infinity,"program":[]},"arrays":[]}'),
            struct.pack("<4sIQI", b"PSF1", 100, 2**31, 0),
        ):
            _said(fleet, data)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (24, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        where = fleet.addresses.of(0)
        assert where is not None
        many = [socket.create_connection(where, timeout=60.0) for _ in range(60)]
        client.push({"items": (np.arange(50), np.ones((50, 8), np.float32))})
        for one in many:
            one.close()
        assert client.step == 1
        assert (fleet.pid(0), fleet.restarts) == (pid, 0)
        assert client.reconnections == 0
