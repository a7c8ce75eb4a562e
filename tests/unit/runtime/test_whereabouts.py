"""Where a rank is, read from its frames: what is read is there, and a thread answers for a main thread that waits."""

import importlib
import inspect
import json
import threading
import time
from pathlib import Path
from types import CodeType

import pytest

from runtime.processes.hang import ASKED, Folder, HangWatch, answer_of
from runtime.processes.wait_diagnosis import ROWS, wait_diagnosis


@pytest.mark.parametrize(("module", "name"), list(ROWS), ids=[" ".join(row) for row in ROWS])
def test_what_is_read_of_a_function_is_there(module: str, name: str) -> None:
    """A function or a variable that gets another name would be read no more, and nobody would notice."""
    found: object = importlib.import_module(module)
    for word in name.replace(".<locals>", "").split("."):
        if hasattr(found, word):
            found = getattr(found, word)
        else:
            inside = getattr(found, "__code__").co_consts  # noqa: B009
            found = next(code for code in inside if isinstance(code, CodeType) and code.co_name == word)
    code = found if isinstance(found, CodeType) else getattr(inspect.unwrap(found), "__code__")  # type: ignore[arg-type]  # noqa: B009
    assert code.co_qualname == name
    assert set(ROWS[module, name].reads) <= {*code.co_varnames, *code.co_cellvars, *code.co_freevars}


def test_a_place_that_is_no_collective_is_told_by_its_line() -> None:
    found = wait_diagnosis()
    assert not found.waits
    assert found.text.startswith("is in wait_diagnosis (at "), found.text


def test_a_rank_answers_when_it_is_asked_and_not_before(tmp_path: Path) -> None:
    """The main thread is this one, which waits for the answer as it would in a collective."""
    said, answered = [], threading.Event()

    def write(kind: str, text: str) -> None:
        said.append((kind, json.loads(text)))
        answered.set()

    watch = HangWatch()
    watch.tick = 0.01
    watch.board = Folder(tmp_path, write)
    watch.start()
    time.sleep(0.1)
    assert said == []
    (tmp_path / ASKED).touch()
    assert answered.wait(60)
    watch.stop()
    ((kind, content),) = said
    assert kind == "where"
    assert "threading.py" not in answer_of(json.dumps(content)).text, "the line is the user's"
    assert content["text"].startswith("is in test_a_rank_answers_when_it_is_asked_and_not_before (at ")


def test_a_rank_without_a_board_ends_with_its_own_place() -> None:
    """It has not joined the others yet."""
    said: list[str | None] = []
    ended = threading.Event()

    def end(report: str | None) -> None:
        said.append(report)
        ended.set()

    watch = HangWatch(timeout=0.05, end=end)
    watch.progress("building the model")
    watch.start()
    assert ended.wait(60)
    watch.stop()
    assert len(said) == 1
    assert str(said[0]).startswith("no progress in 0.05 s (--timeout) at building the model: rank 0 is in test_a_rank")
