"""Rules on disk: data that is never believed. Whatever is wrong with a file costs a search and changes no rule."""

import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.graph.call import Call
from planner.graph.operator_graph import TensorType, WrittenRule
from planner.sharding.discover import cache
from planner.sharding.discover.cache import LARGEST, cached
from planner.sharding.discover.find import rule_by_trial

X = TensorType(shape=(4, 6), dtype="float32")
CALL = Call(op="aten.flip.default", arguments=(X, (1,)), keywords=(), results=(X,))
OTHER = Call(op="aten.flip.default", arguments=(X, (0,)), keywords=(), results=(X,))
RULE = WrittenRule(text="d0 x0d1 -> d0 y0d1", blocked=("x0d1", "y0d1"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that has the rule."""
    assert cached(CALL, tmp_path / "rules", pytest.fail) == RULE
    return tmp_path / "rules"


def entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def notes_of(folder: Path, call: Call = CALL) -> list[str]:
    """What is said when the rule is asked for; it is the right one in any case, and the file is good afterwards."""
    notes: list[str] = []
    assert cached(call, folder, notes.append) == rule_by_trial(call)
    assert cached(call, folder, pytest.fail) == rule_by_trial(call)
    return notes


def test_what_is_found_is_kept_and_not_searched_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "rule_by_trial", lambda call: pytest.fail("searched again"))
    assert cached(CALL, folder, pytest.fail) == RULE
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_another_call_has_a_file_of_its_own(folder: Path) -> None:
    assert notes_of(folder, OTHER) == []
    assert len(list(folder.iterdir())) == 2


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        file = json.loads(content)
        change(file)
        return json.dumps(file).encode()

    return edit


class Planted:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda content: content[: len(content) // 2], "EOF"),
        (lambda content: b"", "EOF"),
        (lambda content: b"\xff\xfe" + content, "utf-8"),
        (lambda content: b"[" * 100_000, "recursion"),
        (lambda content: pickle.dumps(Planted()), "Invalid JSON|utf-8"),
        (lambda content: content + b" " * LARGEST, "larger than"),
        (edited(lambda file: file.update(schema_version=2)), "schema_version"),
        (edited(lambda file: file.update(code="import os")), "code"),
        (edited(lambda file: file["rule"].update(local_form="reshape")), "local_form"),
        (edited(lambda file: file.update(call="aten.flip.default(float32[4,6], [0]) -> float32[4,6]")), "another call"),
        (edited(lambda file: file.update(torch="1.0")), "another torch"),
        (edited(lambda file: file["rule"].update(text="d0 d1 -> d0 d1", blocked=[])), "split in 2"),
        (edited(lambda file: file["rule"].update(text="r0 d0 -> y0d0 d0", blocked=["y0d0"])), "split in 2"),
        (edited(lambda file: file["rule"].update(text="d0 -> d0", blocked=[])), "expects 1 dims"),
        (edited(lambda file: file["rule"].update(text="d0 (d1 4) -> d0 (d1 4)")), "pieces of 4"),
        (edited(lambda file: file["rule"].update(text="d0, d1")), "not one '->'"),
        (edited(lambda file: file["rule"].update(saves=[[7, [0]]])), "the call has 1"),
        (edited(lambda file: file["rule"].update(saved_extra=[[-1.0, "d0"]])), "saved_extra"),
        (edited(lambda file: file["rule"].update(mean=["d9"])), "'d9' is no factor"),
        (edited(lambda file: file["rule"].update(saved_extra=[[1e9, "d0"]])), "keeps other tensors"),
        (edited(lambda file: file["rule"].update(saves=[[0, [0]]])), "keeps other tensors"),
    ],
)
def test_a_file_that_is_wrong_changes_nothing(
    folder: Path, edit: Callable[[bytes], bytes], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    path = entry(folder)
    path.write_bytes(edit(path.read_bytes()))
    (note,) = notes_of(folder)
    assert note.startswith(f"{path}: this rule is not used, it is searched anew: ")
    assert any(part in note for part in word.split("|")), note
    assert not (folder.parent / "unpickled").exists()


def test_a_rule_that_splits_less_is_right_and_stays(folder: Path) -> None:
    """Somebody who writes to the folder can make plans slower, not wrong."""
    path = entry(folder)
    edit = edited(
        lambda file: file["rule"].update(text="x0d0 x0d1 -> y0d0 y0d1", blocked=["x0d0", "x0d1", "y0d0", "y0d1"])
    )
    path.write_bytes(edit(path.read_bytes()))
    assert cached(CALL, folder, pytest.fail).text == "x0d0 x0d1 -> y0d0 y0d1"


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    path, elsewhere = entry(folder), tmp_path / "elsewhere.json"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    (note,) = notes_of(folder)
    assert "symbolic links" in note
    assert elsewhere.read_bytes() == before
    assert not path.is_symlink()


def test_what_is_no_file_is_not_waited_for(folder: Path) -> None:
    path = entry(folder)
    path.unlink()
    os.mkfifo(path)
    (note,) = notes_of(folder)
    assert "no plain file" in note


def test_a_folder_that_cannot_be_written_to_is_only_reported(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("a file where the folder should be")
    notes: list[str] = []
    assert cached(CALL, tmp_path / "rules", notes.append) == RULE
    assert "the rule cannot be kept" in notes[-1]


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    found: list[WrittenRule] = []
    threads = [threading.Thread(target=lambda: found.append(cached(CALL, tmp_path, pytest.fail))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [RULE] * 6
    assert len(list(tmp_path.iterdir())) == 1
    assert cached(CALL, tmp_path, pytest.fail) == RULE


def test_another_source_of_an_operator_of_the_users_is_another_entry(tmp_path: Path) -> None:
    def defined(body: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        torch.library.custom_op("tests::changing", body, mutates_args=())
        return Call(op="tests.changing.default", arguments=(X,), keywords=(), results=(X,))

    def first(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def second(x: torch.Tensor) -> torch.Tensor:
        return x.flip(1)

    assert cached(defined(first), tmp_path, pytest.fail).text == "d0 d1 -> d0 d1"
    assert cached(defined(second), tmp_path, pytest.fail).text == "d0 x0d1 -> d0 y0d1"
    assert len(list(tmp_path.iterdir())) == 2
