"""`plan diff`: the differences between two plans, and the cost of each."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.commands.show import Hardware, OfModel, naming, traced_again
from planner.cli.errors import OUTPUT_SCHEMA_VERSION, reporting
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.stopping import SAID, stoppable
from planner.cli.texts import say
from planner.cli.waiting import waiting

if TYPE_CHECKING:
    from planner.plan.compare.differences import Comparison, Step
    from planner.plan.plan import Plan


def diff(
    first: Annotated[Path, typer.Argument(help="A plan file.")],
    second: Annotated[Path, typer.Argument(help="Another plan file of the same model.")],
    model: OfModel = None,
    hardware: Hardware = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two plans: what differs, and what each difference costs or saves.

    Starts at the first plan, applies one difference after the other, and prices every plan on the way. Differences
    that are legal only together are priced together. The costs sum to the difference of the two predictions.

        plan diff llama70b-64.json llama70b-64-by-hand.json
    """
    with reporting(as_json):
        from planner.plan.compare.differences import compare
        from planner.plan.file import load_plan

        plans = load_plan(first), load_plan(second)
        with waiting() as wait:
            wait.phase("tracing")
            graphs = _graphs(plans, (first, second), model)
            wait.phase("pricing both plans")
            with stoppable(lambda: wait.phase("stopping")) as stopped:
                found = compare(*plans, graphs, partial(wait.phase, "pricing the plans on the way"), stopped, hardware)
        if as_json:
            write_json("plan diff", {**_content((first, second), found), "stopped": stopped()})
        else:
            _print((first, second), plans, found)
            if stopped():
                say(f"{SAID}: the differences that were left are priced together, in the last row.")


def _graphs(plans: "tuple[Plan, Plan]", files: tuple[Path, Path], given: str | None) -> Any:
    """The graphs of both plans by fingerprint; equal graphs are traced once."""
    from planner.plan.compare.differences import Traced

    known: dict[str, Traced] = {}
    for plan, file in zip(plans, files, strict=True):
        if plan.model.fingerprint not in known:
            with naming(file):
                model = traced_again(plan, given)
            known[plan.model.fingerprint] = Traced(graph=model.graph, batch=model.batch)
    return known


def _print(files: tuple[Path, Path], plans: "tuple[Plan, Plan]", found: "Comparison") -> None:
    from planner.report.differences import comparison_report
    from planner.report.units import seconds_text

    console = console_of()
    console.print(comparison_report((str(files[0]), str(files[1])), found))
    for file, plan, bound in zip(files, plans, (found.first, found.second), strict=True):
        told, now = plan.prediction.step_seconds, bound.plan.prediction.step_seconds
        if abs(now / told - 1) > 1e-9:
            console.print(f"{file} says {seconds_text(told)} a step; priced now it is {seconds_text(now)}.")


def _content(files: tuple[Path, Path], found: "Comparison") -> dict[str, Any]:
    plans = [
        {
            "plan_file": str(file),
            "step_seconds": bound.plan.prediction.step_seconds,
            "peak_bytes": bound.plan.prediction.peak_bytes,
            "capacity_bytes": bound.plan.prediction.capacity_bytes,
        }
        for file, bound in zip(files, (found.first, found.second), strict=True)
    ]
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "first": plans[0],
        "second": plans[1],
        "difference_seconds": found.seconds,
        "difference_bytes": found.nbytes,
        "steps": [_step_content(step) for step in found.steps],
    }


def _step_content(step: "Step") -> dict[str, Any]:
    return {
        "differences": [
            {
                "name": one.name,
                "first": one.here,
                "second": one.there,
                "items": [{"name": name, "first": here, "second": there} for name, here, there in one.items],
            }
            for one in step.differences
        ],
        "difference_seconds": step.seconds,
        "difference_bytes": step.nbytes,
        "step_seconds_before": step.before.step_seconds,
        "step_seconds_after": step.after.step_seconds,
        "peak_bytes_before": step.before.peak_bytes,
        "peak_bytes_after": step.after.peak_bytes,
        "fits": step.fits,
    }
