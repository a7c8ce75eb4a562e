"""`plan`: the command line. One command is the main job, the others work with what it wrote.

Exit codes: 0 good, 1 a check or a run failed, 2 bad input, 3 nothing fits, 4 a loss is not finite, 70 a fault of ours,
130 interrupted, 141 stdout closed.
"""

import sys
from typing import Annotated

import typer

from planner.cli.commands import (
    advise,
    audit,
    calibrate,
    checkpoint,
    compare,
    diff,
    estimate,
    explain,
    export,
    import_,
    lists,
    plan,
    replan,
    report,
    run,
    show,
    validate,
)
from planner.cli.errors import FAULT, fault_text
from planner.cli.errors import reporting as errors_reported
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
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("advise")(advise.advise)
app.command("audit")(audit.audit)
app.command("calibrate")(calibrate.calibrate)
app.command("compare")(compare.compare)
app.command("diff")(diff.diff)
app.command("estimate")(estimate.estimate)
app.command("explain")(explain.explain)
app.command("export")(export.export)
app.command("fit")(calibrate.fit)
app.command("import")(import_.import_)
app.command("replan")(replan.replan)
app.command("report")(report.report)
app.command("run")(run.run)
app.command("show")(show.show)
app.command("verify")(show.verify)
app.command("validate")(validate.validate)
app.command("models")(lists.models)
app.command("profiles")(lists.profiles)
app.command("stacks")(lists.stacks)
app.add_typer(checkpoint.checkpoints)


@app.callback(invoke_without_command=True)
@taking_options
def main_job(
    invocation: typer.Context,
    options: Options,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Plan the parallel training of a model on a cluster: sharding, schedule and memory, as a plan file to run.

    Options that you give are fixed; the search decides the rest.

    [bold]plan --model llama70b --devices 64[/bold]

    [bold]plan --model llama70b --devices 64 --tensor 8 --pipeline 8 --zero 1[/bold]

    [bold]plan --model llama70b --hardware h100-80gb:32,a100-80gb:32[/bold]

    [bold]plan --model llama-tiny --devices 4 --hardware cpu -o tiny.json && plan run tiny.json --steps 5[/bold]
    """
    command = invocation.invoked_subcommand
    if command is not None:
        with errors_reported(options.as_json):
            _nothing_before(command, options)
        return
    if version:
        plan.print_version()
        return
    if options.model is None and not options.given():
        typer.echo(invocation.get_help())
        raise typer.Exit(2)
    with errors_reported(options.as_json):
        if options.model is None:
            raise RequestError("missing --model NAME (see `plan models`)")
        plan.make_plan(options)


def _nothing_before(command: str, options: Options) -> None:
    """Options in front of a command would be lost."""
    if given := [flag(name) for name in options.given()]:
        raise RequestError(f"{', '.join(given)}: put options after the command, as in plan {command} {given[0]} ...")


def main() -> None:
    """Entry point of the `plan` script. What nobody expected is a fault of ours: one line, and a file to report it
    with."""
    try:
        with whole_process():
            app(prog_name="plan")
    except KeyboardInterrupt:
        typer.echo("plan: interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        typer.echo(f"plan: {fault_text(error)}", err=True)
        sys.exit(FAULT)


if __name__ == "__main__":
    main()
