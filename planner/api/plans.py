"""Functions on plans: `planner.load`, `save`, `explain`, `diff`, `report`, `export`, `audit`, `validate`; and on
settings of engines: `planner.advise`.

Each takes a Plan or the path of a plan file. If the model is not in the zoo and the plan does not carry its graph,
`model` names it, like `--model`.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.checks import amounts, callbacks, file_path, number, public, text
from planner.api.jobs import HARDWARE, traced_model, warned
from planner.api.kinds import kind_of
from planner.api.planned import PlanOrPath, built_model, loaded, planned_graph
from planner.errors import ModelError, RequestError, StoppedBy
from planner.plan.binding.machine import machine_of
from planner.plan.compare.differences import Comparison, Traced, compare
from planner.plan.compare.explanation import Sensitivity
from planner.plan.compare.repricing import repriced
from planner.plan.plan import PRECISIONS, Plan, Prediction
from planner.strategy_search.result import Progress

if TYPE_CHECKING:
    from planner.api.advising import Change
    from planner.validation import Evaluated
    from planner.validation.results.summary import Summary
    from runtime.auditing.audit import StageAudit


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """How the step time of a plan changes with each input, one row per change."""

    plan: Plan
    rows: tuple[Sensitivity, ...]

    def __repr__(self) -> str:
        return f"Explanation({self.plan.model.reference!r}, {len(self.rows)} changes)"

    def _repr_html_(self) -> str:
        from planner.report.notebook import rows_html

        return rows_html(self.to_rows())

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas: name, change, and seconds of a step with the plan kept and searched again; None if it does not
        work or was not searched."""
        return [
            {
                "name": row.name,
                "change": row.change,
                "kept_seconds": _seconds(row.kept),
                "searched_seconds": _seconds(row.searched),
            }
            for row in self.rows
        ]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Settings of an engine.

    Attributes:
        engine: whose.
        files: the text of each file by its name; `folder` has them where one was given.
        given_up: what the engine cannot express: the plan's value and the engine's.
        prediction: of the plan that the engine will run.
    """

    engine: str
    files: Mapping[str, str]
    given_up: tuple[tuple[str, str, str], ...]
    prediction: Prediction
    folder: Path | None

    def __repr__(self) -> str:
        return f"Exported({self.engine!r}, {', '.join(sorted(self.files))}; {len(self.given_up)} things given up)"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Predictions compared with measured runs, row by row, with a summary."""

    rows: "tuple[Evaluated, ...]"
    summary: "Summary"

    def __repr__(self) -> str:
        return f"Validation({self.summary.whole.evaluated} of {self.summary.whole.rows} rows evaluated)"

    def _repr_html_(self) -> str:
        from planner.report.notebook import rows_html

        return rows_html(self.to_rows())

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas: measured and predicted seconds and bytes of every row."""
        return [
            {
                "id": one.row.id,
                "measured_seconds": one.row.measured_seconds,
                "predicted_seconds": one.predicted_seconds,
                "measured_peak_bytes": one.row.measured_peak_bytes,
                "predicted_peak_bytes": one.predicted_peak_bytes,
                "error": one.error,
            }
            for one in self.rows
        ]


class Audited(tuple["StageAudit", ...]):
    """One rank of every stage, run on fake tensors and compared with its prediction."""

    __slots__ = ()

    @property
    def agrees(self) -> bool:
        """Whether collectives, FLOPs and memory of every stage agree with the prediction."""
        return all(stage.agrees for stage in self)

    def __repr__(self) -> str:
        said = "all as predicted" if self.agrees else "not as predicted"
        return f"Audited({len(self)} stage{'s' if len(self) > 1 else ''}, {said})"

    def _repr_html_(self) -> str:
        from planner.report.notebook import rows_html

        return rows_html(self.to_rows())

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas: a row per stage, with live and predicted bytes."""
        return [
            {
                "stage": one.stage,
                "rank": one.rank,
                "collectives": len(one.collectives),
                "unequal": len(one.unequal),
                "peak_bytes": one.peak,
                "predicted_peak_bytes": one.predicted_peak,
                "agrees": one.agrees,
            }
            for one in self
        ]


