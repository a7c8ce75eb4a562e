"""`plan export`: writes the settings with which another engine runs a plan."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.api.carrying import target_named
from planner.api.exported_folders import MARKER
from planner.api.exporting import Export, Way, check_fits, check_own_fit, export_of, operators_of
from planner.api.folders import write_folder
from planner.api.texts import text_of
from planner.cli.commands.show import Hardware, OfModel, naming, traced_again
from planner.cli.errors import OUTPUT_SCHEMA_VERSION, reporting
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.texts import say
from planner.cli.values import parse_share
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.export.target import OperatorTarget

TOLERANCE = "1%"
"""How much longer a step of the nearest plan may take, by default."""

_FAR = 0.05
"""Share of the step by which the nearest plan may be slower before the search for the best one is pointed out."""


def export(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    to: Annotated[str, typer.Option("--to", metavar="ENGINE", help="Engine to write settings for.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The folder to write.")],
    nearest: Annotated[
        bool,
        typer.Option(
            "--nearest",
            "--approximate",
            help="Write the nearest plan that the engine can run. Without this option its best plan is searched.",
        ),
    ] = False,
    tolerance: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Take the nearest plan if its step takes at most this much longer.",
            show_default=TOLERANCE,
        ),
    ] = None,
    onto: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take all other settings from this file. Give the file that was imported, or one like it.",
        ),
    ] = None,
    hardware: Hardware = None,
    model: OfModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a plan as the settings of another engine, with the command that starts it.

    Engines: accelerate, deepspeed, megatron, megatron-bridge, mindformers, mindspeed, mindspore, nemo, torch,
    torchtitan.

    If the engine cannot express the plan, the best plan for the engine is searched, as with plan --for. A plan that
    does not fit is never written.

        plan export llama70b-64.json --to megatron -o run
        plan export llama70b-64.json --to torchtitan -o run --nearest
        plan export llama70b-64.json --to mindformers -o run --onto finetune.yaml
    """
    with reporting(as_json):
        from planner.export.launching import folder_files
        from planner.export.targets import OPERATOR_TARGETS

        limit = [] if tolerance is None else [f"--tolerance {tolerance}"]
        strange = [*(["--nearest"] if nearest else []), *limit, *([] if onto is None else [f"--onto {onto}"])]
        strange += [] if hardware is None else [f"--hardware {hardware}"]
        if to in OPERATOR_TARGETS and strange:
            raise RequestError(
                f"{', '.join(strange)}: {to} takes strategies of operators and nothing else; leave it out"
            )
        if nearest and tolerance is not None:
            raise RequestError(f"--tolerance {tolerance}: --nearest takes the nearest plan anyway; give one of them")
        if to in OPERATOR_TARGETS:
            _export_operators(plan_file, OPERATOR_TARGETS[to], output, model, as_json)
            return
        text = None if onto is None else text_of(onto)
        most = parse_share("tolerance", TOLERANCE if tolerance is None else tolerance)
        found = _export(plan_file, to, hardware, model, Way(nearest=nearest, most=most))
        check_fits(found, str(plan_file))
        content = _content(found)
        with naming(plan_file):
            files = folder_files(found.target, found.job)
        if onto is not None and text is not None:
            files = {**files, found.target.main: _onto(found, onto, text)}
        write_folder(output, files, MARKER, content)
        names = sorted((*files, MARKER))
        if as_json:
            write_json("plan export", {**content, "folder": str(output), "files": names})
        else:
            _print(found, output, names)


def _export_operators(
    plan_file: Path, target: "OperatorTarget", output: Path, given: str | None, as_json: bool
) -> None:
    """Write the strategies of a plan unchanged."""
    from planner.plan.file import load_plan
    from planner.strategy_search.request.offload import KINDS, offload_of

    plan = load_plan(plan_file)
    check_own_fit(plan, target.name, str(plan_file))
    with naming(plan_file):
        model = traced_again(plan, given)
        files, content = operators_of(plan, target, model.graph, model.batch)
    content = {"schema_version": OUTPUT_SCHEMA_VERSION, **content}
    write_folder(output, files, MARKER, content)
    names = sorted((*files, MARKER))
    if as_json:
        write_json("plan export OPERATORS", {**content, "folder": str(output), "files": names})
    else:
        say(f"{plan.model.reference} for {target.about}\nWritten to {output}: {', '.join(names)}")
        offload = offload_of(plan)
        if kinds := [kind for kind in KINDS if len(getattr(offload, kind)) > 1]:
            say(f"These files cannot say what the plan offloads ({', '.join(kinds)}): set it up in your program")


