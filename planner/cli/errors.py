"""Errors on the command line: one line on stderr, an exit code, and never a traceback for what a user can mend."""

import contextlib
import json
import sys
from collections.abc import Iterator

import typer

from costmodels import CostModelError
from hardware_profiles import HardwareProfileError
from planner.errors import InfeasibleError, PlannerError, RunError

OUTPUT_SCHEMA_VERSION = 2  # of everything that --json prints, results and errors


_KINDS = {"infeasible": InfeasibleError, "run broke down": RunError}


@contextlib.contextmanager
def reporting(as_json: bool = False) -> Iterator[None]:
    """Turn expected errors into a message and an exit code; with `as_json` also into an object on stdout."""
    try:
        yield
    except (PlannerError, HardwareProfileError, CostModelError) as error:
        code = error.exit_code if isinstance(error, PlannerError) else PlannerError.exit_code
        kind = next((kind for kind, errors in _KINDS.items() if isinstance(error, errors)), "bad input")
        _say(kind, _one_line(str(error)), as_json)
        raise typer.Exit(code) from error
    except KeyboardInterrupt as error:
        _say("interrupted", str(error) or "interrupted", as_json)
        raise typer.Exit(130) from error


def _say(kind: str, message: str, as_json: bool) -> None:
    if as_json:
        content = {"schema_version": OUTPUT_SCHEMA_VERSION, "error": {"kind": kind, "message": message}}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    typer.echo(f"plan: {message}", err=True)


def _one_line(text: str) -> str:
    """Text that quotes what a user gave, with line breaks and control characters spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
