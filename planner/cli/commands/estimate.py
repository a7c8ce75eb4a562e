"""`plan estimate`: prices one configuration, or a plan file on its own machine or another one."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.answer import Answer
from planner.cli.commands import plan as planning
from planner.cli.commands import repricing
from planner.cli.errors import reporting
from planner.cli.limiting import within_limits
from planner.cli.machines import fewest_stages
from planner.cli.modes import applied
from planner.cli.options import Options, flag, taking_options
from planner.cli.requesting import DEGREES, check, request_of, retracing
from planner.cli.searching import find, telling
from planner.cli.values import parse_mesh
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.plan.layout.roles import Roles
    from planner.strategy_search.finalists.proofs import Ranked

Choice = tuple[str, str, str]


@taking_options
def estimate(
    options: Options,
    plan_file: Annotated[
        Path | None, typer.Argument(help="A plan file to price, in place of --model and degrees.")
    ] = None,
) -> None:
    """Predict time and memory of one configuration, or of a plan file.

    A degree that you do not give is 1, the data-parallel degree takes the remaining devices, and ZeRO is 0 (1 with
    --zero-by).
    Micro-batches, recomputation and sequence parallelism are searched. A plan file is priced for its own hardware, or
    for --hardware. Only -o writes a plan.

        plan estimate --model llama70b --devices 64 --tensor 8 --pipeline 8 --zero 1
        plan estimate llama70b-64.json --hardware a100-80gb
    """
    with reporting(options.as_json):
        if plan_file is not None:
            repricing.price_file(plan_file, options)
        elif options.model is None:
            raise RequestError("missing --model NAME with degrees, or a plan file")
        else:
            estimate_model(options)


def estimate_model(options: Options) -> None:
    """Evaluate one configuration, report it, and write the plan if requested."""
    started = time.perf_counter()
    console = planning.progress_console(options)
    with planning.undisturbed():
        options = applied(options)
        check(options)
        planning.check_output(options)
        exact, choices = completed(options)
        with within_limits(options), telling(options.verbose):
            request = request_of(exact, console)
            found = find(request, console, retrace=retracing(exact, request))
        seconds = time.perf_counter() - started
        files = planning.write_plans(exact, found) if options.output else ()
    answer = Answer(options=exact, request=request, found=found, files=files, seconds=seconds)
    searched = _searched(options, answer.shown[0], answer.roles[0])
    planning.show(replace(answer, choices=(*choices, *searched)))


def completed(options: Options) -> tuple[Options, tuple[Choice, ...]]:
    """The options with all degrees, and the filled-in values."""
    if options.pareto or options.objective == "cost":
        given = "--pareto" if options.pareto else "--objective cost"
        raise RequestError(
            f"{given} compares configurations, estimate prices one; leave it out, or use plan without it"
        )
    if options.engine is not None:
        raise RequestError(
            f"--for {options.engine} needs a search: use plan search, or price one configuration with --software"
        )
    wanted = _by_mesh(options) if options.mesh is not None else _by_degrees(options)
    from costmodels import SCHEDULES

    known = SCHEDULES.get(options.schedule or "1f1b")
    usual = ("auto", "searched") if known and known.interleaved else ("1", "default")
    usual = ("2", "in a V") if known and known.v_shaped else usual
    wanted.setdefault("virtual_stages", usual)
    wanted.setdefault("offload", ("none", "default"))
    missing = {name: found for name, found in wanted.items() if getattr(options, name) is None}
    values = {name: value for name, (value, _) in missing.items()}
    choices = tuple(
        (name.replace("_", " ").replace("zero", "ZeRO"), str(value), why) for name, (value, why) in missing.items()
    )
    values["simplicity"] = options.simplicity or "0"  # prices this configuration with its best open choices
    return replace(options, **values), choices  # type: ignore[arg-type]  # of the types of the fields


def _by_mesh(options: Options) -> dict[str, tuple[object, str]]:
    """The pipeline takes the devices that the mesh leaves over."""
    assert options.mesh is not None
    size, devices = math.prod(parse_mesh(options.mesh)), options.device_count
    if devices % size:
        raise RequestError(f"--mesh {options.mesh} has {size} devices, which do not divide {devices}; change either")
    return {"pipeline": (devices // size, "from the devices")}


def _by_degrees(options: Options) -> dict[str, tuple[object, str]]:
    """Data parallelism takes the devices that the other degrees leave over; missing degrees are 1. Experts use data- or
    context-parallel devices."""
    least = {"pipeline": fewest_stages(options.profile)}
    degrees = {name: getattr(options, name) or least.get(name, 1) for name in DEGREES if name != "data"}
    from planner.sharding.update import SLICES

    rest, devices = math.prod(degrees.values()), options.device_count
    if options.data is not None and options.data * rest != devices:
        words = " x ".join(f"{flag(name)} {degree}" for name, degree in {"data": options.data, **degrees}.items())
        raise RequestError(
            f"{words} = {options.data * rest} must make the {devices} devices; leave out --data, or change a degree"
        )
    data: dict[str, tuple[object, str]] = {"data": (devices // rest, "from the devices")}
    others: dict[str, tuple[object, str]] = {name: (degree, "default") for name, degree in degrees.items()}
    zero = (0 if options.zero_by in (None, SLICES) else 1, "default")  # owning whole parameters is ZeRO-1
    return {**data, **others, "expert": (1, "default"), "zero": zero}


def _searched(options: Options, best: "Ranked", found: "Roles") -> tuple[Choice, ...]:
    """The values that were left open, with their best choice."""
    from planner.plan.words import recomputation_words

    training = best.plan.training
    choices = []
    if options.micro_batches is None and options.micro_batch is None:
        choices.append(("micro-batches", f"{training.micro_batches} of {training.part} samples", "best"))
    if options.sequence_parallel is None and found.tensor > 1:
        choices.append(("sequence parallel", "yes" if found.sequence_parallel else "no", "best"))
    if options.recompute is None:
        choices.append(("recomputation", recomputation_words(best.plan), "best"))
    return tuple(choices)
