"""Ranks of this machine: how many are started, what is read from them, and when they are over."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from hardware_profiles import GIB
from planner.errors import RequestError, RunError
from runtime.processes import ranks
from tests.refusals import refused

MODULE = """
import argparse
import errno
import pathlib
import subprocess
import sys

from runtime.processes.rank import be_a_rank

parser = argparse.ArgumentParser()
parser.add_argument("case")
parser.add_argument("--notes")
given = parser.parse_args()


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def work(at, joined):
    at("the first step")
    if given.case == "detached":
        left = subprocess.Popen(["sleep", "60"], start_new_session=True)
        print("left", left.pid, "behind \\u00e9\\r\\nand no end of a line", end="")
    else:
        write, pathlib.Path.write_text = pathlib.Path.write_text, full
        at("a step on a full disk")
        if given.case == "emptied":
            pathlib.Path.write_text = write
    return 0


sys.exit(be_a_rank(work, given.notes))
"""


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that is a rank."""
    (tmp_path / "small_rank.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return "small_rank"


def test_no_process_is_started_where_all_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(ranks, "available_bytes", lambda: 2.0 * GIB)
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **_: started.append(words))
    with pytest.raises(RequestError, match=r"100 processes need 13\.7 GiB .* 2\.0 GiB are free; start fewer"):
        ranks.run_ranks("runtime", [], 100)
    assert not started


def test_a_run_ends_without_a_process_that_a_rank_has_detached(rank: str) -> None:
    """A run waited until nobody held the pipe of its output any more: for as long as such a process lived."""
    lines: list[str] = []
    assert ranks.run_ranks(rank, ["detached"], 1, lines.append) == 0
    first, second = lines
    assert second == "and no end of a line"
    left = int(first.removeprefix("left ").removesuffix(" behind é"))
    os.kill(left, signal.SIGKILL)  # it lives: nobody has waited for it


def test_a_full_disk_ends_a_rank_only_where_its_end_cannot_be_noted(rank: str) -> None:
    assert ranks.run_ranks(rank, ["emptied"], 1, print) == 0
    with refused(RunError, "rank 0", "No space left on device"):
        ranks.run_ranks(rank, ["full"], 1, print)
