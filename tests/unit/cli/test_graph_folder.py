"""Folders of caches where the home folder is not known, as in a container whose user is in no list of users."""

from pathlib import Path

import pytest

from planner.cli.graph_folder import VARIABLE, cache_folder, folder_of
from planner.errors import RequestError
from tests.refusals import refused


@pytest.fixture(autouse=True)
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanded(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", expanded)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)


def test_graphs_are_not_kept_without_a_home_folder() -> None:
    assert cache_folder(None) is None


def test_a_folder_in_it_is_refused(tmp_path: Path) -> None:
    with refused(RequestError, "--graph-cache", "~/graphs", "whole path"):
        folder_of("--graph-cache", "~/graphs")
    assert cache_folder(str(tmp_path)) == tmp_path
