"""`plan advise`: the cost of a configuration of another engine, and what to change in it."""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.api.importing import Asked, imported
from planner.cli.errors import OUTPUT_SCHEMA_VERSION, reporting
from planner.cli.option_kinds import count
from planner.cli.options import DEFAULT_HARDWARE
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.spoken import hardware_of, model_of
from planner.cli.stopping import stoppable
from planner.cli.texts import say
from planner.cli.waiting import waiting
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.api.advising import Advice
    from planner.plan.plan import Prediction


def advise(
    file: Annotated[Path, typer.Argument(help="The configuration: a script, a TOML, YAML, JSON or Python file.")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="ENGINE", help="Engine of the settings (default: guessed from the file)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model (default: read from the file).", callback=model_of),
    ] = None,
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
        str | None, typer.Option(metavar="STACK", help="Training stack.", show_default="that of the engine")
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Recipe, if the file has several; or words of a row of a table.", show_default=False
        ),
    ] = "",
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Time limit of each search.", show_default="none")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write the changed configuration.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List settings that do not concern a plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Price a configuration of another engine, and say what to change in it.

    Says what a step takes and whether it fits, the best plan of the same engine, and what each change saves, the
    easiest change first. -o writes the file with these changes and keeps its comments (scripts, TOML, YAML, JSON).

        plan advise train.toml --from torchtitan --devices 64 --hardware h100 -o better.toml
        plan advise pretrain.sh --devices 64
    """
    with reporting(as_json):
        from planner.api.advising import advice_on, changed_text
        from planner.api.engine_best import Patience
        from planner.cli.tracing import traced
        from planner.plan.writing import check_place, write_atomically
        from planner.report.search import stopped_text

        if output is not None:
            check_place(output)
        asked = Asked(
            file=file, engine=source, model=model, devices=devices, recipe=recipe, hardware=hardware, cluster=cluster,
            software=software, sequence_length=seq_len,
        )  # fmt: skip
        with waiting() as wait:
            wait.phase("reading and tracing")
            found = imported(asked, traced, lambda note: say(f"note: {note}", err=True))
            wait.phase("the best of its engine")
            with stoppable(lambda: wait.phase("stopping")) as stopped:
                patience = Patience(time_limit=time_limit, on_progress=wait.searched, cancelled=stopped)
                advice = advice_on(found, patience)
        written = refusal = None
        if output is not None and advice.best is not None:
            try:
                written = changed_text(advice)
            except PlannerError as error:
                refusal = error
        if output is not None and written is not None:
            mode = (output if output.exists() else advice.found.path).stat().st_mode & 0o777
            write_atomically(output, written)
            output.chmod(mode)  # keeps the file's permissions
        if refusal is not None and as_json:
            raise refusal
        if as_json:
            write_json("plan advise", _content(advice, None if written is None else output))
        else:
            _print(advice, output, written, verbose)
            if advice.stopped_by is not None:
                say(f"{stopped_text(advice.stopped_by)}: there may be better ones.")
            if refusal is not None:  # the result is still worth reading
                raise refusal


def _content(advice: "Advice", output: Path | None) -> dict[str, Any]:
    found, reading = advice.found, advice.found.reading
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "engine": found.target.name,
        "model": found.model,
        "devices": reading.description.devices,
        "software": found.bound.plan.cluster.software,
        "unmodelled": list(reading.unmodelled),
        "notes": list(reading.notes),
        "unread": list(reading.unread),
        "now": _figures(found.bound.plan.prediction),
        "best": None if advice.best is None else _figures(advice.best.bound.plan.prediction),
        "gap": None if advice.best is None else advice.best.gap,
        "changes": [
            {
                "change": one.name,
                "here": one.here,
                "there": one.there,
                "saved_seconds": one.seconds,
                **_figures(one.after),
            }
            for one in advice.changes
        ],
        "file": None if output is None else str(output),
        "stopped_by": advice.stopped_by,
    }


def _figures(prediction: "Prediction") -> dict[str, Any]:
    return {
        "step_seconds": prediction.step_seconds,
        "peak_bytes": prediction.peak_bytes,
        "fits": prediction.peak_bytes <= prediction.capacity_bytes,
    }


def _print(advice: "Advice", output: Path | None, written: str | None, verbose: bool) -> None:
    from planner.report.advised import print_advice
    from planner.report.imported import Remarks, print_remarks, print_unmodelled
    from planner.report.search import proof_text

    found, reading, console = advice.found, advice.found.reading, console_of()
    remarks = Remarks(unmodelled=reading.unmodelled, notes=reading.notes, unread=reading.unread)
    print_unmodelled(console, remarks)
    best = None if advice.best is None else advice.best.bound
    rows = [(one.name, one.here, one.there, one.seconds, one.after) for one in advice.changes]
    proof = ""
    if advice.best is not None and advice.best.gap is not None:
        proof = proof_text("feasible", advice.best.gap, "in the engine's search space", advice.best.assumed)
    print_advice(console, found.target.name, found.bound, best, rows, proof)
    print_remarks(console, remarks, verbose)
    if written is not None:
        lines = difflib.unified_diff(
            found.text.splitlines(), written.splitlines(), str(found.path), str(output), "", "", 1, ""
        )
        console.print("\n" + "\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    elif output is not None and advice.best is None:
        console.print(f"\n{output} was not written: there is nothing to change", soft_wrap=True)
