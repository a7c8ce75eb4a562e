"""`plan compare --engines`: the best plan of several engines, and the best without an engine, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.carrying import Subject, asked_like, engine_fp8
from planner.cli.commands.plan import progress_console, undisturbed
from planner.cli.commands.show import naming, traced_again
from planner.cli.engine_cost import free_request
from planner.cli.limiting import within_limits
from planner.cli.options import Options
from planner.cli.printing import console_of
from planner.cli.requesting import check, request_of
from planner.cli.searching import find
from planner.errors import InfeasibleError, PlannerError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from planner.engines.space import EngineSpace
    from planner.strategy_search.request.request import SearchRequest
    from planner.strategy_search.result import SearchResult

FREE = "runtime of this project"
_TOLD = ("degrees", "expert", "virtual stages", "micro-batches", "ZeRO", "recomputation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result for one engine, or without an engine; or why there is none."""

    engine: str | None
    name: str
    software: str
    result: "SearchResult | None"
    why: str = ""

    def content(self) -> dict[str, Any]:
        """What `--json` prints."""
        found = self.result
        return {
            "engine": self.engine,
            "software": self.software,
            "step_seconds": None if found is None else found.plan.prediction.step_seconds,
            "peak_bytes": None if found is None else found.plan.prediction.peak_bytes,
            "gap": None if found is None else found.gap,
            "words": None if found is None else words_of(found),
            "why": self.why or None,
            "stopped_by": None if found is None else found.statistics.stopped_by,
        }


def words_of(result: "SearchResult") -> dict[str, str]:
    """The words that tell plans of engines apart."""
    from planner.plan.layout.roles import roles
    from planner.plan.words import plan_words

    words = plan_words(result.bound, roles(result.bound))
    return {name: words[name] for name in _TOLD}


def spaces_of(text: str) -> "tuple[EngineSpace, ...]":
    """Engines by their names, separated by commas. Raises RequestError."""
    from planner.engines.spaces import space_named

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise RequestError("--engines: give names of engines, as in megatron,torchtitan,torch")
    try:
        return tuple(space_named(name) for name in dict.fromkeys(names))
    except RequestError as error:
        raise RequestError(_in_words_of_engines(str(error))) from error


def _in_words_of_engines(message: str, prefix: str = "") -> str:
    """An error about the space of an engine, reworded for several engines."""
    return message.removeprefix(prefix).replace("--for", "--engines")


def compared(plan_file: Path | None, engines: str, options: Options) -> "tuple[SearchRequest, tuple[Row, ...]]":
    """A row per engine, and one without an engine, for the training of a plan file or of options."""
    spaces, console = spaces_of(engines), progress_console(options)
    with undisturbed(), within_limits(options):
        if plan_file is None:
            check(options)
            request = request_of(options, console)
        else:
            request = _request_of_plan(plan_file, options.hardware)
        rows = [_row(free_request(request), None, console)]
        for space in spaces:
            own = _for(request, space)
            if plan_file is not None:  # fp8 was not requested for the engine
                own = replace(own, fp8=engine_fp8(own.fp8, space))
            rows.append(_row(own, space, console))
    return request, tuple(rows)


def _request_of_plan(plan_file: Path, hardware: str | None) -> "SearchRequest":
    from planner.plan.binding.machine import machine_of
    from planner.plan.file import load_plan
    from planner.sharding.discover import with_rules

    plan = load_plan(plan_file)
    with naming(plan_file):
        machine, model = machine_of(plan.cluster, hardware), traced_again(plan, None)
        graph = with_rules(model.graph, plan.rules)
        subject = Subject(model=plan.model, graph=graph, batch=model.batch, cluster=machine)
    return replace(asked_like(subject, plan.training), alltoall=plan.links_with_alltoall)


def _for(request: "SearchRequest", space: "EngineSpace") -> "SearchRequest":
    from hardware_profiles import load_software

    return replace(request, space=space, cluster=request.cluster.with_software(load_software(space.software)))


def _row(request: "SearchRequest", space: "EngineSpace | None", console: "Console") -> Row:
    name = FREE if space is None else space.title
    result, why = None, ""
    try:
        result = find(request, console, advise=False).best
    except InfeasibleError as error:
        why = str(error)
    except PlannerError as error:
        if space is None:
            raise
        why = str(error)
    if space is not None:
        why = _in_words_of_engines(why, f"--for {space.name}: ")
    software = request.cluster.software.name
    return Row(engine=None if space is None else space.name, name=name, software=software, result=result, why=why)


def show(rows: Sequence[Row]) -> None:
    """Print the table, and why nothing was found for some engines."""
    from planner.report.search import stopped_text
    from planner.report.table import table_of
    from planner.report.units import bytes_text, seconds_text

    console = console_of()
    table = table_of("", "engine", "stack", "step time", "", "peak memory", "gap", *_TOLD, keys=1)
    for column in table.columns[2:6]:
        column.justify = "right"
    free = rows[0].result
    for row in rows:
        if row.result is None:
            table.add_row(row.name, row.software, "no plan", *[""] * (len(_TOLD) + 3))
            continue
        prediction = row.result.plan.prediction
        more = ""
        if free is not None and row.engine is not None:
            more = f"{prediction.step_seconds / free.plan.prediction.step_seconds - 1:+.1%}"
        figures = (seconds_text(prediction.step_seconds), more, bytes_text(prediction.peak_bytes))
        table.add_row(row.name, row.software, *figures, f"{row.result.gap:.1%}", *words_of(row.result).values())
    console.print(table)
    for row in rows:
        if row.why:
            console.print(f"{row.name}: {row.why}", soft_wrap=True)
        if row.result is not None and (by := row.result.statistics.stopped_by) is not None:
            console.print(f"{row.name}: {stopped_text(by)}; its plan is the best so far", soft_wrap=True)
