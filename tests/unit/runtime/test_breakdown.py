"""What went wrong, in one line: from the notes of the ranks and how they ended."""

import json
import os
from pathlib import Path

import pytest

from runtime.processes.breakdown import failure_of, report, standstill
from runtime.processes.rank import in_one_line
from runtime.processes.wait_diagnosis import WaitDiagnosis


def note(folder: Path, rank: int, code: int, message: str, age: int) -> None:
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps({"code": code, "message": message}))
    os.utime(path, ns=(10**18 - age, 10**18 - age))


def failure(folder: Path, noise: str = "", **ended: int):
    """Of ranks that nobody ended, and how they did, the first one first."""
    return failure_of(folder, ended={int(rank.removeprefix("rank")): code for rank, code in ended.items()}, noise=noise)


def test_the_first_failure_is_told(tmp_path: Path) -> None:
    note(tmp_path, 0, 1, "connection closed by peer", age=1)
    note(tmp_path, 1, 1, "the cause", age=2)
    assert failure(tmp_path, rank0=1, rank1=1) == (1, "the cause")


def test_an_error_on_purpose_goes_first(tmp_path: Path) -> None:
    note(tmp_path, 0, 3, "nothing fits", age=1)
    note(tmp_path, 1, 1, "connection closed by peer", age=2)
    assert failure(tmp_path, rank2=-9, rank1=1) == (3, "nothing fits")


def test_a_signal_is_the_cause(tmp_path: Path) -> None:
    note(tmp_path, 0, 1, "connection closed by peer", age=1)
    code, message = failure(tmp_path, rank0=1, rank1=-9)
    assert (code, message.partition(";")[0]) == (1, "rank 1 was killed by SIGKILL")
    assert failure(tmp_path, rank2=-15, rank1=-9) == (1, "rank 2 was killed by SIGTERM"), "the first of two"
    assert failure(tmp_path, rank0=1) == (1, "connection closed by peer"), "what the watch ended is no cause"


def test_a_rank_that_left_without_a_word_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank0.done").touch()
    assert failure(tmp_path, rank0=0, rank1=0)[1].startswith("rank 1 exited before its work was done")
    assert failure(tmp_path, noise="one\ntwo", rank1=3) == (3, "one\ntwo")


TORCH = "/site-packages/torch"
HEAD = "Thread 0x1 (most recent call first):\n"


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (
            f'{HEAD}  File "{TORCH}/nn/functional.py", line 9 in linear\n  File "/home/me/net.py", line 3 in forward\n',
            "rank 1 is in forward (at /home/me/net.py:3); rank 0 waits for others",
        ),
        (
            f'{HEAD}  File "{TORCH}/utils/data/dataloader.py", line 9 in _try\n'
            '  File "/x/loading.py", line 3 in _local\n',
            "rank 1 waits for the workers of its data loader in _local (at /x/loading.py:3); rank 0 waits for others",
        ),
        (
            f'{HEAD}  File "{TORCH}/distributed/c10d.py", line 9 in all_reduce\n',
            "all ranks wait for each other; ranks 0, 1 wait for others",
        ),
    ],
    ids=["user", "loader", "collective"],
)
def test_those_that_wait_are_victims(trace: str, words: str) -> None:
    waiting = f'{HEAD}  File "{TORCH}/distributed/c10d.py", line 9 in recv\n  File "/x/pipeline.py", line 3 in run\n'
    assert standstill({0: (waiting, os.getpid()), 1: (trace, os.getpid())}, {}) == words
    said = WaitDiagnosis(waits=True, text="waits for all_reduce among ranks 0, 1: 'x'")
    asked = standstill({0: (waiting, os.getpid()), 1: (trace, os.getpid())}, {0: said})
    assert "rank 0 waits for all_reduce among ranks 0, 1: 'x'" in asked
    assert asked.partition(";")[0] == words.partition(";")[0], "whoever waits for nobody is named all the same"


def test_a_rank_without_an_answer() -> None:
    assert standstill({0: ("", os.getpid())}, {}) == "rank 0 does not answer"


def test_ranks_at_one_place_are_named_together() -> None:
    waits, silent = WaitDiagnosis(waits=True, text="waits for x"), WaitDiagnosis(waits=False, text="does not answer")
    assert report({3: waits, 0: waits, 1: silent, 2: silent}) == "ranks 1, 2 do not answer; ranks 0, 3 wait for x"


def test_an_error_says_where_in_the_code_of_its_user() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(4, 5))
    assert in_one_line(caught.value).endswith(f"(at {__file__}:{caught.tb.tb_lineno})")
    sent = RuntimeError(
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/torch/fetch.py", line 5, in fetch\n'
        '  File "/home/me/rows.py", line 7, in __getitem__\nValueError: no\n'
    )
    assert in_one_line(sent) == (
        'Caught ValueError in DataLoader worker process 0: ValueError: no (File "/home/me/rows.py", line 7)'
    )