def _export(plan_file: Path, to: str, hardware: str | None, given: str | None, way: Way) -> Export:
    from planner.plan.binding.machine import machine_of
    from planner.plan.file import load_plan

    target_named(to)
    plan = load_plan(plan_file)
    with naming(plan_file):
        machine = machine_of(plan.cluster, hardware)
        model = traced_again(plan, given)
        return export_of(plan, to, machine, model.graph, model.batch, way)


def _onto(found: Export, onto: Path, text: str) -> str:
    """The `text` of an existing file with the settings of a plan in it."""
    from planner.api.importing import refusing
    from planner.export.onto import written_onto
    from planner.export.target import Facts

    target, job = found.target, found.job
    beside = None if target.beside is None else onto.parent / target.beside
    facts = Facts(
        layers=sum(job.description.layers),
        devices=job.description.devices,
        architecture=job.architecture,
        beside=text_of(beside) if beside is not None and beside.is_file() else "",
        model=job.model,
        experts=job.description.expert is not None,
        sequence_length=job.description.sequence_length,
    )
    with refusing(onto, target.name):
        return written_onto(target, text, facts, job)


def _content(found: Export) -> dict[str, Any]:
    here, there = found.plan.prediction, found.prediction
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "engine": found.target.name,
        "about": found.target.about,
        "model": found.plan.model.reference,
        "devices": found.plan.cluster.devices,
        "step_seconds": there.step_seconds,
        "peak_bytes": there.peak_bytes,
        "fits": found.fits,
        "plan_step_seconds": here.step_seconds,
        "plan_peak_bytes": here.peak_bytes,
        "searched": found.searched,
        "why": list(found.why) if found.searched else None,
        "software": found.software,
        "given_up": [asdict(step) for step in found.steps],
        "hosts": [asdict(one) for one in found.hosts] or None,
    }


def better(found: Export) -> str:
    """What to do where the nearest plan is much slower than the plan."""
    here, there = found.plan.prediction, found.prediction
    if there.step_seconds <= here.step_seconds * (1 + _FAR):
        return ""
    return "; without --nearest the best plan that it can run is searched for"


def _print(found: Export, output: Path, files: Sequence[str]) -> None:
    from planner.export.launching import priced_only, switched_off
    from planner.report.console import styled
    from planner.report.given_up import print_given_up

    console = console_of()
    console.print(f"{found.plan.model.reference} for {found.target.about}", soft_wrap=True)
    if found.steps:
        rows = [(s.what, s.here, s.there, s.step_seconds, s.peak_bytes) for s in found.steps]
        print_given_up(console, rows)
        console.print(f"\nThe engine will take {found.change}{better(found)}", soft_wrap=True)
    elif found.searched:
        reason = found.job.gave_up or f"{found.target.name} has no settings for this plan"
        given_up = ", which was given up" if found.job.gave_up else ""
        console.print(
            f"{reason}{given_up}; the best that it has, searched for it and priced for {found.software}, takes"
            f" {found.change}",
            soft_wrap=True,
        )
        if not found.job.gave_up:
            for words in found.why:
                console.print(f"  {words}", soft_wrap=True)
    if found.hosts:
        words = ", ".join(one.words for one in found.hosts)
        console.print(f"Stages count on the order of hosts: give the launch node ranks {words}", soft_wrap=True)
    console.print(styled("Written to ", (str(output), "bold"), f": {', '.join(files)}"), soft_wrap=True)
    asked = [(variable, what.replace("`", "")) for variable, what in found.target.fill_in(found.job)]
    for variable, what in asked:
        if variable:
            console.print(f"Set {variable}: {what}", soft_wrap=True)
    if left := "; ".join(what for variable, what in asked if not variable):
        console.print(f"Left to you: {left}", soft_wrap=True)
    for what in switched_off(found.job):
        console.print(f"Switched off, as in the plan: {what.replace('`', '')}", soft_wrap=True)
    for what in priced_only(found.target, found.job):
        console.print(f"Priced, but not switched on here: {what}; a step may take longer", soft_wrap=True)
