"""Runs that break down: one line that says why, an exit code, and no process left within 15 seconds.

The deadlines are those that users are promised, not a measurement.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from planner.plan.file import load_plan, save_plan
from tests.distributed.listening import marked
from tests.distributed.ports import free_port
from tests.distributed.test_launch import plan_for
from tests.long_lists import first, rarely

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 45  # seconds without progress: starting two runs takes 20 where other tests run beside them
GONE = 15.0
"""Seconds after which nothing may be left."""

MODULE = """
import os
import signal
import sys
import time

import torch
from torch.utils.data import Dataset, IterableDataset

RANK = os.environ.get("RANK", "none")
CASE = os.environ.get("CASE", "")


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(8, 4)

    def forward(self, tokens):
        return self.rows(tokens).pow(2).mean()


def make():
    if CASE == "construction" and RANK == "1":
        raise OSError("the disk of rank 1 is broken")
    if CASE == "exit" and RANK == "1":
        sys.exit(0)
    if CASE == "larger":
        Tokens.__init__.__globals__["torch"].nn.Embedding = _larger(torch.nn.Embedding)
    if CASE == "backward" and RANK == "1":
        import runtime.parameters.shards
        runtime.parameters.shards.LocalParameter.accumulate = _broken
    return Tokens(), (torch.zeros(2, 4, dtype=torch.int64),)


def _larger(plain):
    return lambda rows, width: plain(rows + 1, width)


def _broken(self, leaf):
    raise ArithmeticError("a gradient is broken")


class Rows(Dataset):
    def __len__(self):
        return 3 if CASE == "short" else 4000

    def __getitem__(self, number):
        if CASE == "forward" and RANK == "1":
            return torch.full((4,), 99)
        if CASE == "worker" and RANK == "1" and number > 8:
            raise ValueError("sample 9 is broken")
        if CASE == "loop" and RANK == "1" and number > 8:
            while True:
                time.sleep(0.01)
        if CASE == "slow":
            time.sleep(0.01)
        return torch.full((4,), number % 8)


def rows():
    return Rows()


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.full((4,), 1) for _ in range(3))


