"""`plan compare PLAN`: compares a prediction with a record, the log of an engine, or a trace."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.commands.show import naming, traced_again
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.waiting import waiting
from planner.errors import RequestError

if TYPE_CHECKING:
    from hardware_profiles import Machine
    from hardware_profiles.run_record import MeasuredRun
    from planner.plan.compare.classes import ClassTime
    from planner.plan.compare.kineto import TracedClass
    from planner.plan.compare.measured import Clock, RunComparison, Term
    from planner.plan.compare.training_log import LoggedRun
    from planner.plan.plan import Plan
    from planner.validation.reading.cells import PeakKind

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


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is shown: the comparison; TFLOP/s per device, predicted and logged; seconds by operator class, and
    collectives, of a profiler; the number of measured `steps`, and how the measured step is made from them."""

    compared: "RunComparison"
    flops: tuple[float, float] | None = None
    classes: "tuple[ClassTime, ...]" = ()
    collectives: "tuple[TracedClass, ...]" = ()
    steps: int
    steps_words: str


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
    from planner.plan.file import load_plan

    plan = load_plan(plan_file)
    if sum(one is not None for one in (record, log, trace)) != 1 or (log is None) != (engine is None):
        raise RequestError(
            "give the plan and one measurement: a record of plan run --measure, --log FILE --from ENGINE, or --trace"
            " FILE"
        )
    if clock != "wall" and record is None:
        raise RequestError(f"--clock {clock}: logs and traces have no CPU seconds; leave it out, or give a record")
    if record is not None:
        found = _recorded(plan_file, plan, record, clock, hardware)
    elif trace is not None:
        found = _traced(plan_file, plan, trace, hardware)
    else:
        assert log is not None
        assert engine is not None
        found = _logged(plan, log, engine, hardware)
    if as_json:
        write_json("plan compare", content(found))
    else:
        _show(found)


def _recorded(plan_file: Path, plan: "Plan", record: Path, clock: "Clock", hardware: str | None) -> Found:
    from hardware_profiles.run_record import load_run_record, middle_half
    from planner.plan.compare.classes import class_times
    from planner.plan.compare.measured import compare_run

    run = load_run_record(record)
    compared = compare_run(plan, run, clock)
    said = _predicted_classes(plan_file, plan, hardware) if run.operators else {}
    return Found(
        compared=compared,
        classes=class_times(said, run.operators),
        steps=len(middle_half(run.step_seconds)),
        steps_words=_recorded_steps(run),
    )


def _recorded_steps(run: "MeasuredRun") -> str:
    """How the measured step is made from a record, and the median that `plan run` shows."""
    from hardware_profiles.run_record import middle_half
    from planner.report.units import seconds_text

    ends = (seconds_text(seconds) for seconds in (min(run.step_seconds), max(run.step_seconds)))
    return (
        f"Measured: mean of {len(middle_half(run.step_seconds))} of {len(run.step_seconds)} steps, the middle half by"
        f" step time. All steps: {' to '.join(ends)}, median {seconds_text(statistics.median(run.step_seconds))}."
    )


def _traced(plan_file: Path, plan: "Plan", trace: Path, hardware: str | None) -> Found:
    """A trace compared with its plan."""
    from planner.plan.compare.classes import class_times
    from planner.plan.compare.kineto import read_trace
    from planner.plan.compare.traced import compare_trace

    with waiting() as wait:
        wait.phase("reading the trace")
        run = read_trace(trace)
    seconds = {one.name: one.seconds for one in run.kernels}
    calls = {one.name: one.calls for one in run.kernels}
    return Found(
        compared=compare_trace(plan, run),
        classes=class_times(_predicted_classes(plan_file, plan, hardware), seconds, calls),
        collectives=run.collectives,
        steps=run.steps,
        steps_words=f"Measured: mean of {run.steps} step{'s' if run.steps > 1 else ''} of the trace.",
    )


def _predicted_classes(plan_file: Path, plan: "Plan", hardware: str | None) -> dict[str, float]:
    """Predicted seconds of a step by operator class, which needs the model; empty if the model is missing."""
    from planner.errors import ModelError
    from planner.plan.binding.bind import bind
    from planner.plan.compare.classes import predicted_classes

    with waiting() as wait, naming(plan_file):
        wait.phase("tracing the model")
        try:
            model = traced_again(plan, None)
        except ModelError:  # a user's own model without a graph in the plan: measured classes only
            return {}
        return predicted_classes(bind(plan, model.graph, model.batch), _machine(plan, hardware))


def _machine(plan: "Plan", hardware: str | None) -> "Machine":
    """The plan's machine, from the file of its profile if given. Raises RequestError for another machine: parts would
    be predicted by the plan's, operator classes by this one."""
    from planner.plan.binding.machine import machine_of

    machine = machine_of(plan.cluster, hardware)
    if hardware is not None and (machine.name, machine.digest()) != (plan.cluster.profile, plan.cluster.digest):
        raise RequestError(
            f"--hardware {hardware} differs from the profile of the plan, '{plan.cluster.profile}' as it was when the"
            f" plan was made; give that profile, or run plan replan PLAN --hardware {hardware} -o FILE and compare FILE"
        )
    return machine


def _logged(plan: "Plan", log: Path, engine: str, hardware: str | None) -> Found:
    """A logged run compared with its plan: step time, peak, and TFLOP/s per device."""
    from hardware_profiles import parts_of
    from planner.plan.compare.measured import RunComparison, summed
    from planner.plan.compare.training_log import read_log
    from planner.validation.pricing.peak import Peaks, peak_of

    run, prediction = read_log(log, engine, plan), summed(plan.prediction)
    kind: PeakKind = "allocated" if run.peak_kind == "allocated" else "reserved"
    flops = prediction.model_flops / prediction.step_seconds / plan.cluster.devices / 1e12
    machine = parts_of(_machine(plan, hardware))[0]
    compared = RunComparison(
        clock="wall",
        predicted_seconds=prediction.step_seconds,
        measured_seconds=run.seconds,
        low_seconds=prediction.low_seconds,
        high_seconds=prediction.high_seconds,
        terms=(),
        memory=(),
        predicted_peak_bytes=peak_of(Peaks.of(prediction), machine.device, machine.software, kind),
        measured_peak_bytes=run.peak_bytes,
        peak_kind=run.peak_kind,
    )
    return Found(
        compared=compared,
        flops=None if run.tflops is None else (flops, run.tflops),
        steps=len(run.step_seconds),
        steps_words=_logged_steps(run),
    )


def _logged_steps(run: "LoggedRun") -> str:
    """How the measured step is made from a log."""
    from planner.plan.compare.training_log import WARM_UP

    count = len(run.step_seconds)
    steps = f"{count} step{'s' if count > 1 else ''} of the log"
    if not run.warm:
        found = f"Measured: median of {steps}, the first ones after the start, which take longer: log more steps."
    elif run.starts > 1:
        found = f"Measured: median of {steps}, without the first {WARM_UP} after each of {run.starts} starts."
    else:
        found = f"Measured: median of {steps}, without the first {WARM_UP}."
    return f"{found} Left out: {run.others} lines of runs that differ from the plan." if run.others else found


def content(shown: Found) -> dict[str, Any]:
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


def _show(shown: Found) -> None:
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
