"""The main job: trace, search, report, write."""

import contextlib
import gc
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.errors import OUTPUT_SCHEMA_VERSION
from planner.errors import InfeasibleError, RequestError, unknown_name

if TYPE_CHECKING:
    from rich.console import Console

    from planner.plan.plan import Plan
    from planner.plan.roles import Roles
    from planner.search.request import SearchRequest
    from planner.search.search import Progress as SearchProgress
    from planner.search.search import SearchResult

SAMPLES_PER_DEVICE = 4  # of the default global batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line."""

    model: str
    devices: int
    hardware: str
    seq_len: int | None
    global_batch: int | None
    search: str
    precision: str | None
    optimizer: str
    pipeline: int | None
    micro_batches: int | None
    mesh: str | None
    recompute: str | None
    full_trace: bool
    output: str | None
    as_json: bool
    quiet: bool


def print_version() -> None:
    """The version of the planner."""
    from planner.plan.plan import PLANNER_VERSION

    sys.stdout.write(f"plan {PLANNER_VERSION}\n")


def make_plan(options: Options) -> None:
    """Plan, report and write the plan file."""
    from rich.console import Console

    from planner.plan.file import save_plan
    from planner.plan.roles import roles

    started = time.perf_counter()
    speak = not (options.as_json or options.quiet)
    console = Console(file=sys.stderr, quiet=not (speak and sys.stderr.isatty()))
    with _undisturbed():
        _check_words(options)
        request = _request(options, console)
        result = _search(request, console)
        seconds = time.perf_counter() - started
        path = Path(options.output or _default_name(options))
        found = roles(result.bound)
        save_plan(result.plan, path)
    if options.as_json:
        sys.stdout.write(json.dumps(_content(result, found, path, seconds), indent=1) + "\n")
    elif speak:
        _print(result, found, path, seconds)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Without the cyclic garbage collector, which finds nothing in a short run full of long-lived objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_words(options: Options) -> None:
    from planner.plan.plan import OPTIMIZERS, PRECISIONS, RECOMPUTATION
    from planner.search.request import ALGORITHMS

    for option, value, known in (
        ("--search", options.search, ALGORITHMS),
        ("--precision", options.precision, tuple(PRECISIONS)),
        ("--optimizer", options.optimizer, OPTIMIZERS),
        ("--recompute", options.recompute, RECOMPUTATION),
    ):
        if value is not None and value not in known:
            raise RequestError(unknown_name(f"value for {option}", value, known))


def _request(options: Options, console: "Console") -> "SearchRequest":
    from hardware_profiles import load_profile
    from planner.cli.tracing import traced
    from planner.models.zoo import build_model
    from planner.plan.plan import PRECISIONS, ModelReference
    from planner.search.request import SearchRequest
    from planner.search.space import Pinned

    cluster = load_profile(options.hardware).with_devices(options.devices)
    precision = options.precision or ("fp32" if cluster.device.device_type == "cpu" else "bf16")
    pinned = Pinned(
        stages=options.pipeline,
        mesh=_mesh(options.mesh),
        micro_batches=options.micro_batches,
        recompute=None if options.recompute is None else options.recompute == "full",
    )
    with console.status(f"tracing {options.model}"):
        model = build_model(options.model, dtype=PRECISIONS[precision], sequence_length=options.seq_len)
        graph = traced(model, full=options.full_trace)
    return SearchRequest(
        graph=graph,
        batch=model.batch,
        model=ModelReference(
            reference=options.model,
            sequence_length=model.sequence_length,
            parameters=graph.parameter_count(),
            fingerprint=graph.fingerprint(),
        ),
        cluster=cluster,
        global_batch=options.global_batch or SAMPLES_PER_DEVICE * options.devices,
        precision=precision,
        optimizer=options.optimizer,
        algorithm=options.search,
        pinned=pinned,
    )


