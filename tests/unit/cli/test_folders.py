"""A folder that was exported is replaced where it holds what was written, unchanged, and nothing else."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.api.folders import write_folder
from planner.errors import RequestError

FILES = {"launch.sh": "echo é\n", "train.toml": "a = 1\n"}
CONTENT = {"schema_version": 3, "engine": "torchtitan", "about": "x", "model": "llama8b", "step_seconds": 0.1 + 0.2}
RECORD = "export.json"


def exported(folder: Path, **files: str) -> None:
    write_folder(folder, {**FILES, **files}, RECORD, CONTENT)


def held(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): "" if path.is_dir() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if not path.is_fifo()
    }


def test_an_export_takes_the_place_of_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    exported(folder, **{"README.md": "x"})
    exported(folder, **{"train.toml": "a = 2\n"})
    assert held(folder).keys() == {"launch.sh", "train.toml", RECORD}
    assert held(folder)["train.toml"] == "a = 2\n"
    assert os.access(folder / "launch.sh", os.X_OK)
    (folder / "train.toml").unlink()
    exported(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def _changed_record(folder: Path) -> None:
    content = json.loads((folder / RECORD).read_text())
    content["files"]["thesis.tex"] = "0" * 64
    (folder / RECORD).write_text(json.dumps(content))
    (folder / "thesis.tex").write_text("mine")


def _of_another(folder: Path) -> None:
    (folder / RECORD).write_text('{"of": "another tool"}')


def _linked(folder: Path) -> None:
    other = folder.parent / "other.toml"
    other.write_text(FILES["train.toml"])
    (folder / "train.toml").unlink()
    (folder / "train.toml").symlink_to(other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda at: (at / "thesis.tex").write_text("mine"), "holds 'thesis.tex', which plan export did not write"),
        (lambda at: (at / "checkpoints" / "step-1").mkdir(parents=True), "holds 'checkpoints', which plan export did"),
        (lambda at: (at / ".git").mkdir(), "holds '.git', which plan export did not write"),
        (lambda at: (at / "launch.sh").write_text("echo mine"), "holds 'launch.sh', which is not as plan export wrote"),
        (lambda at: (at / RECORD).unlink(), "holds 'launch.sh', which plan export did not write"),
        (_of_another, "holds 'export.json', which is not as plan export writes it"),
        (lambda at: (at / RECORD).write_text("[" * 10_000), "holds 'export.json', which is not as plan export writes"),
        (_changed_record, "holds 'export.json', which is not as plan export writes it"),
        (_linked, "holds 'train.toml', which is not as plan export wrote it"),
        (
            lambda at: (at / "train.toml").unlink() or os.mkfifo(at / "train.toml"),
            "holds 'train.toml', which is not as",
        ),
    ],
)
def test_what_is_not_ours_stays(change: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    exported(folder)
    change(folder)
    before = held(folder)
    with pytest.raises(RequestError) as caught:
        exported(folder)
    assert words in str(caught.value), str(caught.value)
    assert str(caught.value).endswith("name another folder, or remove it")
    assert held(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "other.toml") == ["run"]


@pytest.mark.parametrize(("more", "replaced"), [(None, True), ("thesis.tex", False)])
def test_an_export_of_an_earlier_version_is_replaced_if_it_has_known_names_only(
    more: str | None, replaced: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    exported(folder)
    (folder / RECORD).write_text(json.dumps(CONTENT))
    if more is None:
        exported(folder)
        assert "checksum" in (folder / RECORD).read_text()
        return
    (folder / more).write_text("mine")
    with pytest.raises(RequestError, match=r"holds 'thesis\.tex'"):
        exported(folder)
    assert (folder / more).read_text() == "mine"


def test_a_link_is_no_folder(tmp_path: Path) -> None:
    exported(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for name in ("link", "run/launch.sh"):
        with pytest.raises(RequestError, match="is no folder but a file or a link"):
            exported(tmp_path / name)
    assert (tmp_path / "run" / "launch.sh").is_file()


def test_the_old_folder_comes_back_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, replace, calls = tmp_path / "run", os.replace, [0]
    exported(folder)
    before = held(folder)

    def failing(source: Path, target: Path) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(RequestError, match="cannot be written: No space left on device"):
        exported(folder, **{"train.toml": "a = 2\n"})
    assert held(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_comes_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, replace = tmp_path / "run", os.replace
    exported(folder)

    def late(source: Path, target: Path) -> None:
        if Path(source) == folder:
            (folder / "thesis.tex").write_text("mine")
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    exported(folder)
    assert [path.read_text() for path in tmp_path.rglob("thesis.tex")] == ["mine"]