@dataclass(frozen=True, kw_only=True)
class Advised:
    """A configuration of an engine, and what to change in it.

    Attributes:
        now: the configuration as a plan; it may not fit.
        best: the best that was found for its engine; None where nothing faster was found that fits.
        gap: by how much a plan of the engine's space may be faster; None if unknown.
        changes: the changes to it, cheapest first; their savings sum to the total.
        text: the file with the changes; None without changes, or if it is not TOML, YAML or JSON.
        stopped_by: what ended a search early, so that there may be better ones; None if nothing did.
    """

    now: Plan
    best: Plan | None
    gap: float | None
    changes: "tuple[Change, ...]"
    text: str | None
    stopped_by: StoppedBy | None = None

    def __repr__(self) -> str:
        here = f"{self.now.prediction.step_seconds:.3g} s a step"
        there = "nothing faster" if self.best is None else f"{self.best.prediction.step_seconds:.3g} s"
        return f"Advised({here}, {there}, {len(self.changes)} changes)"

    def _repr_html_(self) -> str:
        from planner.report.notebook import rows_html

        return rows_html(self.to_rows())

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas: the changes in their order, with the step after each of them."""
        return [
            {
                "change": one.name,
                "here": one.here,
                "there": one.there,
                "saved_seconds": one.seconds,
                "step_seconds": one.after.step_seconds,
                "peak_bytes": one.after.peak_bytes,
            }
            for one in self.changes
        ]


@public
def load(path: str | os.PathLike[str]) -> Plan:
    """Load a plan from its file. Raises PlanFileError if it is not valid. Loading runs no code from the file."""
    return loaded(path)


@public
def save(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write a plan file atomically, and return its path. Raises PlanFileError if it cannot be written."""
    from planner.plan.file import save_plan

    if not isinstance(plan, Plan):
        raise RequestError(f"plan is {kind_of(plan)}: give a Plan, as result.plan is")
    written = file_path("path", path)
    save_plan(plan, written)
    return written


