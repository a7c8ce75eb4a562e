"""`plan report`: a plan as a page to look at, and as a trace for profilers."""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.errors import OUTPUT_SCHEMA_VERSION
from planner.cli.errors import reporting as errors_reported
from planner.cli.output import write_json
from planner.cli.showing import Hardware, naming, traced_again
from planner.errors import InfeasibleError, RequestError

if TYPE_CHECKING:
    from hardware_profiles import Cluster
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel
    from planner.plan.bind import BoundPlan
    from planner.plan.plan import Plan
    from planner.plan.verify import Verdict
    from planner.report.data import Choice, Choices, Reported
    from planner.search.request import SearchRequest
    from planner.search.search import SearchResult

SEARCH_SECONDS = 30.0
"""How long other plans are searched where nothing else is asked for."""


def report(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.", show_default="PLAN.html"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the timeline of a step as trace events, for Perfetto and chrome://tracing."
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="Whether to search other plans to compare with; it does.")
    ] = True,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Search other plans for that long.", min=0.0)
    ] = SEARCH_SECONDS,
    hardware: Hardware = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print what the page shows as JSON on stdout; writes a page only with -o."),
    ] = False,
) -> None:
    """Write a plan as one page: timeline, memory, where the time goes, blocks, the cluster, other plans, trust.

    The file needs no network. With --trace and without -o only the trace is written.

    [bold]plan report llama70b-64.json -o report.html[/bold]

    [bold]plan report llama70b-64.json --trace trace.json[/bold]
    """
    with errors_reported(as_json):
        page_file = output if output is not None or trace is not None or as_json else plan_file.with_suffix(".html")
        for path in (page_file, trace):
            if path is not None and path.resolve() == plan_file.resolve():
                raise RequestError(f"{path} is the plan file itself; name another file")
        wanted = search and (page_file is not None or as_json)
        found = _reported(plan_file, hardware, time_limit if wanted else None)
        _write(found, page_file, trace, as_json)


def _reported(plan_file: Path, hardware: str | None, time_limit: float | None) -> "Reported":
    """The report of a plan file; `time_limit` None searches no other plans."""
    from hardware_profiles import of_one_kind
    from planner.plan.file import load_plan
    from planner.plan.machine import machine_of
    from planner.plan.verify import verify
    from planner.report.data import report_of

    plan = load_plan(plan_file)
    with naming(plan_file):
        cluster = of_one_kind(machine_of(plan.cluster, hardware), "report")
        model, graph = traced_again(plan)
        verdict = verify(plan, graph, model.batch, cluster)
    choices = None if time_limit is None else _choices(verdict, model, graph, cluster, time_limit)
    return report_of(verdict.bound, verdict.prediction, cluster, remarks=_remarks(verdict), choices=choices)


def _remarks(verdict: "Verdict") -> tuple[str, ...]:
    """What is wrong with a plan, in sentences."""
    from planner.report.units import bytes_text

    missing = verdict.prediction.peak_bytes - verdict.prediction.capacity_bytes
    lacking = verdict.outside or f"the fullest device lacks {bytes_text(missing)}"
    fits = () if verdict.fits else (f"The plan does not fit: {lacking}.",)
    return (*fits, *(f"The plan was changed since it was priced: {remark}." for remark in verdict.remarks))


def _write(found: "Reported", page_file: Path | None, trace: Path | None, as_json: bool) -> None:
    from planner.report.trace import trace_events

    if page_file is not None:
        from planner.report.html import page

        _save(page_file, page(found.report))
    if trace is not None:
        _save(trace, json.dumps(trace_events(found.report.job, found.timeline), separators=(",", ":")) + "\n")
    if as_json:
        write_json({**content_of(found), "page": _name(page_file), "trace": _name(trace)})
        return
    if page_file is not None:
        typer.echo(f"Report written to {page_file}")
    if trace is not None:
        typer.echo(f"Trace written to {trace}; open it on https://ui.perfetto.dev or in chrome://tracing")


def _name(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from error


def content_of(found: "Reported") -> dict[str, Any]:
    """What a page shows, for programs."""
    return {"schema_version": OUTPUT_SCHEMA_VERSION, **dataclasses.asdict(found.report)}


def _choices(
    verdict: "Verdict", model: "BuiltModel", graph: "OperatorGraph", cluster: "Cluster", time_limit: float
) -> "Choices":
    """The front of time against memory for the same job, and this plan on it."""
    from rich.console import Console

    from planner.report.data import Choice, Choices
    from planner.report.units import seconds_text
    from planner.search.objectives import front

    ends = time.monotonic() + time_limit
    own = Choice(
        step_seconds=verdict.prediction.step_seconds,
        peak_bytes=verdict.prediction.peak_bytes,
        words=_words(verdict.bound),
        this=True,
    )
    late = f"The search was stopped after {seconds_text(time_limit)}, so there may be more and faster ones."
    console = Console(file=sys.stderr, quiet=not sys.stderr.isatty())
    request = _request(verdict.bound.plan, model, graph, cluster)
    try:
        with console.status(f"searching other plans, {seconds_text(time_limit)} at most"):
            found = front(request, cancelled=lambda: time.monotonic() > ends)
    except KeyboardInterrupt:  # the page is worth having all the same
        return Choices(plans=(own,), note="The search for other plans was interrupted.")
    except InfeasibleError:
        note = late if time.monotonic() > ends else "Nothing else was found that fits."
        return Choices(plans=(own,), note=note)
    others = [
        Choice(step_seconds=best.seconds, peak_bytes=best.plan.prediction.peak_bytes, words=_words(best.bound))
        for best in (result.plans[0] for result in _through(found))
    ]
    plans = [own, *(one for one in others if not _same(one, own))]
    note = (
        "The front of a search for the same job with nothing decided by hand: the fastest plan, then the fastest found"
        " with a tenth less memory each."
    )
    return Choices(
        plans=tuple(sorted(plans, key=lambda one: (one.step_seconds, one.peak_bytes))),
        note=f"{note} {late}" if time.monotonic() > ends else note,
    )


def _through(found: "tuple[SearchResult, ...]") -> "tuple[SearchResult, ...]":
    """Points of a front whose search was not stopped, as that would be of any quality; the first one all the same."""
    return tuple(result for at, result in enumerate(found) if at == 0 or not result.statistics.stopped)


def _request(plan: "Plan", model: "BuiltModel", graph: "OperatorGraph", cluster: "Cluster") -> "SearchRequest":
    """The job of a plan, with nothing decided."""
    from planner.search.request import SearchRequest

    training = plan.training
    return SearchRequest(
        graph=graph,
        batch=model.batch,
        model=plan.model,
        cluster=cluster,
        global_batch=training.global_batch,
        precision=training.precision,
        optimizer=training.optimizer,
        update=training.update,
        imbalance=training.imbalance,
    )


def _words(bound: "BoundPlan") -> tuple[tuple[str, str], ...]:
    from planner.plan.roles import roles
    from planner.plan.words import plan_words

    return tuple(plan_words(bound, roles(bound)).items())


def _same(one: "Choice", other: "Choice") -> bool:
    """Whether two plans are one: in their words, in what they take and in what they hold."""
    figures = ((one.step_seconds, other.step_seconds), (one.peak_bytes, other.peak_bytes))
    return one.words == other.words and all(math.isclose(here, there, rel_tol=1e-6) for here, there in figures)
