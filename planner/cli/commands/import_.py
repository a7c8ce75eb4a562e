"""`plan import`: makes a plan from the settings of another engine and prices it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.api.exported_folders import exported_as
from planner.api.importing import Asked, imported
from planner.cli.commands.import_operators import Given, imported_operators
from planner.cli.errors import reporting
from planner.cli.option_kinds import count
from planner.cli.options import DEFAULT_HARDWARE
from planner.cli.output import plan_content, write_json
from planner.cli.spoken import hardware_of, model_of
from planner.cli.texts import say
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.plan.binding.bind import BoundPlan
    from planner.report.imported import Remarks


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
        from planner.export.targets import OPERATOR_TARGETS
        from planner.plan.file import save_plan

        written = exported_as(file)
        engine = source or written.engine
        asked = Asked(
            file=file, engine=engine, model=model, devices=devices, recipe=recipe, hardware=hardware,
            cluster=cluster, software=software, sequence_length=seq_len,
        )  # fmt: skip
        read = _read_operators if engine in OPERATOR_TARGETS else _read_settings
        bound, remarks = read(asked, global_batch, micro_batches)
        if output is not None:
            save_plan(bound.plan, output)
        if as_json:
            _print_json(bound, remarks, output)
        else:
            _print(bound, remarks, output, verbose)


def _read_operators(asked: Asked, global_batch: int | None, micro_batches: int | None) -> "tuple[BoundPlan, Remarks]":
    """The plan of a file that lists strategies of operators."""
    from planner.export.targets import OPERATOR_TARGETS
    from planner.report.imported import Remarks

    model = asked.model or exported_as(asked.file).model
    if model is None:
        raise RequestError(f"{asked.file}: strategies of operators name no model; name it with --model")
    given = Given(
        model=model,
        devices=asked.devices,
        where=(asked.hardware, asked.cluster, asked.software),
        global_batch=global_batch,
        micro_batches=micro_batches,
    )
    bound, notes = imported_operators(asked.file, OPERATOR_TARGETS[asked.engine or ""], given)
    return bound, Remarks(notes=notes)


def _read_settings(asked: Asked, global_batch: int | None, micro_batches: int | None) -> "tuple[BoundPlan, Remarks]":
    """The plan of a file with the settings of an engine, which say how many samples and micro-batches there are."""
    from planner.cli.tracing import traced
    from planner.report.imported import Remarks

    if global_batch is not None or micro_batches is not None:
        raise RequestError("--global-batch, --micro-batches: these settings say how many; leave them out")
    found = imported(asked, traced, lambda note: say(f"note: {note}", err=True))
    reading = found.reading
    return found.bound, Remarks(unmodelled=reading.unmodelled, notes=reading.notes, unread=reading.unread)


def _print_json(bound: "BoundPlan", remarks: "Remarks", output: Path | None) -> None:
    from planner.plan.layout.roles import roles

    prediction = bound.plan.prediction
    content = plan_content(bound.plan, roles(bound), prediction)
    content["fits"] = prediction.peak_bytes <= prediction.capacity_bytes
    content["unmodelled"] = list(remarks.unmodelled)
    content["notes"] = list(remarks.notes)
    content["unread"] = list(remarks.unread)
    content["plan_file"] = None if output is None else str(output)
    write_json("plan import", content)


def _print(bound: "BoundPlan", remarks: "Remarks", output: Path | None, verbose: bool) -> None:
    from planner.plan.layout.roles import roles
    from planner.report.console import PlainConsole, styled
    from planner.report.imported import print_remarks, print_unmodelled
    from planner.report.terminal import print_plan
    from planner.report.units import bytes_text

    console, prediction = PlainConsole(), bound.plan.prediction
    print_unmodelled(console, remarks)
    print_plan(console, bound, roles(bound), prediction)
    missing = prediction.peak_bytes - prediction.capacity_bytes
    if missing > 0:
        console.print(f"\nIt does not fit: {bytes_text(missing)} per device too much", soft_wrap=True)
    print_remarks(console, remarks, verbose)
    if output is not None:
        console.print(styled("\nPlan written to ", (str(output), "bold")), soft_wrap=True)
