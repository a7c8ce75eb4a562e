"""`plan import`: a plan made of the settings of another engine, priced."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hardware_profiles.foreign import printable
from planner.api.carrying import Subject, plan_of, target_named
from planner.cli.commands.import_operators import Given, imported_operators, refusing
from planner.cli.errors import reporting
from planner.cli.options import DEFAULT_HARDWARE
from planner.cli.output import plan_content, write_json
from planner.cli.spoken import hardware_of, model_of
from planner.cli.texts import say, text_of
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.export.target import Facts, Reading, Target
    from planner.plan.binding.bind import BoundPlan


def import_(
    file: Annotated[Path, typer.Argument(help="The file with the settings, or a folder that plan export wrote.")],
    source: Annotated[str, typer.Option("--from", metavar="ENGINE", help="The engine whose settings they are.")],
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The model: of the zoo, a config.json, or package.module:factory.", callback=model_of
        ),
    ],
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Devices, where the settings do not say.", show_default=False)
    ] = None,
    hardware: Annotated[
        str, typer.Option(metavar="PROFILE", help="Hardware profile or TOML file.", callback=hardware_of)
    ] = DEFAULT_HARDWARE,
    cluster: Annotated[
        str | None, typer.Option(metavar="LEVELS", help="Levels of the network, as for plan --cluster.")
    ] = None,
    software: Annotated[
        str | None, typer.Option(metavar="STACK", help="The training stack to price it for.", show_default="pytorch")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Samples per step, where the settings do not say: mindspore."),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Micro-batches per step, where the settings do not say: mindspore."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write the plan.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert the settings of another engine to a plan, predict its cost, and write it with -o.

    Engines: accelerate, deepspeed, megatron, mindformers, mindspeed, mindspore, nemo, torch, torchtitan.

        plan import launch.sh --from megatron --model llama70b --devices 64 -o megatron.json
        plan import train.toml --from torchtitan --model llama8b --hardware a100-80gb
        plan import strategy.json --from mindspore --model package.module:factory
    """
    with reporting(as_json):
        from planner.export.targets import OPERATOR_TARGETS
        from planner.plan.file import save_plan

        where = (hardware, cluster, software)
        if source in OPERATOR_TARGETS:
            given = Given(
                model=model, devices=devices, where=where, global_batch=global_batch, micro_batches=micro_batches
            )
            bound, notes = imported_operators(file, OPERATOR_TARGETS[source], given)
        else:
            target = target_named(source)
            if global_batch is not None or micro_batches is not None:
                raise RequestError(
                    f"--global-batch, --micro-batches: the settings of {source} say how many; leave them out"
                )
            bound, notes = _imported(file, target, model, devices, where)
        if output is not None:
            save_plan(bound.plan, output)
        if as_json:
            _print_json(bound, notes, output)
        else:
            _print(bound, notes, output)


def _imported(
    file: Path, target: "Target", model: str, devices: int | None, where: tuple[str, str | None, str | None]
) -> "tuple[BoundPlan, tuple[str, ...]]":
    from hardware_profiles import of_one_kind
    from planner.cli.tracing import traced
    from planner.export.architecture import architecture_of
    from planner.export.target import Facts
    from planner.models.zoo import build_model
    from planner.plan.binding.bind import prepare
    from planner.plan.outline import model_reference
    from planner.plan.plan import PRECISIONS
    from planner.sharding.discover import discover
    from planner.strategy_search.job import PRECISION, machine_from

    text, beside = _texts(file, target)
    built = build_model(model, dtype=PRECISIONS[PRECISION])
    graph = traced(built)
    facts = Facts(
        layers=prepare(graph)[1].count,
        devices=devices,
        architecture=architecture_of(model, built.sequence_length),
        beside=beside,
    )
    reading = _read(file, target, text, facts)
    description = reading.description
    length = description.sequence_length if ":" not in model else None
    if length not in (None, built.sequence_length) or description.precision != PRECISION:
        built = build_model(model, dtype=PRECISIONS[description.precision], sequence_length=length)
        graph = traced(built)
    graph = discover(graph, None, lambda note: say(f"note: {note}", err=True))
    profile, levels, software = where
    if devices is not None and devices != description.devices:
        raise RequestError(f"{file}: its degrees make {description.devices} devices, --devices says {devices}")
    subject = Subject(
        model=model_reference(graph, name=model, sequence_length=built.sequence_length, batch=built.batch),
        graph=graph,
        batch=built.batch,
        cluster=of_one_kind(
            machine_from(profile, levels=levels, software=software, devices=description.devices), "import"
        ),
    )
    return plan_of(subject, description), reading.notes


def _read(file: Path, target: "Target", text: str, facts: "Facts") -> "Reading":
    """What a file says of a model with so many layers."""
    from planner.export.description import ExportError

    with refusing(file, target.name):
        reading = target.read(text, facts)
    layers = sum(reading.description.layers)
    if layers != facts.layers:
        raise ExportError(
            f"{file}: its stages have {layers} layers, the model has {facts.layers}; name the right model"
        )
    return reading


def _texts(file: Path, target: "Target") -> tuple[str, str]:
    """The text of a file, or of the main file of a folder, and of the one that is read with it, where there is one."""
    path = file / target.main if file.is_dir() else file
    also = None if target.beside is None else path.parent / target.beside
    return text_of(path), text_of(also) if also is not None and also.is_file() else ""


def _print_json(bound: "BoundPlan", notes: Sequence[str], output: Path | None) -> None:
    from planner.plan.layout.roles import roles

    prediction = bound.plan.prediction
    content = plan_content(bound.plan, roles(bound), prediction)
    content["fits"] = prediction.peak_bytes <= prediction.capacity_bytes
    content["notes"] = list(notes)
    content["plan_file"] = None if output is None else str(output)
    write_json("plan import", content)


def _print(bound: "BoundPlan", notes: Sequence[str], output: Path | None) -> None:
    from planner.plan.layout.roles import roles
    from planner.report.console import PlainConsole, styled
    from planner.report.terminal import print_plan
    from planner.report.units import bytes_text

    console, prediction = PlainConsole(), bound.plan.prediction
    print_plan(console, bound, roles(bound), prediction)
    missing = prediction.peak_bytes - prediction.capacity_bytes
    if missing > 0:
        console.print(f"\nIt does not fit: {bytes_text(missing)} per device too much", soft_wrap=True)
    for note in notes:
        console.print(f"\n{printable(note)}", soft_wrap=True)
    if output is not None:
        console.print(styled("\nPlan written to ", (str(output), "bold")), soft_wrap=True)
