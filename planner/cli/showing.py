"""`plan show` and `plan verify`: read a plan file, check it against its model, price it anew."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodels import CostModelError
from hardware_profiles import HardwareProfileError
from planner.cli.errors import OUTPUT_SCHEMA_VERSION, reporting
from planner.cli.output import plan_content, rank_content, write_json
from planner.cli.waiting import Waiting, waiting
from planner.errors import PlanFileError, PlannerError

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel
    from planner.plan.plan import Plan
    from planner.plan.verify import Verdict

Hardware = Annotated[
    str | None, typer.Option(help="The profile or TOML file that the plan was made for, where it is not a known name.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def judge(plan_file: Path, hardware: str | None, wait: Waiting) -> "Verdict":
    """Load a plan, trace its model again and verify it. Errors name the file."""
    from planner.plan.file import load_plan

    plan = load_plan(plan_file)
    with naming(plan_file):
        return _judged(plan, hardware, wait)


@contextlib.contextmanager
def naming(plan_file: Path) -> Iterator[None]:
    """Errors inside name the file."""
    try:
        yield
    except PlannerError as error:
        raise type(error)(f"{plan_file}: {error}") from error
    except (HardwareProfileError, CostModelError) as error:
        raise PlanFileError(f"{plan_file}: {error}") from error


def _judged(plan: "Plan", hardware: str | None, wait: Waiting) -> "Verdict":
    from planner.plan.machine import machine_of
    from planner.plan.verify import verify as check

    cluster = machine_of(plan.cluster, hardware)
    wait.phase("tracing the model")
    model, graph = traced_again(plan)
    wait.phase("checking the plan")
    return check(plan, graph, model.batch, cluster)


def traced_again(plan: "Plan") -> "tuple[BuiltModel, OperatorGraph]":
    """The model of a plan and its graph."""
    from planner.cli.tracing import traced
    from planner.models.zoo import build_model
    from planner.plan.plan import PRECISIONS

    length = None if ":" in plan.model.reference else plan.model.sequence_length
    model = build_model(plan.model.reference, dtype=PRECISIONS[plan.training.precision], sequence_length=length)
    if model.sequence_length != plan.model.sequence_length:
        raise PlanFileError(
            f"model.sequence_length: {plan.model.reference} has {model.sequence_length}, the file says "
            f"{plan.model.sequence_length}; undo the edit or plan again"
        )
    return model, traced(model)


def show(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    hardware: Hardware = None,
    rank: Annotated[
        int | None, typer.Option(help="Where this rank stands, whom it talks to, and which pieces it has.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan: degrees, who is sharded how, time and memory; or what one rank of it has.

    [bold]plan show llama70b-64.json[/bold]
    [bold]plan show llama70b-64.json --rank 37[/bold]
    """
    with reporting(as_json):
        from rich.console import Console

        from planner.plan.rank_view import rank_view
        from planner.plan.roles import roles
        from planner.report.rank import print_rank
        from planner.report.terminal import print_plan

        with waiting() as wait:
            verdict = judge(plan_file, hardware, wait)
        if rank is not None:
            plan, view = verdict.bound.plan, rank_view(verdict.bound, roles(verdict.bound), rank)
            if as_json:
                write_json(rank_content(view, plan))
            else:
                print_rank(Console(highlight=False), view, plan.mesh.names, plan.cluster.devices)
            return
        if as_json:
            content = plan_content(verdict.bound.plan, roles(verdict.bound), verdict.prediction)
            write_json({**content, "fits": verdict.fits, "remarks": list(verdict.remarks)})
            return
        console = Console(highlight=False)
        print_plan(console, verdict.bound, roles(verdict.bound), verdict.prediction)
        for remark in verdict.remarks:
            console.print(f"\nThe plan was changed since it was priced: {remark}")


def verify(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    hardware: Hardware = None,
    as_json: AsJson = False,
) -> None:
    """Check a plan independently: legal for its model, fits, costs what it says. Exit code 1 where it does not.

    [bold]plan verify llama70b-64.json[/bold]
    """
    with reporting(as_json):
        from planner.sharding.discover import prove

        with waiting() as wait:
            verdict = judge(plan_file, hardware, wait)
            wait.phase("proving rules that were found by trial")
            prove(verdict.bound.graph)
        if as_json:
            write_json(_verdict_content(verdict))
        else:
            _print_verdict(verdict)
        raise typer.Exit(0 if verdict.fits and verdict.as_stated else 1)


def _print_verdict(verdict: "Verdict") -> None:
    from planner.plan.words import gradient_words
    from planner.report.units import bytes_text, seconds_text

    prediction, words = verdict.prediction, gradient_words(verdict.bound.plan.training.update)
    peak, capacity = bytes_text(prediction.peak_bytes), bytes_text(prediction.capacity_bytes)
    typer.echo(f"legal; {seconds_text(prediction.step_seconds)} a step, {peak} of {capacity} per device{words}")
    if verdict.outside is not None:
        typer.echo(f"does not fit: {verdict.outside}")
    elif not verdict.fits:
        typer.echo(f"does not fit: {bytes_text(prediction.peak_bytes - prediction.capacity_bytes)} too much")
    for remark in verdict.remarks:
        typer.echo(f"differs from the file: {remark}")


def _verdict_content(verdict: "Verdict") -> dict[str, Any]:
    prediction = verdict.prediction
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "fits": verdict.fits,
        "as_stated": verdict.as_stated,
        "step_seconds": prediction.step_seconds,
        "peak_bytes": prediction.peak_bytes,
        "capacity_bytes": prediction.capacity_bytes,
        "remarks": list(verdict.remarks),
    }
