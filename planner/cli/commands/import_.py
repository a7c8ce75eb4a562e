"""`plan import`: makes a plan from the settings of another engine and prices it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.api.importing import Asked
from planner.cli.errors import reporting
from planner.cli.option_kinds import count
from planner.cli.options import DEFAULT_HARDWARE
from planner.cli.output import plan_content, write_json
from planner.cli.printing import console_of
from planner.cli.spoken import hardware_of, model_of
from planner.cli.texts import say

if TYPE_CHECKING:
    from planner.api.importing_plans import ImportedPlan


def import_(
    file: Annotated[Path, typer.Argument(help="The file with the settings, or a folder that plan export wrote.")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="ENGINE", help="Engine of the settings (default: guessed from the file)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model, as for plan search (default: read from the file).",
            callback=model_of,
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Recipe, if the file has several; or words of a row of a table.", show_default=False
        ),
    ] = "",
    devices: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of devices, if the file does not say.", show_default=False),
    ] = None,
    seq_len: Annotated[
        int | None,
        count(None, "--seq-len", "Sequence length, if the file does not say (default: the model's own).", 2**31),
    ] = None,
    hardware: Annotated[
        str, typer.Option(metavar="PROFILE", help="Hardware profile or TOML file.", callback=hardware_of)
    ] = DEFAULT_HARDWARE,
    cluster: Annotated[str | None, typer.Option(metavar="LEVELS", help="Network levels, as for plan search.")] = None,
    software: Annotated[
        str | None,
        typer.Option(metavar="STACK", help="Training stack to price it with.", show_default="that of the engine"),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Global batch size, if the file does not say (mindspore)."),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Micro-batches per step, if the file does not say (mindspore)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write the plan.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List settings that do not concern a plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert the settings of another engine to a plan, predict its cost, and write it with -o.

    Engines: accelerate, deepspeed, megatron, megatron-bridge, mindformers, mindspeed, mindspore, nemo, torch,
    torchtitan.

        plan import launch.sh --from megatron --model llama70b --devices 64 -o megatron.json
        plan import train.toml --from torchtitan --model llama8b --hardware a100-80gb
        plan import strategy.json --from mindspore --model package.module:factory
    """
    with reporting(as_json):
        from planner.api.importing_plans import imported_plan
        from planner.cli.tracing import traced
        from planner.plan.file import save_plan
        from planner.plan.writing import check_place

        if output is not None:
            check_place(output, (file, recipe, model, hardware, cluster))
        asked = Asked(
            file=file, engine=source, model=model, devices=devices, recipe=recipe, hardware=hardware,
            cluster=cluster, software=software, sequence_length=seq_len,
            global_batch=global_batch, micro_batches=micro_batches,
        )  # fmt: skip
        found = imported_plan(asked, traced, lambda note: say(f"note: {note}", err=True))
        if output is not None:
            save_plan(found.plan, output)
        if as_json:
            _print_json(found, output)
        else:
            _print(found, output, verbose)


def _print_json(found: "ImportedPlan", output: Path | None) -> None:
    from planner.plan.layout.roles import roles

    bound, remarks = found.bound, found.remarks
    content = plan_content(bound.plan, roles(bound), bound.plan.prediction)
    content["fits"] = found.fits
    content["unmodelled"] = list(remarks.unmodelled)
    content["notes"] = list(remarks.notes)
    content["unread"] = list(remarks.unread)
    content["plan_file"] = None if output is None else str(output)
    write_json("plan import", content)


def _print(found: "ImportedPlan", output: Path | None, verbose: bool) -> None:
    from planner.plan.layout.roles import roles
    from planner.report.console import styled
    from planner.report.imported import print_remarks, print_unmodelled
    from planner.report.terminal import print_plan
    from planner.report.units import bytes_text

    bound, remarks = found.bound, found.remarks
    console, prediction = console_of(), bound.plan.prediction
    print_unmodelled(console, remarks)
    print_plan(console, bound, roles(bound), prediction)
    missing = prediction.peak_bytes - prediction.capacity_bytes
    if missing > 0:
        console.print(f"\nIt does not fit: {bytes_text(missing)} per device too much", soft_wrap=True)
    print_remarks(console, remarks, verbose)
    if output is not None:
        console.print(styled("\nPlan written to ", (str(output), "bold")), soft_wrap=True)
