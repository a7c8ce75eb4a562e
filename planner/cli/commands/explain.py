"""`plan explain`: why a plan costs what it costs, what would change that, and why operators are sharded as they are."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.commands.show import Hardware, OfModel, naming, traced_again
from planner.cli.errors import OUTPUT_SCHEMA_VERSION, reporting
from planner.cli.output import explanation_content, write_json
from planner.cli.printing import console_of
from planner.cli.stopping import SAID, stoppable
from planner.cli.waiting import Waiting, waiting

if TYPE_CHECKING:
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.binding.model_of import PlannedModel
    from planner.plan.compare.alternatives import Priced, Subject
    from planner.plan.compare.explanation import Explanation, Outcome, Sensitivity
    from planner.strategy_search.analysis.sensitivity import Search, Traced, World

_NOTHING_YET = "interrupted before anything was known"


def explain(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    name: Annotated[
        str | None,
        typer.Argument(help="An operator or a parameter, as `plan show` and plan files call them, or a pattern."),
    ] = None,
    search: Annotated[bool, typer.Option("--search/--no-search", help="Search again, or only price the plan.")] = True,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Start no search after this many seconds.", min=0)
    ] = 120.0,
    model: OfModel = None,
    hardware: Hardware = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain what limits a plan, and what other choices would cost.

    Without a name: what limits the plan, where the time goes, and the step time with other links, memory, batch,
    sequence or devices, for this plan and for a new search. With a name: the step time with every other strategy of an
    operator, or stored layout of a parameter, with all else unchanged and with a new search around it.

        plan explain llama70b-64.json
        plan explain llama70b-64.json '*.mlp.up_proj'
    """
    with reporting(as_json):
        patience = _Patience(wanted=search, ends=time.perf_counter() + time_limit)
        with waiting() as wait:
            wait.phase("tracing the model")
            world, known, bound = _world(plan_file, hardware, model)
            with stoppable(lambda: wait.phase("stopping")) as stopped:
                again = _again(patience, wait, stopped)
                if name is not None:
                    found = _choices(world, bound, name, again, wait)
                else:
                    rows = _sensitivities(world, bound, known, again, wait, as_json)
        ended = _Ended(by_hand=stopped(), late=patience.late, limit=time_limit)
        if name is not None:
            _show_choices(found, bound, ended, as_json)
        else:
            _show_sensitivities(bound, rows, ended, as_json)


@dataclass(kw_only=True)
class _Patience:
    """Whether another search may start, and whether one was skipped because time ran out."""

    wanted: bool
    ends: float
    late: bool = False

    def begins(self) -> bool:
        if self.wanted and time.perf_counter() >= self.ends:
            self.late = True
        return self.wanted and not self.late


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """Why some searches are missing, if so."""

    by_hand: bool
    late: bool
    limit: float

    @property
    def early(self) -> bool:
        return self.by_hand or self.late

    @property
    def line(self) -> str:
        if self.by_hand:
            return f"{SAID}: what was not looked at by then is missing."
        return f"Not all was searched again within {self.limit:g} s; --time-limit SECONDS gives more."


def _again(patience: _Patience, wait: Waiting, stopped: Callable[[], bool]) -> "Search":
    from planner.strategy_search.analysis.sensitivity import Search

    return Search(begins=patience.begins, on_progress=wait.searched, cancelled=stopped)


def _world(plan_file: Path, hardware: str | None, given: str | None) -> "tuple[World, PlannedModel, BoundPlan]":
    """The plan priced anew, and everything that it was made for."""
    from planner.plan.binding.machine import machine_of
    from planner.plan.compare.repricing import repriced
    from planner.plan.file import load_plan
    from planner.strategy_search.analysis.sensitivity import World

    plan = load_plan(plan_file)
    with naming(plan_file):
        cluster = machine_of(plan.cluster, hardware)
        model = traced_again(plan, given)
        bound = repriced(plan, model.graph, model.batch, cluster)
    return World(plan=bound.plan, graph=model.graph, batch=model.batch, cluster=cluster), model, bound