def _mesh(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = text.lower().split("x")
    if not all(re.fullmatch("0*[1-9][0-9]{0,9}", word) for word in words):
        raise RequestError(
            f"--mesh '{text}' is not a mesh; write the sizes of its axes, slowest links first, as in 8x4"
        )
    sizes = tuple(int(word) for word in words if int(word) > 1)
    if len(sizes) > 2:
        raise RequestError(f"--mesh {text} has {len(sizes)} axes; a mesh has one or two, as in 8x4")
    return sizes


def _search(request: "SearchRequest", console: "Console") -> "SearchResult":
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from planner.report.units import seconds_text
    from planner.search.search import search

    columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.completed}/{task.total} {task.fields[best]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("search", total=None, best="")

        def show(progress: "SearchProgress") -> None:
            best = f"best {seconds_text(progress.best_seconds)}" if progress.best_seconds < float("inf") else ""
            bar.update(task, total=progress.total, completed=progress.done, best=best)

        try:
            return search(request, show if not console.quiet else _nothing)
        except InfeasibleError as error:
            raise InfeasibleError(f"{error}. {_advice(request)}") from error


def _advice(request: "SearchRequest") -> str:
    from planner.search.advice import changes

    found = [change.text for change in changes(request)]
    return f"It would fit with: {', or '.join(found)}" if found else "No number of devices was found that would fit it"


def _nothing(_: Any) -> None:
    """Progress of a run that nobody watches."""


def _default_name(options: Options) -> str:
    stem = options.model.replace(":", "-").replace(".", "-").replace("/", "-")
    return f"{stem}-{options.devices}.json"


def _content(result: "SearchResult", found: "Roles", path: Path, seconds: float) -> dict[str, Any]:
    """The machine-readable result. Seconds and bytes are plain numbers."""
    plan: Plan = result.plan
    prediction = plan.prediction
    length = plan.model.sequence_length
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "model": plan.model.reference,
        "parameters": plan.model.parameters,
        "hardware": plan.cluster.profile,
        "devices": plan.cluster.devices,
        "sequence_length": length,
        "global_batch": plan.training.global_batch,
        "precision": plan.training.precision,
        "optimizer": plan.training.optimizer,
        "step_seconds": prediction.step_seconds,
        "peak_bytes": prediction.peak_bytes,
        "capacity_bytes": prediction.capacity_bytes,
        "tokens_per_second_per_device": prediction.samples_per_second * length / plan.cluster.devices
        if length
        else None,
        "samples_per_second": prediction.samples_per_second,
        "model_flops_utilisation": prediction.model_flops_utilisation,
        "degrees": {
            "data": found.data,
            "tensor": found.tensor,
            "context": found.context,
            "pipeline": found.pipeline,
            "replicated": found.replicated,
        },
        "sequence_parallel": found.sequence_parallel,
        "optimizer_sharding": found.zero,
        "mesh": [{"axis": axis.axis, "size": axis.size, "role": axis.role} for axis in found.axes],
        "micro_batches": plan.training.micro_batches,
        "recomputation": found.recomputation,
        "time_seconds": dict(prediction.time),
        "memory_bytes": dict(prediction.memory),
        "search": {
            "algorithm": plan.provenance.search,
            "status": plan.provenance.status,
            "gap": plan.provenance.gap,
            "configurations": result.configurations,
            "tried": result.tried,
            "search_seconds": result.seconds,
            "total_seconds": seconds,
        },
        "plan_file": str(path),
    }


def _print(result: "SearchResult", found: "Roles", path: Path, seconds: float) -> None:
    from rich.console import Console

    from planner.report.terminal import print_plan

    console = Console(highlight=False)
    print_plan(console, result.bound, found, result.plan.prediction)
    console.print(
        f"\nSearched {result.tried} of {result.configurations} configurations in {result.seconds:.1f} s, the "
        "others cannot be faster"
        f" ({seconds:.1f} s in all); strategies inside a stage: {result.plan.provenance.status}"
    )
    console.print(
        f"Plan written to [bold]{path}[/bold]; run it with: plan run {shlex.quote(str(path))}", soft_wrap=True
    )
