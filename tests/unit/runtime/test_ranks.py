"""Ranks of this machine: no more are started than there is memory for."""

import subprocess

import pytest

from hardware_profiles import GIB
from planner.errors import RequestError
from runtime.processes import ranks


def test_no_process_is_started_where_all_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(ranks, "available_bytes", lambda: 2.0 * GIB)
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **_: started.append(words))
    with pytest.raises(RequestError, match=r"100 processes need 13\.7 GiB .* 2\.0 GiB are free; start fewer"):
        ranks.run_ranks("runtime", [], 100)
    assert not started