@public
def explain(
    plan: PlanOrPath,
    *,
    model: str | None = None,
    search: bool = True,
    time_limit: float = 120.0,
    on_progress: Callable[[str], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Explanation:
    """How the step time changes with links, memory, batch, sequence or devices, with the plan kept and searched again.

    Args:
        plan: a Plan, or the path of its file.
        model: the model, where the plan does not carry it.
        search: whether to search again, too.
        time_limit: seconds after which no new search starts.
        on_progress: called with the current phase in words.
        cancelled: asked between searches; once it returns True, the known results are returned.
    """
    from planner.strategy_search.analysis.sensitivity import Search, World, sensitivities

    callbacks(on_progress=on_progress, cancelled=cancelled)
    number("time_limit", time_limit, least=0, whole=False)
    found = loaded(plan)
    machine, (graph, batch) = machine_of(found.cluster), planned_graph(found, model)
    bound = repriced(found, graph, batch, machine)
    ends, stop = time.perf_counter() + time_limit, cancelled or (lambda: False)
    again = Search(begins=lambda: search and time.perf_counter() < ends, cancelled=stop)
    world = World(plan=bound.plan, graph=graph, batch=batch, cluster=machine)
    rows = tuple(sensitivities(world, _retracing(found, model), again, on_progress or (lambda _: None)))
    return Explanation(plan=bound.plan, rows=rows)


@public
def advise(
    path: str | os.PathLike[str],
    hardware: str = HARDWARE,
    *,
    engine: str | None = None,
    model: str | None = None,
    devices: int | None = None,
    seq_len: int | None = None,
    cluster: str | None = None,
    software: str | None = None,
    recipe: str = "",
    time_limit: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Advised:
    """Price a configuration of another engine, and say what to change in it.

    Args:
        path: a script, or a TOML, YAML, JSON or Python file of the engine, or its folder.
        hardware, cluster: as for `search`.
        engine: whose settings they are, as "torchtitan"; guessed from the file where not given.
        model: the model, where the file does not say it.
        devices, seq_len: how many, and tokens of a sample, where the file does not say it.
        software: the training stack; that of the engine where not given.
        recipe: which recipe of a file with several.
        time_limit: seconds for each search.
        on_progress: called with a `Progress` while the best of the engine is searched.
        cancelled: asked between configurations; once it returns True, what was found by then is returned.

    Raises RequestError, and ExportError for settings that cannot be read.
    """
    from planner.api.advising import advice_on, changed_text
    from planner.api.engine_best import Patience
    from planner.api.importing import asked_for, imported
    from planner.export.description import ExportError

    callbacks(on_progress=on_progress, cancelled=cancelled)
    amounts(time_limit=time_limit)
    asked = asked_for(
        path, hardware, engine=engine, model=model, devices=devices, seq_len=seq_len, cluster=cluster,
        software=software, recipe=recipe,
    )  # fmt: skip
    found = imported(asked, traced_model, warned)
    patience = Patience(
        time_limit=time_limit, on_progress=on_progress or (lambda _: None), cancelled=cancelled or (lambda: False)
    )
    advice, changed = advice_on(found, patience), None
    if advice.best is not None:
        with contextlib.suppress(ExportError):
            changed = changed_text(advice)
    return Advised(
        now=found.bound.plan,
        best=None if advice.best is None else advice.best.bound.plan,
        gap=None if advice.best is None else advice.best.gap,
        changes=advice.changes,
        text=changed,
        stopped_by=advice.stopped_by,
    )


@public
def diff(
    first: PlanOrPath,
    second: PlanOrPath,
    *,
    model: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Comparison:
    """The differences between two plans of a model and the cost of each: `steps` sum to the total difference.

    Args:
        first, second: Plans, or paths of their files.
        model: the model, where the plans do not carry it.
        on_progress: called with the number of priced differences and their total.
        cancelled: asked on the way; once it returns True, the differences that are left are priced together.
    """
    plans, graphs = (loaded(first), loaded(second)), dict[str, Traced]()
    for one in plans:
        if one.model.fingerprint not in graphs:
            graph, batch = planned_graph(one, model)
            graphs[one.model.fingerprint] = Traced(graph=graph, batch=batch)
    return compare(*plans, graphs, on_progress or (lambda made, of: None), cancelled or (lambda: False))


@public
def report(plan: PlanOrPath, path: str | os.PathLike[str], *, model: str | None = None) -> Path:
    """Write the HTML report of a plan (`plan report --no-search`) and return its path. The page loads nothing from a
    network."""
    from planner.plan.compare.verify import verify
    from planner.plan.writing import check_place, write_atomically
    from planner.report.data import report_of
    from planner.report.html import page

    found, written = loaded(plan), file_path("path", path)
    check_place(written, () if isinstance(plan, Plan) else (plan,))
    machine, (graph, batch) = machine_of(found.cluster), planned_graph(found, model)
    verdict = verify(found, graph, batch, machine)
    shown = report_of(verdict.bound, verdict.prediction, machine, remarks=tuple(verdict.remarks))
    write_atomically(written, page(shown.report))
    return written


@public
def export(
    plan: PlanOrPath,
    engine: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    nearest: bool = False,
    tolerance: float = 0.01,
    model: str | None = None,
) -> Exported:
    """A plan as the settings of another engine ("megatron", "deepspeed", "torchtitan", ...; `plan export --help`).
    "mindspore" takes the plan as it is, operator by operator.

    Args:
        plan: a Plan, or the path of its file.
        engine: the engine.
        folder: where to write the files; else they are only returned.
        nearest: if the engine has no settings for the plan, take its nearest plan instead of searching its best one.
        tolerance: take the nearest plan anyway if it is at most this much slower, relative.
        model: the model, where the plan does not carry it.
    """
    from dataclasses import asdict

    from planner.api.exported_folders import MARKER
    from planner.api.exporting import Way, check_fits, check_own_fit, export_of, operators_of
    from planner.api.folders import write_folder
    from planner.export.launching import folder_files
    from planner.export.targets import OPERATOR_TARGETS

    text("engine", engine)
    found, into = loaded(plan), None if folder is None else file_path("folder", folder)
    machine, (graph, batch) = machine_of(found.cluster), planned_graph(found, model)
    if engine in OPERATOR_TARGETS:
        check_own_fit(found, engine, found.model.reference)
        files, content = operators_of(found, OPERATOR_TARGETS[engine], graph, batch)
        if into is not None:
            write_folder(into, files, MARKER, content)
        return Exported(engine=engine, files=files, given_up=(), prediction=found.prediction, folder=into)
    given = export_of(found, engine, machine, graph, batch, Way(nearest=nearest, most=tolerance))
    check_fits(given, found.model.reference)
    files = folder_files(given.target, given.job)
    if into is not None:
        content = {"engine": engine, "model": found.model.reference, "given_up": [asdict(one) for one in given.steps]}
        write_folder(into, files, MARKER, content)
    return Exported(
        engine=engine,
        files=files,
        given_up=tuple((step.what, step.here, step.there) for step in given.steps),
        prediction=given.prediction,
        folder=into,
    )


@public
def audit(plan: PlanOrPath, *, model: str | None = None) -> Audited:
    """Run one rank of every stage on fake tensors, and compare its collectives, FLOPs and memory with the prediction:
    `agrees` of every stage. Raises AuditError if that cannot be judged."""
    from runtime.auditing.audit import audit as audited

    found = loaded(plan)
    built = built_model(found, model, why=", and an audit runs its operators")
    return Audited(audited(found, built.graph, built.batch, machine_of(found.cluster)))


@public
def validate(path: str | os.PathLike[str], *, where: Mapping[str, str] | None = None, processes: int = 1) -> Validation:
    """Predict a table of measured runs (docs/validate.md) in several processes; `where` keeps the rows with these
    values in these columns."""
    from planner.validation import evaluate_rows, read_rows, summarise

    rows = read_rows(file_path("path", path), dict(where or {}), None, strict=False)
    found = tuple(evaluate_rows(rows, processes, lambda count: None))
    return Validation(rows=found, summary=summarise(found))


def _seconds(outcome: object) -> float | None:
    return outcome.step_seconds if isinstance(outcome, Prediction) else None


def _retracing(plan: Plan, model: str | None) -> Callable[[int], Any]:
    """The model's graph for another sequence length."""
    from planner.graph.trace import trace
    from planner.models.nicknames import full_model
    from planner.models.zoo import build_model, is_of_zoo
    from planner.plan.outline import model_reference

    name = plan.model.reference if model is None else full_model(model)

    def retrace(length: int) -> Any:
        if not is_of_zoo(name) and (model is None or ":" in name.partition("+")[0]):
            raise ModelError("the length of sequences is that of the plan's graph; name a model of the zoo or a config")
        built = build_model(name, dtype=PRECISIONS[plan.training.precision], sequence_length=length)
        graph = trace(built.module, built.args, built.kwargs)
        return model_reference(graph, name=name, sequence_length=length, batch=built.batch), graph, built.batch

    return retrace
