"""`plan`: the command line. One command is the main job, the others work with what it wrote.

Exit codes: 0 good, 1 a check failed, 2 bad input, 3 nothing fits.
"""

from typing import Annotated

import typer

from planner.cli import listings, planning, running, showing
from planner.cli.errors import reporting

app = typer.Typer(
    add_completion=True,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(running.run)
app.command("show")(showing.show)
app.command("verify")(showing.verify)
app.command("models")(listings.models)
app.command("profiles")(listings.profiles)


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="A model of the zoo (see `plan models`) or package.module:factory.")
    ] = None,
    devices: Annotated[int, typer.Option(help="How many devices to plan for.", min=1, max=2**20)] = 8,
    hardware: Annotated[
        str, typer.Option(help="A hardware profile (see `plan profiles`) or a TOML file.")
    ] = "h100-80gb",
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per sample; the model's own where not given.", min=1, max=2**31)
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Samples per step; 4 per device where not given.", min=1, max=2**31)
    ] = None,
    search: Annotated[
        str, typer.Option(help="How to search inside a stage: dynamic_programming.")
    ] = "dynamic_programming",
    precision: Annotated[
        str | None,
        typer.Option(help="bf16, fp16 or fp32 compute, fp32 master weights; bf16 where not given, fp32 on CPUs."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd (with momentum).")] = "adamw",
    pipeline: Annotated[int | None, typer.Option(help="Fix the number of pipeline stages.", min=1)] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Fix the number of micro-batches.", min=1)] = None,
    mesh: Annotated[str | None, typer.Option(help="Fix the mesh of a stage, slowest links first, as in 8x4.")] = None,
    recompute: Annotated[str | None, typer.Option(help="Fix recomputation: none or full.")] = None,
    full_trace: Annotated[
        bool, typer.Option("--full-trace", help="Trace every repeated block by itself; slower, the same graph.")
    ] = False,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Where to write the plan file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout and nothing else.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print neither progress nor report.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Plan how to train a model on a cluster: which operator is split how, what it costs, and a plan file to run.

    [bold]plan --model llama70b --devices 64[/bold]

    [bold]plan --model llama-tiny --devices 4 --hardware cpu -o tiny.json && plan run tiny.json --steps 5[/bold]
    """
    if context.invoked_subcommand is not None:
        return
    if version:
        planning.print_version()
        return
    if model is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    options = planning.Options(
        model=model,
        devices=devices,
        hardware=hardware,
        seq_len=seq_len,
        global_batch=global_batch,
        search=search,
        precision=precision,
        optimizer=optimizer,
        pipeline=pipeline,
        micro_batches=micro_batches,
        mesh=mesh,
        recompute=recompute,
        full_trace=full_trace,
        output=output,
        as_json=as_json,
        quiet=quiet,
    )
    with reporting(as_json):
        planning.make_plan(options)


def main() -> None:
    """Entry point of the `plan` script."""
    app(prog_name="plan")


if __name__ == "__main__":
    main()
