"""Errors on the command line: one line on stderr and an exit code; no traceback for errors that a user can fix."""

import contextlib
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from costmodels import CostModelError
from hardware_profiles import HardwareProfileError
from hardware_profiles.foreign import printable
from planner.api.callers import from_command
from planner.cli.texts import say
from planner.errors import InfeasibleError, LimitError, PlannerError, RunError

OUTPUT_SCHEMA_VERSION = 3  # of everything that --json prints, results and errors
FAULT = 70
"""Exit code of a fault of the planner itself (EX_SOFTWARE of sysexits.h)."""

_KINDS = {"limit reached": LimitError, "infeasible": InfeasibleError, "run broke down": RunError}


@contextlib.contextmanager
def reporting(as_json: bool = False) -> Iterator[None]:
    """Turn expected errors into a message and an exit code; with `as_json` also into an object on stdout."""
    try:
        with from_command():
            yield
    except (PlannerError, HardwareProfileError, CostModelError) as error:
        code = error.exit_code if isinstance(error, PlannerError) else PlannerError.exit_code
        kind = next((kind for kind, errors in _KINDS.items() if isinstance(error, errors)), "bad input")
        details = _details(error) if isinstance(error, InfeasibleError) else {}
        _say(kind, printable(str(error)), as_json, details)
        raise typer.Exit(code) from error
    except KeyboardInterrupt as error:
        _say("interrupted", str(error) or "interrupted", as_json)
        raise typer.Exit(130) from error


def _details(error: InfeasibleError) -> dict[str, Any]:
    """Numbers for programs about a request that does not fit."""
    return {
        "missing_bytes": error.missing,
        "needed_bytes": error.needed,
        "changes": [dict(one) for one in error.advice],
    }


def _say(kind: str, message: str, as_json: bool, details: Mapping[str, Any] | None = None) -> None:
    if as_json:
        error = {"kind": kind, "message": message, **(details or {})}
        content = {"schema_version": OUTPUT_SCHEMA_VERSION, "error": error}
        from planner.cli.schemas import answer_text

        sys.stdout.write(answer_text("error", content, indent=None) + "\n")  # one line, like each object of `plan run`
    say(f"plan: {message}", err=True)


def fault_text(error: Exception) -> str:
    """The message for an unexpected error; its traceback is written to a file."""
    with tempfile.NamedTemporaryFile("w", prefix="plan-fault-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(f"{' '.join(sys.argv)}\n")
        traceback.print_exception(error, file=file)
    said = printable(f"{type(error).__name__}: {error}")
    return f"a fault of the planner itself, not of yours: {said}; please report it together with {file.name}"
