"""`plan prove`: proves a large plan with small plans that have the same decisions, on processes of this machine."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.commands.show import ExecutedModel, Hardware, built_again, naming
from planner.cli.errors import OUTPUT_SCHEMA_VERSION, reporting
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.texts import say
from planner.cli.waiting import waiting
from planner.plan.shrinking.limits import PROCESSES

if TYPE_CHECKING:
    from runtime.proving.differences import Differences
    from runtime.proving.prove import Proof

_COMPARED = {"loss": "losses", "gradient": "gradients", "change": "weight updates", "buffer": "buffers"}
"""What is compared with the unsharded model, as the terminal names it."""

_NAMED = 8
"""Maximum number of unproved decisions listed per kind; the others are counted."""


def prove(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    model: ExecutedModel = None,
    hardware: Hardware = None,
    small: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A small model with the same layers. Needed if a factory builds the large one."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Maximum number of processes.")] = PROCESSES,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove a plan at small scale: the same decisions, run on this machine against the unsharded model.

    Makes the smallest model and mesh with every strategy, redistribution, collective, stored layout, recomputation and
    schedule step of the plan (fewer blocks, smaller dims, axes of 2), trains it in float64 and in the precision of the
    plan, and lists the decisions that this proves and those that it does not. Exit code 1 if anything differs.

        plan prove llama70b-64.json
    """
    with reporting(as_json):
        found = _proof(plan_file, hardware, model, small, processes)
        if as_json:
            write_json("plan prove", _content(found))
        else:
            _print(found)
        raise typer.Exit(0 if found.agrees else 1)


def _proof(plan_file: Path, hardware: str | None, given: str | None, small: str | None, processes: int) -> "Proof":
    from planner.api.checking import PROVING, proved
    from planner.plan.binding.machine import machine_of
    from planner.plan.file import load_plan

    plan = load_plan(plan_file)
    with naming(plan_file), waiting() as wait:
        machine = machine_of(plan.cluster, hardware)
        wait.phase("tracing the model")
        model = built_again(plan, given, PROVING)
        return proved(plan, model, machine, given, small, processes, wait.phase)


def _print(found: "Proof") -> None:
    from planner.report.table import table_of

    console = console_of()
    say(_sizes(found))
    console.print()
    table = table_of("Decisions of the plan", "", "distinct", "proved", "all", "proved")
    for one in found.covered:
        counts = (one.different, one.covered, one.times, one.covered_times)
        table.add_row(one.kind, *(f"{count:,}" for count in counts))
    console.print(table)
    console.print(_table(found.differences))
    for line in (*_narrow(found), *_missing(found), *_failures(found)):
        say(line)
    say(_verdict(found))


def _sizes(found: "Proof") -> str:
    large, small = found.large, found.small[0].plan
    blocks = len(found.small[0].stands_for)
    return (
        f"{large.model.reference} on {large.cluster.devices:,} devices, proved with {small.model.reference} on"
        f" {small.cluster.devices} processes: mesh {_mesh(large.mesh.sizes)} -> {_mesh(small.mesh.sizes)}, pipeline"
        f" {large.pipeline} -> {small.pipeline}, blocks {found.blocks} -> {blocks}, micro-batches"
        f" {large.training.micro_batches} -> {small.training.micro_batches}"
    )


def _mesh(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "1"


def _table(differences: "tuple[Differences, ...]") -> Any:
    from planner.report.table import table_of

    table = table_of("Relative differences from the unsharded model", "", *_COMPARED.values())
    for one in differences:
        values = (one.loss, one.gradient, one.change, one.buffer)
        words = ("not compared" if value is None else f"{value:.1e}" for value in values)
        table.add_row(f"{one.precision}, {one.steps} steps", *words)
    return table


def _narrow(found: "Proof") -> "list[str]":
    """A note if nothing ran in float64."""
    if not found.not_in_float64:
        return []
    ran = " and ".join(one.precision for one in found.differences)
    return [f"not run in float64: {found.not_in_float64}; the differences include the rounding of {ran}"]


def _missing(found: "Proof") -> "list[str]":
    lines = []
    for one in found.covered:
        lines += [f"not proved: {one.kind}: {what} ({times:,} times)" for what, times in one.missing[:_NAMED]]
        if len(one.missing) > _NAMED:
            lines.append(f"and {len(one.missing) - _NAMED} more {one.kind}; --json lists all")
    return lines


def _failures(found: "Proof") -> "list[str]":
    lines = []
    for one in found.differences:
        names = {"gradient": one.worst_gradient, "change": one.worst_change}
        for kind in one.failures:
            where = f" of {names[kind]}" if names.get(kind) else ""
            allowed = one.tolerances[kind]
            lines.append(
                f"differs: {_COMPARED[kind]}{where} in {one.precision}: {getattr(one, kind):.1e}, allowed {allowed:.0e}"
            )
    return lines


def _verdict(found: "Proof") -> str:
    beyond = "Never proved: time, memory, kernels and links of the cluster, axes with more devices"
    if not found.agrees:
        return "\nThe runtime does NOT agree with the unsharded model"
    if found.complete:
        return f"\nEvery decision of the plan agrees with the unsharded model. {beyond}"
    return f"\nThe proved decisions agree with the unsharded model; the others were not run. {beyond}"


def _content(found: "Proof") -> Mapping[str, Any]:
    small = found.small[0].plan
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "agrees": found.agrees,
        "complete": found.complete,
        "not_in_float64": found.not_in_float64 or None,
        "small": {
            "model": small.model.reference,
            "processes": small.cluster.devices,
            "mesh": list(small.mesh.sizes),
            "pipeline": small.pipeline,
            "micro_batches": small.training.micro_batches,
            "blocks": list(found.small[0].stands_for),
        },
        "decisions": [
            {
                "kind": one.kind,
                "different": one.different,
                "proved": one.covered,
                "made": one.times,
                "made_proved": one.covered_times,
                "missing": [{"decision": what, "times": times} for what, times in one.missing],
            }
            for one in found.covered
        ],
        "differences": [
            {
                **{name: _finite(value) for name, value in asdict(one).items()},
                "failures": list(one.failures),
                "tolerances": dict(one.tolerances),
            }
            for one in found.differences
        ],
    }


def _finite(value: object) -> object:
    """None for a number that JSON does not have; `failures` names it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
