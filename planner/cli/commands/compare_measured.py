"""`plan compare PLAN`: compares a prediction with a record, the log of an engine, or a trace."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.commands.show import naming, traced_again
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.waiting import waiting

if TYPE_CHECKING:
    from planner.api.measured import MeasuredComparison
    from planner.plan.compare.classes import ClassTime
    from planner.plan.compare.kineto import TracedClass
    from planner.plan.compare.measured import Clock, Term

SCHEMA_VERSION = 1  # of the object that `plan compare PLAN --json` prints

_NAMES = {
    "transfer": "stage transfer and pipeline bubble",
    "update": "optimizer",
    "reduction": "gradient reduction and weight gathering",
    "waiting": "waiting for slower ranks",
    "rest": "other",
}
"""Terms of a record that the terminal names as in the report of a plan."""

_IN_TRACES = {
    **_NAMES,
    "computation": "forward and backward",
    "communication": "communication (with gradient reduction and weight gathering)",
}
"""The same of a trace, whose terms are coarser."""


def compare_measured(
    plan_file: Path,
    *,
    record: Path | None,
    log: Path | None,
    engine: str | None,
    trace: Path | None,
    clock: "Clock",
    hardware: str | None,
    as_json: bool,
) -> None:
    """Compare a plan with one measurement; `hardware` is the file of its profile, if that is not a packaged one. Raises
    RequestError unless exactly one measurement is given."""
    from planner.api.measured import Measurement, classes_of, compared_with
    from planner.plan.file import load_plan

    plan = load_plan(plan_file)

    def classes() -> dict[str, float]:
        with waiting() as wait, naming(plan_file):
            wait.phase("tracing the model")
            return classes_of(plan, hardware, lambda: traced_again(plan, None), mean=record is not None)

    measured = Measurement(record=record, log=log, engine=engine, trace=trace, clock=clock)
    found = compared_with(plan, measured, hardware, classes)
    if as_json:
        write_json("plan compare", content(found))
    else:
        _show(found)


def content(shown: "MeasuredComparison") -> dict[str, Any]:
    """What `--json` prints."""
    found, flops = shown.compared, shown.flops
    return {
        "schema_version": SCHEMA_VERSION,
        "clock": found.clock,
        "predicted_seconds": found.predicted_seconds,
        "measured_seconds": found.measured_seconds,
        "error": found.error,
        "low_seconds": found.low_seconds,
        "high_seconds": found.high_seconds,
        "inside": found.inside,
        "terms": [{**asdict(one), "wrong": one.wrong} for one in found.terms],
        "memory": [{**asdict(one), "wrong": one.wrong} for one in found.memory],
        "predicted_peak_bytes": found.predicted_peak_bytes,
        "measured_peak_bytes": found.measured_peak_bytes,
        "peak_kind": found.peak_kind,
        "predicted_tflops": None if flops is None else flops[0],
        "measured_tflops": None if flops is None else flops[1],
        "classes": [asdict(one) for one in shown.classes],
        "collectives": [asdict(one) for one in shown.collectives],
        "measured_steps": shown.steps,
    }


def _show(shown: "MeasuredComparison") -> None:
    from planner.plan.compare.measured import COUNTS, WRONG
    from planner.report.table import table_of
    from planner.report.units import bytes_text, seconds_text

    console, found, flops = console_of(), shown.compared, shown.flops
    names = _IN_TRACES if any(one.name == "computation" for one in found.terms) else _NAMES
    limits = f"{WRONG:.0%} of the part and {COUNTS:.0%} of the step"
    table = table_of("", "time", "predicted", "measured", "error", "error / step", "")
    for column in table.columns[1:5]:
        column.justify = "right"
    for one in found.terms:
        table.add_row(names.get(one.name, one.name), *_cells(one, seconds_text))
    error = f"{found.error:+.1%}"
    table.add_row(
        "step time", seconds_text(found.predicted_seconds), seconds_text(found.measured_seconds), error, error, ""
    )
    console.print(table)
    memory = table_of("", "memory", "predicted", "measured", "error", "error / sum", "")
    for column in memory.columns[1:5]:
        column.justify = "right"
    for one in found.memory:
        memory.add_row(one.name, *_cells(one, bytes_text))
    if found.measured_peak_bytes is not None:
        off = f"{found.predicted_peak_bytes / found.measured_peak_bytes - 1:+.1%}"
        peaks = bytes_text(found.predicted_peak_bytes), bytes_text(found.measured_peak_bytes)
        memory.add_row("peak memory", *peaks, off, "", "")
    if memory.row_count:
        console.print(memory)
        console.print(f"Measured peak memory: {found.peak_kind}.", soft_wrap=True)
    if flops is not None:
        console.print(f"TFLOP/s per device: {flops[0]:.1f} predicted (model FLOPs), {flops[1]:.1f} in the log.")
    _show_classes(shown.classes)
    _show_collectives(shown.collectives)
    console.print(shown.steps_words, soft_wrap=True)
    if found.low_seconds is not None and found.high_seconds is not None:
        ends = f"{seconds_text(found.low_seconds)} to {seconds_text(found.high_seconds)}"
        console.print(f"The measured step is {'inside' if found.inside else 'OUTSIDE'} the 80% interval, {ends}.")
    if found.wrong:
        parts = "; ".join(f"{names.get(one.name, one.name)} {one.share:+.1%}" for one in found.wrong)
        console.print(f"Errors above {limits}, as a share of the step: {parts}.", soft_wrap=True)
    elif found.terms:
        console.print(f"No error is above {limits}.", soft_wrap=True)


def _cells(one: "Term", text: Any) -> tuple[str, ...]:
    off = f"{one.predicted / one.measured - 1:+.1%}" if one.measured else "-"
    sign = "-" if one.measured < 0 else ""
    return (
        text(one.predicted),
        f"{sign}{text(abs(one.measured))}",
        off,
        f"{one.share:+.1%}",
        "wrong" if one.wrong else "",
    )


def _show_classes(classes: "Sequence[ClassTime]") -> None:
    from planner.report.table import table_of
    from planner.report.units import seconds_text

    if not classes:
        return
    counted = any(one.calls is not None for one in classes)
    table = table_of("", "operator class", "predicted", "measured", *(("kernels",) if counted else ()))
    for column in table.columns[1:]:
        column.justify = "right"
    for one in classes:
        cells = ["-" if seconds is None else seconds_text(seconds) for seconds in (one.predicted, one.measured)]
        table.add_row(one.name, *cells, *(("-" if one.calls is None else f"{one.calls:,.0f}",) if counted else ()))
    console_of().print(table)


def _show_collectives(collectives: "Sequence[TracedClass]") -> None:
    from planner.report.table import table_of
    from planner.report.units import seconds_text

    if not collectives:
        return
    table = table_of("", "collective", "calls", "measured", "exposed")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in collectives:
        table.add_row(one.name, f"{one.calls:,.0f}", seconds_text(one.seconds), seconds_text(one.exposed))
    console_of().print(table)
