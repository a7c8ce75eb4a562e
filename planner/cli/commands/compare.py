"""`plan compare`: cases side by side (`compare_cases.py`), or a prediction compared with a measured run, part by part
(`compare_measured.py`)."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.commands.compare_cases import (
    AsCsv,
    CheckpointTime,
    Failures,
    PerReplica,
    Price,
    RestartTime,
    Tokens,
    compared,
)
from planner.cli.commands.compare_measured import compare_measured
from planner.cli.errors import reporting
from planner.cli.option_kinds import JOB
from planner.cli.options import DEFAULT_HARDWARE, GlobalBatch, Levels, Options, Precision, SeqLen
from planner.cli.output import write_json
from planner.cli.spoken import hardware_of, model_of, parse_counted
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.plan.compare.measured import Clock

SCHEMA_VERSION = 1  # of the object that `plan compare --engines --json` prints


ByClock = Annotated[
    str,
    typer.Option(
        metavar="wall|cpu",
        help="Wall time, or CPU time for computation. CPU time suits machines that other jobs use too.",
    ),
]


def clock_of(word: str) -> "Clock":
    """A clock by its name. Raises RequestError."""
    if word not in ("wall", "cpu"):
        raise RequestError(f"--clock '{word}': give wall or cpu")
    return "cpu" if word == "cpu" else "wall"


def compare(
    plan_file: Annotated[
        Path | None, typer.Argument(help="Plan file to compare with a measurement, or as the job of --engines.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Argument(help="Record of the plan, written by plan run PLAN --measure FILE.")
    ] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Log of another engine that ran the plan.")] = None,
    engine: Annotated[
        str | None, typer.Option("--from", metavar="ENGINE", help="Engine of --log: megatron, nemo or torchtitan.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trace of torch.profiler of a run of the plan (JSON, or gzip).")
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
    cluster: Levels = None,
    precision: Precision = None,
    per_replica: PerReplica = None,
    price: Price = None,
    failures: Failures = 0.0,
    checkpoint_time: CheckpointTime = 0.0,
    restart_time: RestartTime = 0.0,
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Engines to search the best plan for, as in megatron,torchtitan.", rich_help_panel=JOB
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_csv: AsCsv = False,
) -> None:
    """Compare hardware, numbers of devices, software and models; or compare a plan with a measured run.

    With --model: searches the best plan of every combination, shows step time, days, device-hours, cost, memory left
    and scaling, and marks the fastest and the cheapest. With --engines: searches the best plan that each engine can
    run. With a plan file: compares the prediction with a measured run, part by part. The parts sum to the step on both
    sides, so their errors sum to the error of the step.

        plan compare --model llama70b --devices 64 --hardware h100,b200 --tokens 15T --price 4
        plan compare --model llama8b --devices 32,64,128 --tokens 1T --failures 5e-4 --checkpoint-time 60
        plan compare --model llama70b --devices 64 --engines megatron,torchtitan,torch
        plan compare tiny.json tiny.run.json
        plan compare next.json next.run.json --hardware mine.toml
        plan compare llama8b.json --log train.log --from torchtitan
        plan compare llama8b.json --trace trace.json.gz
    """
    with reporting(as_json):
        about_cost = (software, tokens, price) if engines is not None else (software, tokens, price, model, devices)
        money = any(one is not None for one in about_cost) or failures or checkpoint_time or restart_time or as_csv
        job = Options(
            cluster=cluster, seq_len=seq_len, global_batch=global_batch, precision=precision, per_replica=per_replica,
            as_json=as_json,
        )  # fmt: skip
        measurement = {"a record": measured, "--log": log, "--from": engine, "--trace": trace}
        strange = [name for name, one in measurement.items() if one is not None]
        strange += [f"--clock {clock}"] if clock_of(clock) != "wall" else []
        if strange and (engines is not None or plan_file is None):
            raise RequestError(
                f"{', '.join(strange)}: a measurement is compared with a plan file alone; leave it out, or write plan"
                " compare PLAN with it"
            )
        if engines is not None:
            if money:
                raise RequestError(
                    f"--engines compares engines for one job; give only --model, --devices, --hardware, {_OF_JOB} with"
                    " it"
                )
            _compare_engines(plan_file, engines, _on_machine(job, model, devices, hardware))
            return
        if plan_file is None:
            if model is None:
                raise RequestError("give a plan file and a measurement, or --model NAME and --devices N")
            compared(
                model, hardware or DEFAULT_HARDWARE, devices, software, tokens, price, failures, checkpoint_time,
                restart_time, job, as_csv=as_csv,
            )  # fmt: skip
            return
        if money or _decided(job):
            raise RequestError(
                f"{plan_file}: with a plan file give only a measurement; --model searches plans, without a file"
                f"{', and --csv prints them: plan compare ... --csv > FILE' if as_csv else ''}"
            )
        compare_measured(
            plan_file, record=measured, log=log, engine=engine, trace=trace, clock=clock_of(clock),
            hardware=hardware_of(hardware), as_json=as_json,
        )  # fmt: skip


_OF_JOB = "--cluster, --seq-len, --global-batch, --precision and --per-replica"


def _decided(job: Options) -> bool:
    """Whether one of `_OF_JOB` is given."""
    return any(name != "as_json" for name in job.given())


def _on_machine(job: Options, model: str | None, devices: str | None, hardware: str | None) -> Options:
    """The job that engines are compared for."""
    return replace(
        job,
        model=None if model is None else model_of(model),
        devices=None if devices is None else parse_counted("--devices", devices),
        hardware=hardware_of(hardware),
    )


def _compare_engines(plan_file: Path | None, engines: str, job: Options) -> None:
    from planner.cli.commands.compare_engines import compared, show

    if (plan_file is None) == (job.model is None):
        raise RequestError("--engines: give either a plan file, or --model and --devices")
    if plan_file is not None and _decided(replace(job, hardware=None)):
        raise RequestError(f"{plan_file}: the plan decides the job; leave out --devices, {_OF_JOB}")
    _, rows = compared(plan_file, engines, job)
    if job.as_json:
        rows_content = [row.content() for row in rows]
        write_json("plan compare ENGINES", {"schema_version": SCHEMA_VERSION, "engines": rows_content})
    else:
        show(rows)
