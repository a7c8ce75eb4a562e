"""`plan`: the command line. The main command searches a plan; the others work with plan files.

Exit codes: 0 good, 1 a check or a run failed, 2 bad input, 3 nothing fits, 4 a loss is not finite, 70 a fault of the
planner, 130 interrupted, 141 stdout closed.
"""

import errno
import io
import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from planner.cli.commands import (
    advise,
    audit,
    calibrate,
    checkpoint,
    compare,
    compare_cases,
    diff,
    estimate,
    explain,
    export,
    help_,
    import_,
    lists,
    manual,
    plan,
    prove,
    replan,
    report,
    run,
    search,
    show,
    ui,
    validate,
)
from planner.cli.errors import FAULT, fault_text
from planner.cli.errors import reporting as errors_reported
from planner.cli.helping import Command
from planner.cli.limiting import whole_process
from planner.cli.options import Options, flag, taking_options
from planner.cli.usage import Commands
from planner.errors import RequestError

app = typer.Typer(
    name="plan",
    cls=Commands,
    add_completion=True,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: Mapping[str, Callable[..., None]] = {
    "search": search.search,
    "estimate": estimate.estimate,
    "manual": manual.manual,
    "compare": compare.compare,
    "capacity": compare_cases.capacity,
    "replan": replan.replan,
    "show": show.show,
    "verify": show.verify,
    "explain": explain.explain,
    "diff": diff.diff,
    "report": report.report,
    "ui": ui.ui,
    "run": run.run,
    "audit": audit.audit,
    "prove": prove.prove,
    "advise": advise.advise,
    "export": export.export,
    "import": import_.import_,
    "calibrate": calibrate.calibrate,
    "fit": calibrate.fit,
    "validate": validate.validate,
    "models": lists.models,
    "profiles": lists.profiles,
    "stacks": lists.stacks,
    "help": help_.help_,
}
"""What each command does; `planner.cli.helping.PURPOSES` has a place for each in `plan --help`."""

for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(_command)
app.add_typer(checkpoint.checkpoints)


@app.callback(invoke_without_command=True)
@taking_options
def main_job(
    invocation: typer.Context,
    options: Options,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """What `plan --model ...` without a command does: the same as `plan search`. Its help is
    `planner.cli.helping.screen`."""
    command = invocation.invoked_subcommand
    if command is not None:
        with errors_reported(options.as_json):
            _nothing_before(command, options)
        return
    if version:
        plan.print_version()
        return
    if not options.given():
        typer.echo(invocation.get_help())
        raise typer.Exit(2)
    search.search_model(options)


def _nothing_before(command: str, options: Options) -> None:
    """Raise if options stand before the command, where they would be lost."""
    if given := [flag(name) for name in options.given()]:
        raise RequestError(f"{', '.join(given)}: put options after the command, as in plan {command} {given[0]} ...")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that takes no more."""


def main() -> None:
    """Entry point of the `plan` script. An unexpected error is a fault of ours: it prints one line and writes a file
    for the report. A full disk under stdout is none. Characters that stdout does not have (µ in ASCII) are escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with whole_process():
            app(prog_name="plan")
    except KeyboardInterrupt:
        typer.echo("plan: interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            typer.echo(f"plan: {error.filename or 'stdout'}: cannot be written: {error.strerror}", err=True)
            sys.exit(1)
        typer.echo(f"plan: {fault_text(error)}", err=True)
        sys.exit(FAULT)


if __name__ == "__main__":
    main()