def stream():
    return Stream()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model, datasets and a plan for two ranks. What a test that failed has left is ended."""
    found = tmp_path_factory.mktemp("breakdown")
    (found / "breaking.py").write_text(MODULE)
    before = Path.cwd()
    os.chdir(found)
    try:
        save_plan(plan_for("breaking:make", None), found / "plan.json")
    finally:
        os.chdir(before)
        sys.path.remove(str(found))
    yield found
    for process in marked(f"{found}/"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


NAMED = ("--model", "breaking:make")


def start(folder: Path, case: str, *options: str, plan: str = "plan.json") -> "subprocess.Popen[str]":
    model = () if plan != "plan.json" else NAMED
    command = [sys.executable, "-m", "planner.cli.main", "run", plan, "--no-check", *model, *options]
    temporary = temporary_of(folder, case)
    temporary.mkdir()
    environment = {**os.environ, "CASE": case, "PYTHONPATH": str(ROOT), "MARK": str(folder / case)}
    environment["TMPDIR"] = str(temporary)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
    try:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def temporary_of(folder: Path, case: str) -> Path:
    """The folder of temporary files of a run, which is empty when the run is over."""
    return folder / f"temporary-{case}"


def first_step(run: "subprocess.Popen[str]") -> None:
    """Wait until a run has made a step."""
    assert run.stdout is not None
    assert run.stdout.readline().startswith("step")


def left(folder: Path, case: str) -> list[int]:
    """Processes that this run has started and that are still there."""
    return [process for process, mark in marked(str(folder / case)).items() if mark == str(folder / case)]


def left_at_last(folder: Path, case: str) -> list[int]:
    """Those that are still there when nothing may be left; a process that was killed takes a moment to go."""
    deadline = time.monotonic() + GONE
    while (found := left(folder, case)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def ended(
    run: "subprocess.Popen[str]", folder: Path, case: str, within: float = 90.0, *, hung: bool = False
) -> tuple[int, str]:
    """Exit code and stderr of a run, of which nothing is left, but for what Python's multiprocessing had made for a
    rank that `hung` and was killed."""
    _, err = run.communicate(timeout=within)
    assert left_at_last(folder, case) == []
    there = [path.name for path in temporary_of(folder, case).iterdir()]
    assert [name for name in there if not (hung and name.startswith("pymp-"))] == []
    return run.returncode, err


def ranks(folder: Path, case: str) -> dict[str, int]:
    """The processes of the ranks, which lead their sessions."""
    found = {}
    for process in left(folder, case):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            words = [word.decode()[5:] for word in environment if word.startswith(b"RANK=")]
            if words and os.getpgid(process) == process:
                found[words[0]] = process
    return found


FAILURES = {
    "construction": ([], 2, "the factory breaking:make raised OSError: the disk of rank 1 is broken"),
    "forward": (
        ["--dataset", "breaking:rows", "--own-samples"],
        1,
        "rank 1: RuntimeError: indices of rows/embedding: an index is not in 0 to 7 (at",
    ),
    "backward": ([], 1, "rank 1: ArithmeticError: a gradient is broken (at"),
    "worker": (
        ["--dataset", "breaking:rows", "--workers", "1", "--own-samples"],
        1,
        "rank 1: Caught ValueError in DataLoader worker process 0: ValueError: sample 9 is broken",
    ),
    "exit": ([], 1, "rank 1 exited before its work was done"),
    "larger": ([], 2, "parameter 'rows.weight' is float32 9x4, the plan has float32 8x4"),
    "short": (["--dataset", "breaking:rows"], 2, "the 3 samples of Rows are less than a global batch of 4"),
    "stream": (["--dataset", "breaking:stream"], 2, "Stream gave no batch in epoch 0"),
}
REFUSED = ("larger", "short", "stream")
"""Errors of the planner in a rank, as "construction" is one."""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "case",
    first(1, ["forward", *(case for case in FAILURES if case not in ("forward", *REFUSED)), *rarely(REFUSED)]),
)
def test_a_failure_of_a_rank_is_one_line(folder: Path, case: str) -> None:
    options, code, words = FAILURES[case]
    found, err = ended(start(folder, case, *options), folder, case)
    assert (found, words in err, len(err.splitlines())) == (code, True, 1), err


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_stops_the_run_stops_its_ranks(folder: Path, number: signal.Signals) -> None:
    case = f"slow{number}"
    run = start(folder, case, "--steps", "100000")
    first_step(run)
    run.send_signal(number)
    code, _ = ended(run, folder, case, GONE)
    assert code == 128 + number


@pytest.mark.thorough
def test_ranks_end_where_nobody_is_left_who_started_them(folder: Path) -> None:
    case = "orphans"
    run = start(folder, case, "--steps", "100000")
    first_step(run)
    run.kill()
    run.wait()
    assert left_at_last(folder, case) == []
    until = time.monotonic() + 10  # whoever deletes the folder may do so at this moment
    while (there := list(temporary_of(folder, case).iterdir())) and time.monotonic() < until:
        time.sleep(0.1)
    assert there == []


@pytest.mark.exhaustive
def test_a_killed_rank_is_named_though_another_one_does_not_listen(folder: Path) -> None:
    case = "killed"
    run = start(folder, case, "--steps", "100000")
    first_step(run)
    found = ranks(folder, case)
    os.kill(found["0"], signal.SIGSTOP)
    os.kill(found["1"], signal.SIGKILL)
    code, err = ended(run, folder, case, GONE)
    assert code == 1
    assert err.startswith("plan: rank 1 was killed by SIGKILL")
    assert len(err.splitlines()) == 1


@pytest.mark.exhaustive
def test_a_rank_that_does_nothing_is_named(folder: Path) -> None:
    """In a worker of the data loader it loops, and the worker goes with its rank. The other rank says for what it
    waits, though its main thread is in a collective."""
    cases = {
        "stopped": ("does not answer, as it was stopped by a signal", ["--steps", "100000"]),
        "loop": (
            "waits for the workers of its data",
            ["--steps", "500", "--dataset", "breaking:rows", "--own-samples", "--workers", "1"],
        ),
    }
    runs = {case: start(folder, case, *options, "--timeout", str(PATIENCE)) for case, (_, options) in cases.items()}
    for case, run in runs.items():
        first_step(run)
        if case == "stopped":
            os.kill(ranks(folder, case)["1"], signal.SIGSTOP)
    for case, run in runs.items():
        code, err = ended(run, folder, case, PATIENCE + GONE, hung=True)
        assert code == 1
        assert err.startswith(f"plan: no progress in {PATIENCE} s (--timeout) at ")
        assert f"rank 1 {cases[case][0]}" in err
        waits = r"; rank 0 waits for \w+ among ranks 0, 1: .*(of micro-batch [01]|the optimizer)$"
        assert re.search(waits, err.rstrip()), err
        assert len(err.splitlines()) == 1


@pytest.mark.exhaustive
def test_ranks_of_a_launcher_ask_each_other(folder: Path) -> None:
    """Nobody sees all of them, so that one of those that can speak makes the report. Where the store is in the process
    that was stopped, as without torchrun it is in that of rank 0, the others know of themselves only."""
    with contextlib.ExitStack() as ends:
        launched = [ends.enter_context(two_ranks(folder, f"launched{victim}")) for victim in range(2)]
        for victim, found in enumerate(launched):
            assert found[0].stdout is not None
            while not found[0].stdout.readline().startswith("step"):
                assert found[0].poll() is None
            threading.Thread(target=found[0].stdout.read, daemon=True).start()
            found[victim].send_signal(signal.SIGSTOP)
        for victim, found in enumerate(launched):
            other = found[1 - victim]
            assert other.stderr is not None
            err = other.stderr.read()
            assert other.wait(60) == 1, err
            place = rf"rank {1 - victim} waits for \w+ among ranks 0, 1: .*(of micro-batch [01]|the optimizer)"
            assert re.search(r"error: no progress in 20 s \(--timeout\) at step \d+: ", err), err
            assert re.search(place, err), err
            missing = "the other ranks could not be asked" if victim == 0 else "rank 1 does not answer; "
            assert missing in err
    assert [left_at_last(folder, f"launched{victim}") for victim in range(2)] == [[], []]


@contextlib.contextmanager
def two_ranks(folder: Path, case: str) -> "Iterator[list[subprocess.Popen[str]]]":
    """The ranks of a run as a launcher starts them; what is left of them is ended."""
    environment = {**os.environ, "CASE": "", "PYTHONPATH": str(ROOT), "MARK": str(folder / case), "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    command = [
        sys.executable,
        "-m",
        "runtime",
        "plan.json",
        *NAMED,
        "--steps",
        "100000",
        "--no-check",
        "--timeout",
        "20",
    ]
    found = [
        subprocess.Popen(
            command, cwd=folder, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read: No such file"), ("{", "not valid JSON"), ('{"model": 1}', "has no schema_version")],
    ids=["missing", "truncated", "other"],
)
def test_a_bad_plan_file_is_refused_before_anything_starts(
    folder: Path, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.launch.launch import main

    path = folder / "bad.json"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture(scope="module")
def unknown(folder: Path) -> str:
    """The name of a plan of a model that nobody knows."""
    plan = load_plan(folder / "plan.json")
    save_plan(replace(plan, model=replace(plan.model, reference="llama-9")), folder / "unknown.json")
    return "unknown.json"


@pytest.mark.exhaustive
def test_a_model_that_is_not_known_is_named(folder: Path, unknown: str) -> None:
    code, err = ended(start(folder, "unknown", plan=unknown), folder, "unknown")
    assert code == 2
    assert err.startswith("plan: the plan is for the model 'llama-9', which is none of the zoo")


@pytest.mark.exhaustive
def test_another_model_can_be_named(folder: Path, unknown: str) -> None:
    code, err = ended(start(folder, "named", "--model", "breaking:make", plan=unknown), folder, "named")
    assert code == 0, err


@pytest.mark.thorough
def test_another_number_of_processes_under_torchrun(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "1",
        "-m",
        "runtime",
        "plan.json",
        *NAMED,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode != 0
    assert "error: the plan is for 2 devices, and torchrun started 1 process; start 2, or plan for 1" in done.stderr


@pytest.mark.thorough
def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        command = [sys.executable, "-m", "runtime", "plan.json", *NAMED]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 2
    assert f"port {port} of MASTER_PORT is in use" in done.stderr.splitlines()[-1]
