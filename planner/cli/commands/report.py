"""`plan report`: a plan as an HTML page, and as a trace for profilers."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.commands.compare_cases import Tokens, parse_prices
from planner.cli.commands.show import Hardware, OfModel, naming, traced_again
from planner.cli.errors import OUTPUT_SCHEMA_VERSION
from planner.cli.errors import reporting as errors_reported
from planner.cli.others import other_plans
from planner.cli.output import write_json
from planner.cli.spoken import parse_tokens
from planner.cli.stopping import stoppable
from planner.cli.texts import say
from planner.cli.waiting import waiting
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.plan.compare.verify import Verdict
    from planner.report.data import Reported


def report(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.", show_default="PLAN.html"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the timeline of a step for Perfetto. It is trace events, which chrome://tracing reads too.",
        ),
    ] = None,
    search: Annotated[bool, typer.Option("--search/--no-search", help="Search other plans to compare with.")] = True,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time limit of the searches. Without it they run to their end.",
            min=0.0,
        ),
    ] = None,
    tokens: Tokens = None,
    price: Annotated[
        str | None, typer.Option(metavar="PRICE", help="Price per device-hour, with --tokens, as in 2.5.")
    ] = None,
    hardware: Hardware = None,
    model: OfModel = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print what the page shows as JSON on stdout; writes a page only with -o."),
    ] = False,
) -> None:
    """Write an HTML report of a plan: timeline, memory, time breakdown, blocks, cluster, other plans, accuracy.

    The file needs no network. With --trace and without -o only the trace is written.

        plan report llama70b-64.json -o report.html
        plan report llama70b-64.json --tokens 15T --price 2.5
        plan report llama70b-64.json --trace trace.json
    """
    with errors_reported(as_json):
        from planner.plan.writing import check_place

        page_file = output if output is not None or trace is not None or as_json else plan_file.with_suffix(".html")
        for path in (page_file, trace):
            if path is not None and path.resolve() == plan_file.resolve():
                raise RequestError(f"{path} is the plan file itself; name another file")
            if path is not None:
                check_place(path)
        if price is not None and tokens is None:
            raise RequestError("--price needs --tokens, of which a plan knows nothing; give both")
        wanted = search and (page_file is not None or as_json)
        if time_limit is not None and not wanted:
            why = "a trace alone needs none" if search else "--no-search has none"
            raise RequestError(f"--time-limit {time_limit:g}: it limits searches, and {why}; leave it out")
        found = _reported(plan_file, hardware, model, wanted, time_limit, _bill(tokens, price))
        _write(found, page_file, trace, as_json)


def _bill(tokens: str | None, price: str | None) -> tuple[float, float | None] | None:
    """Tokens of the whole training, and price per device-hour."""
    if tokens is None:
        return None
    each = None if price is None else parse_prices(price)
    if isinstance(each, dict):
        raise RequestError(f"--price {price}: a plan is for one machine; give a number, as in 2.5")
    return parse_tokens("--tokens", tokens), each


def _reported(
    plan_file: Path,
    hardware: str | None,
    given: str | None,
    search: bool,
    time_limit: float | None,
    paid: tuple[float, float | None] | None,
) -> "Reported":
    """The report of a plan file; `paid` has the tokens and the price."""
    from planner.plan.binding.machine import machine_of
    from planner.plan.compare.verify import verify
    from planner.plan.file import load_plan
    from planner.report.data import report_of
    from planner.report.data.bill import bill_rows

    plan = load_plan(plan_file)
    with waiting() as wait:
        wait.phase("tracing the model")
        with naming(plan_file):
            cluster = machine_of(plan.cluster, hardware)
            model = traced_again(plan, given)
            wait.phase("checking the plan")
            verdict = verify(plan, model.graph, model.batch, cluster)
        bill = () if paid is None else bill_rows(plan, verdict.prediction, *paid)
        with stoppable(lambda: wait.phase("stopping")) as stopped:
            choices = other_plans(verdict, model, cluster, time_limit, wait, stopped) if search else None
        wait.phase("simulating the step")
        remarks = _remarks(verdict)
        return report_of(verdict.bound, verdict.prediction, cluster, remarks=remarks, choices=choices, bill=bill)


def _remarks(verdict: "Verdict") -> tuple[str, ...]:
    """What is wrong with a plan, in sentences."""
    from planner.report.units import bytes_text

    missing = verdict.prediction.peak_bytes - verdict.prediction.capacity_bytes
    lacking = verdict.outside or f"the fullest device lacks {bytes_text(missing)}"
    fits = () if verdict.fits else (f"The plan does not fit: {lacking}.",)
    return (*fits, *(f"The plan was changed since it was priced: {remark}." for remark in verdict.remarks))


def _write(found: "Reported", page_file: Path | None, trace: Path | None, as_json: bool) -> None:
    from planner.plan.writing import write_atomically
    from planner.report.trace import trace_events

    if page_file is not None:
        from planner.report.html import page

        write_atomically(page_file, page(found.report))
    if trace is not None:
        write_atomically(trace, json.dumps(trace_events(found), separators=(",", ":")) + "\n")
    if as_json:
        write_json("plan report", {**content_of(found), "page": _name(page_file), "trace": _name(trace)})
        return
    if page_file is not None:
        say(f"Report written to {page_file}")
    if trace is not None:
        say(f"Trace written to {trace}; open it on https://ui.perfetto.dev or in chrome://tracing")


def _name(path: Path | None) -> str | None:
    return None if path is None else str(path)


def content_of(found: "Reported") -> dict[str, Any]:
    """The content of the page, for programs."""
    return {"schema_version": OUTPUT_SCHEMA_VERSION, **dataclasses.asdict(found.report)}