def _sensitivities(
    world: "World", bound: "BoundPlan", model: "PlannedModel", again: "Search", wait: Waiting, as_json: bool
) -> "tuple[Sensitivity, ...]":
    """The effect of changing each input; results are printed as soon as they are known."""
    from planner.report.alternatives import SensitivityLines
    from planner.strategy_search.analysis.sensitivity import sensitivities

    found: list[Sensitivity] = []
    lines: list[SensitivityLines] = []

    def said(rows: "tuple[Sensitivity, ...]") -> None:
        if not as_json:
            lines.append(SensitivityLines(rows, console_of().width))
            with wait.aside():
                _show_what_binds(bound, rows)
                console_of().print(lines[0].head)

    if not as_json:
        with wait.aside():
            _show_where(bound)
    for row in sensitivities(world, _retracing(world, model), again, wait.phase, said):
        found.append(row)
        if lines:
            with wait.aside():
                console_of().print(lines[0].line(row), soft_wrap=True)
    if not found and as_json:
        raise KeyboardInterrupt(_NOTHING_YET)
    return tuple(found)


def _retracing(world: "World", model: "PlannedModel") -> "Callable[[int], Traced]":
    """Traces the model for another length, or takes the cached graph."""
    from planner.cli.graph_folder import cache_folder
    from planner.cli.tracing import traced
    from planner.errors import ModelError
    from planner.models.zoo import is_of_zoo
    from planner.plan.outline import model_reference
    from planner.plan.plan import PRECISIONS
    from planner.strategy_search.job import traced_named

    def retrace(length: int) -> "Traced":
        reference = world.plan.model.reference if model.built is None else model.built.reference
        if model.built is None and not is_of_zoo(reference):
            raise ModelError("the length is that of the graph in the file; --model NAME builds the model for another")
        if ":" in reference.partition("+")[0]:
            raise ModelError(f"the length of {reference} is that of its factory")
        dtype = PRECISIONS[world.plan.training.precision]
        found = traced_named(reference, traced, dtype, length, cache_folder(None))
        of_length = model_reference(found.graph, name=reference, sequence_length=length, batch=found.batch)
        return of_length, found.graph, found.batch

    return retrace


Found = tuple["Subject", tuple["Priced", ...], Mapping[str, "Outcome"]]


def _choices(world: "World", bound: "BoundPlan", name: str, again: "Search", wait: Waiting) -> list[Found]:
    from planner.plan.compare.alternatives import alternatives, subjects

    found: list[Found] = []
    for subject in subjects(bound, name):
        if again.cancelled():
            break
        wait.phase(f"pricing {subject.name}")
        priced = alternatives(bound, world.cluster, subject)
        around = {} if subject.parameter else _around(world, subject, priced, again, wait)
        found.append((subject, priced, around))
    if not found:
        raise KeyboardInterrupt(_NOTHING_YET)
    return found


def _around(
    world: "World", subject: "Subject", priced: "tuple[Priced, ...]", again: "Search", wait: Waiting
) -> "dict[str, Outcome]":
    """The best plan of the same configuration with each strategy of an operator, the most promising first."""
    from dataclasses import replace

    from planner.strategy_search.analysis.around import configuration_of, request_for, searched, with_strategy

    pinned = configuration_of(world.plan)
    if pinned is None:
        return {}
    request = replace(request_for(world.plan, world.graph, world.batch, world.cluster), pinned=pinned)
    found = {}
    for at, one in enumerate(priced, start=1):
        if again.cancelled() or not again.begins():
            break
        wait.phase(f"around {one.choice}", at, len(priced))
        best = searched(with_strategy(request, subject.name, one.names), again.on_progress, again.cancelled)
        if best is not None:
            found[one.choice] = best
    return found


