"""`plan compare`: cases side by side (`compare_cases.py`), or a prediction beside what was measured, term by term."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.commands.compare_cases import (
    AsCsv,
    CheckpointTime,
    Failures,
    GlobalBatch,
    Price,
    RestartTime,
    SeqLen,
    Tokens,
    compared,
)
from planner.cli.errors import reporting
from planner.cli.option_kinds import JOB
from planner.cli.options import DEFAULT_HARDWARE, Options
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.spoken import hardware_of, model_of, parse_counted
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.plan.compare.measured import Clock, RunComparison, Term
    from planner.plan.plan import Plan
    from planner.validation.cells import PeakKind

SCHEMA_VERSION = 1  # of the object that `plan compare --json` prints


ByClock = Annotated[
    str,
    typer.Option(
        metavar="wall|cpu",
        help="Seconds of the clock or of the CPU. The latter, for what processes compute, on machines in use.",
    ),
]


def clock_of(word: str) -> "Clock":
    """A clock by its name. Raises RequestError."""
    if word not in ("wall", "cpu"):
        raise RequestError(f"--clock '{word}': it is wall or cpu")
    return "cpu" if word == "cpu" else "wall"


def compare(
    plan_file: Annotated[
        Path | None, typer.Argument(help="A plan file, to compare with what was measured, or for --engines.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Argument(help="What plan run PLAN --measure FILE has recorded of it.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="The log of another engine that has run it, instead.")] = None,
    engine: Annotated[
        str | None, typer.Option("--from", metavar="ENGINE", help="Of --log: megatron, nemo or torchtitan.")
    ] = None,
    clock: ByClock = "wall",
    model: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Models, separated by commas.", rich_help_panel=JOB)
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Numbers of devices, as in 32,64,128.", rich_help_panel=JOB)
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILES",
            help="Hardware, as in h100,h200,b200.",
            show_default=DEFAULT_HARDWARE,
            rich_help_panel=JOB,
        ),
    ] = None,
    software: Annotated[
        str | None,
        typer.Option(
            metavar="STACKS", help="Training stacks, as in megatron,fsdp.", show_default="pytorch", rich_help_panel=JOB
        ),
    ] = None,
    tokens: Tokens = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    price: Price = None,
    failures: Failures = 0.0,
    checkpoint_time: CheckpointTime = 0.0,
    restart_time: RestartTime = 0.0,
    engines: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="The best plan of each of these engines, for one job.", rich_help_panel=JOB),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_csv: AsCsv = False,
) -> None:
    """Compare hardware, numbers of devices, software and models; or a plan with what was measured of it.

    With --model the best plan of every combination is searched: time, days, device-hours, cost, memory left, scaling,
    and which is cheapest, which fastest; with --engines the best that each engine can be told. With a plan file the
    prediction stands beside a measured run, term by term; terms sum to the step on both sides, so what each is off by
    is its part of the error of the step.

        plan compare --model llama70b --devices 64 --hardware h100,b200 --tokens 15T --price 4
        plan compare --model llama8b --devices 32,64,128 --tokens 1T --failures 5e-4 --checkpoint-time 60
        plan compare --model llama70b --devices 64 --engines megatron,torchtitan,torch
        plan compare tiny.json tiny.run.json
        plan compare llama8b.json --log train.log --from torchtitan
    """
    with reporting(as_json):
        about_cost = (software, tokens, price) if engines is not None else (software, tokens, price, model, devices)
        money = any(one is not None for one in about_cost) or failures or checkpoint_time or restart_time or as_csv
        if engines is not None:
            if money:
                raise RequestError(
                    "--engines compares one job: --model, --devices, --hardware, --global-batch, --seq-len"
                )
            _compare_engines(plan_file, engines, _job(model, devices, hardware, global_batch, seq_len, as_json))
            return
        if plan_file is None:
            if model is None:
                raise RequestError("missing a plan file with what was measured, or --model NAME with --devices")
            compared(
                model, hardware or DEFAULT_HARDWARE, devices, software, tokens, price, failures, checkpoint_time,
                restart_time, seq_len, global_batch, as_json=as_json, as_csv=as_csv,
            )  # fmt: skip
            return
        if money or any(one is not None for one in (hardware, seq_len, global_batch)):
            raise RequestError(f"{plan_file}: with a plan file give what was measured; --model compares without one")
        _compare_run(plan_file, measured, log, engine, clock, as_json)


def _job(
    model: str | None,
    devices: str | None,
    hardware: str | None,
    global_batch: int | None,
    seq_len: int | None,
    as_json: bool,
) -> Options:
    """The job that engines are compared for."""
    return Options(
        model=None if model is None else model_of(model),
        devices=None if devices is None else parse_counted("--devices", devices),
        hardware=hardware_of(hardware),
        global_batch=global_batch,
        seq_len=seq_len,
        as_json=as_json,
    )


def _compare_run(
    plan_file: Path, measured: Path | None, log: Path | None, engine: str | None, clock: str, as_json: bool
) -> None:
    from hardware_profiles.run_record import load_run_record
    from planner.plan.compare.measured import compare_run
    from planner.plan.file import load_plan

    plan = load_plan(plan_file)
    if measured is not None:
        if log is not None or engine is not None:
            raise RequestError("--log and --from are for runs of other engines; leave out the record, or both")
        found, flops = compare_run(plan, load_run_record(measured), clock_of(clock)), None
    elif log is not None and engine is not None:
        found, flops = _logged(plan, log, engine)
    else:
        raise RequestError("missing what was measured: a record of plan run --measure, or --log FILE --from ENGINE")
    if as_json:
        write_json("plan compare", content(found, flops))
    else:
        _show(found, flops)


def _compare_engines(plan_file: Path | None, engines: str, job: Options) -> None:
    from planner.cli.commands.compare_engines import compared, show

    if (plan_file is None) == (job.model is None):
        raise RequestError("--engines: give a plan file, or --model and --devices; one of the two")
    _, rows = compared(plan_file, engines, job)
    if job.as_json:
        rows_content = [row.content() for row in rows]
        write_json("plan compare ENGINES", {"schema_version": SCHEMA_VERSION, "engines": rows_content})
    else:
        show(rows)


def _logged(plan: "Plan", log: Path, engine: str) -> "tuple[RunComparison, tuple[float, float] | None]":
    """A run that a log tells of beside its plan: the step and the peak; and TFLOP/s of a device, as predicted and as
    measured."""
    from hardware_profiles import parts_of
    from planner.plan.binding.machine import machine_of
    from planner.plan.compare.measured import RunComparison
    from planner.plan.compare.training_log import read_log
    from planner.validation.peak import peak_of

    run, prediction = read_log(log, engine, plan), plan.prediction
    kind: PeakKind = "allocated" if run.peak_kind == "allocated" else "reserved"
    flops = prediction.model_flops / prediction.step_seconds / plan.cluster.devices / 1e12
    found = RunComparison(
        clock="wall",
        predicted_seconds=prediction.step_seconds,
        measured_seconds=run.seconds,
        low_seconds=prediction.low_seconds,
        high_seconds=prediction.high_seconds,
        terms=(),
        memory=(),
        predicted_peak_bytes=peak_of(prediction, parts_of(machine_of(plan.cluster))[0].device, kind),
        measured_peak_bytes=run.peak_bytes,
        peak_kind=run.peak_kind,
    )
    return found, None if run.tflops is None else (flops, run.tflops)


def content(found: "RunComparison", flops: tuple[float, float] | None = None) -> dict[str, Any]:
    """What `--json` prints."""
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
    }


def _show(found: "RunComparison", flops: tuple[float, float] | None) -> None:
    from planner.report.table import table_of
    from planner.report.units import bytes_text, percent_text, seconds_text

    console = console_of()
    table = table_of("", "term", "predicted", "measured", "off by", "of the step", "")
    for column in table.columns[1:5]:
        column.justify = "right"
    for one in found.terms:
        table.add_row(*_cells(one, seconds_text))
    error = f"{found.error:+.1%}"
    table.add_row("step", seconds_text(found.predicted_seconds), seconds_text(found.measured_seconds), error, error, "")
    console.print(table)
    memory = table_of("", "memory", "predicted", "measured", "off by", "of these", "")
    for column in memory.columns[1:5]:
        column.justify = "right"
    for one in found.memory:
        memory.add_row(*_cells(one, bytes_text))
    if found.measured_peak_bytes is not None:
        off = f"{found.predicted_peak_bytes / found.measured_peak_bytes - 1:+.1%}"
        peaks = bytes_text(found.predicted_peak_bytes), bytes_text(found.measured_peak_bytes)
        memory.add_row("peak", *peaks, off, "", "")
    if memory.row_count:
        console.print(memory)
        console.print(f"The measured peak counts what is {found.peak_kind}.", soft_wrap=True)
    if flops is not None:
        console.print(f"TFLOP/s of a device: {flops[0]:.1f} predicted, of the model alone; {flops[1]:.1f} by the log.")
    if found.low_seconds is not None and found.high_seconds is not None:
        ends = f"{seconds_text(found.low_seconds)} to {seconds_text(found.high_seconds)}"
        console.print(f"The interval, {ends}, {'held' if found.inside else 'did NOT hold'}.")
    if found.wrong:
        parts = ", ".join(f"{one.name} {one.share:+.1%}" for one in found.wrong)
        console.print(f"Wrong, with what of the step each is off by: {parts}.", soft_wrap=True)
    elif found.terms:
        console.print(f"No term is off by more than a tenth of itself and {percent_text(0.02)} of the step.")


def _cells(one: "Term", text: Any) -> tuple[str, ...]:
    off = f"{one.predicted / one.measured - 1:+.1%}" if one.measured else "-"
    sign = "-" if one.measured < 0 else ""
    return (
        one.name,
        text(one.predicted),
        f"{sign}{text(abs(one.measured))}",
        off,
        f"{one.share:+.1%}",
        "wrong" if one.wrong else "",
    )
