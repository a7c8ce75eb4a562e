"""The command line in this process."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from tests.traced_once import users_traced_once
from tests.unit.cli.searched_once import searched_once


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


class CommandLine:
    """Runs the command `plan`."""

    def __call__(self, *arguments: str) -> Outcome:
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(code=result.exit_code, out=result.stdout, err=result.stderr)

    def json(self, *arguments: str) -> dict[str, Any]:
        """The object that a good command prints."""
        outcome = self(*arguments, "--json")
        assert (outcome.code, outcome.err) == (0, ""), outcome
        content = json.loads(outcome.out)
        assert isinstance(content, dict)
        return content

    def refused(self, *arguments: str, code: int = 2) -> str:
        """The one line on stderr of a command that must fail."""
        outcome = self(*arguments)
        assert (outcome.code, outcome.out) == (code, ""), outcome
        assert outcome.err.startswith("plan: ")
        assert outcome.err.count("\n") == 1, outcome.err
        return outcome.err


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Every model is traced once for all cases of a file."""
    with users_traced_once():
        yield


@pytest.fixture(name="searched_once")
def _searched_once() -> Iterator[None]:
    """The same search is made once for all tests that ask for this."""
    with searched_once():
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan(here: Path) -> Callable[..., Outcome]:
    """The command line in an empty folder."""
    return CommandLine()
