"""A whole number on the command line has ASCII digits alone: Python would read 1_0 as ten."""

import pytest
from typer.testing import CliRunner

from planner.cli.main import app


@pytest.mark.parametrize("arguments", [
    ["--model", "gpt-tiny", "--devices", "16", "--tensor", "1_0"],
    ["search", "--model", "gpt-tiny", "--tensor=1_0"],
    ["--model", "gpt-tiny", "--tensor", "\uff11\uff10"],
    ["prove", "plan.json", "--tensor", "1_0", "--processes", "1_0"],
    ["validate", "--limit", "1_0"],
])  # fmt: skip
def test_other_digits_are_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    if "--tensor" in arguments and "prove" in arguments:
        assert "no option '--tensor'" in done.output
    else:
        option, _, value = arguments[-1].rpartition("=") if "=" in arguments[-1] else (arguments[-2], "", arguments[-1])
        assert f"{option} {value}: give a whole number of 1 or more" in done.output


def test_numbers_with_units_and_signs_are_read() -> None:
    done = CliRunner().invoke(app, ["--model", "gpt-tiny", "--devices", "1k", "--tensor", "+3", "--data", "x"])
    assert "--data x: give a whole number" in done.output
