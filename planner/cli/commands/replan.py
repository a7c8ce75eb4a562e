"""`plan replan`: searches the job of a plan again for another profile."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.commands.show import OfModel, naming, traced_again
from planner.cli.errors import reporting
from planner.cli.options import Levels
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.spoken import hardware_of
from planner.cli.stopping import stoppable
from planner.cli.texts import say
from planner.cli.waiting import waiting

if TYPE_CHECKING:
    from planner.api.replanning import Replanned
    from planner.plan.plan import Plan

SCHEMA_VERSION = 1  # of the object that `plan replan --json` prints


def replan(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    hardware: Annotated[
        str,
        typer.Option(
            metavar="PROFILE", help="Profile to plan for, such as one that plan fit corrected.", callback=hardware_of
        ),
    ],
    cluster: Levels = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the new plan.")] = None,
    model: OfModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search again for another profile, with no decision fixed, and show what changes and what it saves.

    A profile of the same name keeps the network levels of the plan.

        plan replan tiny.json --hardware mine.toml -o better.json
        plan replan llama70b-64.json --hardware h200 --cluster node=8,cluster@25
    """
    with reporting(as_json):
        from planner.api.replanning import machine_by, replanned
        from planner.plan.compare.repricing import repriced
        from planner.plan.file import load_plan, save_plan
        from planner.plan.writing import check_place
        from planner.report.search import stopped_text

        plan = load_plan(plan_file)
        if output is not None:
            check_place(output, (hardware, cluster))
        with waiting() as wait:
            wait.phase("tracing the model")
            with naming(plan_file):
                machine = machine_by(plan, hardware, cluster)
                traced = traced_again(plan, model)
                kept = repriced(plan, traced.graph, traced.batch, machine)
            wait.phase("searching again")
            with stoppable(lambda: wait.phase("stopping")) as stopped:
                found = replanned(plan, kept, traced.graph, traced.batch, machine, wait.searched, stopped)
        if output is not None:
            save_plan(found.plan, output)
        content, by = _content((plan_file, output), found), found.found.statistics.stopped_by
        left = "" if cluster is not None else _levels_left_out(plan, found.plan)
        if as_json:
            write_json("plan replan", {**content, "stopped": by is not None})
            if left:
                say(f"note: {left}", err=True)
            return
        _show(content)
        if left:
            say(left)
        if output is not None:
            say(f"Plan written to {output}")
        if by is not None:
            say(f"{stopped_text(by)}: there may be faster plans.")


def _levels_left_out(before: "Plan", after: "Plan") -> str:
    """What to say where the network levels of a plan are not those of the new one; empty where they are."""
    levels, now = before.cluster.composition, after.cluster
    if not levels or levels == now.composition:
        return ""
    return (
        f"The network is that of the profile {now.profile}. The plan's own levels ({levels}) are kept only for a"
        f" profile with the name {before.cluster.profile}; --cluster gives levels for another."
    )


def _content(files: tuple[Path, Path | None], found: "Replanned") -> dict[str, Any]:
    names = ("" if file is None else str(file) for file in files)
    ends = [
        {
            "plan_file": name,
            "step_seconds": bound.plan.prediction.step_seconds,
            "peak_bytes": bound.plan.prediction.peak_bytes,
            "capacity_bytes": bound.plan.prediction.capacity_bytes,
        }
        for name, bound in zip(names, (found.kept, found.best), strict=True)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "profile": found.plan.cluster.profile,
        "step_seconds_before": found.before.prediction.step_seconds,
        "kept": ends[0],
        "best": ends[1],
        "saved_seconds": found.saved_seconds,
        "differences": [{"name": one.name, "first": one.here, "second": one.there} for one in found.differences],
    }


def _show(content: dict[str, Any]) -> None:
    from planner.api.replanning import WORTH
    from planner.report.table import table_of
    from planner.report.units import bytes_text, percent_text, seconds_text

    console = console_of()
    kept, best = content["kept"]["step_seconds"], content["best"]["step_seconds"]
    was = seconds_text(content["step_seconds_before"])
    console.print(f"With this profile the plan takes {seconds_text(kept)} a step; its file says {was}.")
    needed, there = content["kept"]["peak_bytes"], content["kept"]["capacity_bytes"]
    if needed > there:
        console.print(f"It does not fit: its peak is {bytes_text(needed)}, and devices have {bytes_text(there)}.")
    elif content["saved_seconds"] <= 0:
        console.print(f"No plan was found that takes {percent_text(WORTH)} less: this one stays.")
        return
    kind, word = "that fits" if needed > there else "that is faster", "less" if best <= kept else "more"
    took = f"A plan {kind} takes {seconds_text(best)}, {percent_text(abs(content['saved_seconds']) / kept)} {word}."
    if not content["differences"]:
        console.print(f"{took} Operators differ; see plan diff.")
        return
    console.print(f"{took} Changes:")
    table = table_of("", "", "from", "to")
    for one in content["differences"]:
        table.add_row(one["name"], one["first"], one["second"])
    console.print(table)