def _explained(bound: "BoundPlan") -> "Explanation":
    from planner.plan.compare.explanation import explain as explained

    plan = bound.plan
    return explained(
        plan.prediction,
        turns=plan.stage_passes,
        capacity=plan.prediction.capacity_bytes,
        memory_price=0.0,
        next_best=None,
    )


def _show_where(bound: "BoundPlan") -> None:
    """The time by resource, known from the plan alone."""
    from planner.report.explanation import explanation_table

    console_of().print(explanation_table(_explained(bound)))


def _show_what_binds(bound: "BoundPlan", rows: "tuple[Sensitivity, ...]") -> None:
    """The gain of this plan from faster links and launches."""
    from planner.report.alternatives import binding_lines

    console = console_of()
    for line in binding_lines(_explained(bound), rows):
        console.print(line)


def _show_sensitivities(bound: "BoundPlan", rows: "tuple[Sensitivity, ...]", ended: _Ended, as_json: bool) -> None:
    if as_json:
        write_json("plan explain PLAN", _sensitivity_content(bound, _explained(bound), rows, ended))
        return
    from planner.report.alternatives import ABOUT, memory_line

    console = console_of()
    if rows:
        console.print(ABOUT)
        if line := memory_line(rows):
            console.print(line)
    if ended.early:
        console.print(ended.line)


def _show_choices(found: list[Found], bound: "BoundPlan", ended: _Ended, as_json: bool) -> None:
    if as_json:
        write_json(
            "plan explain PLAN NAME", {**_head(bound, ended), "subjects": [_subject_content(one) for one in found]}
        )
        return
    from planner.report.alternatives import alternatives_table

    rules = {one.operator.name: one.rule.format() for one in bound.operators}
    console = console_of()
    for subject, priced, around in found:
        console.print(alternatives_table(subject, rules.get(subject.name, ""), priced, around))
    if ended.early:
        console.print(ended.line)


def _head(bound: "BoundPlan", ended: _Ended) -> dict[str, Any]:
    prediction = bound.plan.prediction
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "step_seconds": prediction.step_seconds,
        "peak_bytes": prediction.peak_bytes,
        "capacity_bytes": prediction.capacity_bytes,
        "stopped": ended.early,
    }


def _sensitivity_content(
    bound: "BoundPlan", found: "Explanation", rows: "tuple[Sensitivity, ...]", ended: _Ended
) -> dict[str, Any]:
    shares = explanation_content(found)
    kept = ("seconds", "free_bytes", "slowest_rank", "fullest_rank")
    return {
        **_head(bound, ended),
        "explanation": {name: shares[name] for name in kept},
        "sensitivities": [
            {
                "name": row.name,
                "change": row.change,
                "devices": row.devices,
                "sequence_length": row.tokens,
                "kept": _outcome_content(row.kept),
                "searched": None if row.searched is None else _outcome_content(row.searched),
            }
            for row in rows
        ],
    }


def _outcome_content(found: "Outcome") -> dict[str, Any]:
    if isinstance(found, str):
        return {"step_seconds": None, "peak_bytes": None, "samples_per_second": None, "why": found}
    return {
        "step_seconds": found.step_seconds,
        "peak_bytes": found.peak_bytes,
        "samples_per_second": found.samples_per_second,
        "why": None,
    }


def _subject_content(found: Found) -> dict[str, Any]:
    subject, priced, around = found
    return {
        "name": subject.name,
        "kind": "parameter" if subject.parameter else "operator",
        "count": len(subject.twins),
        "choices": [
            {
                "choice": one.choice,
                "chosen": one.chosen,
                "step_seconds": one.seconds,
                "peak_bytes": one.peak,
                "fits": one.fits,
                "why": one.fault or None,
                "around": _outcome_content(around[one.choice]) if one.choice in around else None,
            }
            for one in priced
        ],
    }
