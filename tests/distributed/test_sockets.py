"""What a run on one host opens to the network: nothing but sockets on loopback, listed while it runs; and nobody who
writes into them has code run."""

import base64
import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from planner.cli.main import app
from planner.plan.file import save_plan
from tests.distributed.listening import Listening, listening, marked
from tests.distributed.test_launch import plan_for

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 240.0
PLAN = [sys.executable, "-m", "planner.cli.main"]
ANSWERS = 2.0  # seconds
VALIDATE, SET, PING, MAGIC = 0, 1, 13, 0x3C85F7CE  # of TCPStoreBackend.hpp
UNPICKLED = 20.0  # seconds in which an agent of torchrun looks at its store several times
SLOW = """
import time

import torch


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(8, 4)

    def forward(self, tokens):
        return self.rows(tokens).pow(2).mean()


def make():
    return Tokens(), (torch.zeros(2, 4, dtype=torch.int64),)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, number):
        time.sleep(0.1)
        return torch.full((4,), number % 8)


def rows():
    return Rows()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of runs, with a plan for two processes and a model that waits for its data."""
    found = tmp_path_factory.mktemp("sockets")
    (found / "waiting.py").write_text(SLOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        patch.syspath_prepend(str(found))
        save_plan(plan_for("waiting:make", None), found / "plan.json")
    return found


Look = Callable[[set[Listening]], bool]


def listens_on_loopback(folder: Path, *words: str, until: Look = lambda _: False) -> None:
    """Assert that processes of `plan WORDS` listen on loopback and nowhere else, and leave no temporary folder: looked
    at again and again until the run has ended, or `until` says that it may be ended."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    mark = str(folder / words[0])
    own = {"PYTHONPATH": str(ROOT), "MARK": mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    found: set[Listening] = set()
    with tempfile.TemporaryFile("w+") as said:
        run = subprocess.Popen([*PLAN, *words], cwd=folder, env={**os.environ, **own}, stdout=said, stderr=said)
        try:
            ends = time.monotonic() + DEADLINE
            while run.poll() is None and time.monotonic() < ends:
                found |= listening(marked(mark))
                if until(found):
                    run.terminate()
                    break
                time.sleep(0.1)
            code = run.wait(60)
        finally:
            run.kill()
            run.wait()
        said.seek(0)
        assert [one for one in found if not one.on_loopback] == []
        assert len(found) > 1, "each rank has a socket"
        assert code in (0, 143), said.read()
    assert list(temporary.iterdir()) == []


class Planted:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def plant(port: int, folder: Path) -> bool:
    """Write a pickle to the store behind a port, where an agent of torchrun keeps its state; whether there is one.
    Spoken is the protocol of TCPStore, as its own client waits for minutes where nobody answers."""
    key, value = b"/torch.rendezvous.none", base64.b64encode(pickle.dumps(Planted(folder)))
    hello = struct.pack("=BI", VALIDATE, MAGIC)
    write = struct.pack("=BQ", SET, len(key)) + key + struct.pack("=Q", len(value)) + value
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), ANSWERS) as store:
        store.sendall(hello + write + struct.pack("=BI", PING, 4711))
        return store.recv(4) == struct.pack("=I", 4711)
    return False


def test_a_store_of_pytorch_takes_what_is_planted(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert plant(store.port, tmp_path)
    assert store.check(["torch.rendezvous.none"])


@pytest.mark.exhaustive
def test_a_run_listens_on_loopback_and_unpickles_nothing(folder: Path, tmp_path: Path) -> None:
    """While the ranks wait for data a pickle is written to every port that takes it."""
    mark, tried, planted = tmp_path / "unpickled", set(), []

    def attacked(found: set[Listening]) -> bool:
        tcp = {one.port for one in found if one.kind.startswith("tcp")}
        for port in tcp - tried:
            tried.add(port)
            planted.append(plant(port, mark))
        if len(tried) < 2 and not any(planted):  # each rank has its own
            return False
        ends = time.monotonic() + UNPICKLED * any(planted)
        while time.monotonic() < ends and not mark.exists():
            time.sleep(0.1)
        assert not mark.exists(), "code from the network ran"
        assert not any(planted), "a store takes what anybody writes"
        return True

    words = (
        "run",
        "plan.json",
        "--model",
        "waiting:make",
        "--steps",
        "1000",
        "--dataset",
        "waiting:rows",
        "--no-check",
    )
    listens_on_loopback(folder, *words, until=attacked)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("--restarts", "1", "--save", "restarted"), ("--elastic", "1:2", "--state-replicas", "--save", "elastic")],
    ids=["restarts", "elastic"],
)
def test_a_run_that_goes_on_listens_on_loopback(folder: Path, options: tuple[str, ...]) -> None:
    listens_on_loopback(folder, "run", "plan.json", "--model", "waiting:make", "--steps", "2", "--no-check", *options)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_parameter_servers_of_a_run_listen_on_loopback(folder: Path) -> None:
    words = ("--model", "dlrm-tiny", "--devices", "2", "--hardware", "cpu", "--global-batch", "8", "-q")
    served = ("--place", "tables.*=servers", "-o", "served.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert CliRunner().invoke(app, [*words, *served]).exit_code == 0
    listens_on_loopback(folder, "run", "served.json", "--steps", "1", "--no-check")


@pytest.mark.exhaustive
def test_calibration_listens_on_loopback(folder: Path) -> None:
    words = ("calibrate", "--nproc", "2", "--quick", "-o", "measured.toml")
    listens_on_loopback(folder, *words, until=lambda found: len(found) > 1)
