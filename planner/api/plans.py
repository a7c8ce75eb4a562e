"""What is done with plans: `planner.load`, `save`, `explain`, `diff`, `report`, `export`, `audit`, `validate`.

Each takes a Plan or the path of a plan file. Where the model is none of the zoo and the plan does not carry its graph,
`model` says what it is, as `--model` does.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.searching import loaded, planned_graph, traced_model
from planner.errors import ModelError, RequestError
from planner.plan.binding.machine import machine_of
from planner.plan.compare.differences import Comparison, Traced, compare
from planner.plan.compare.explanation import Sensitivity
from planner.plan.compare.repricing import repriced
from planner.plan.plan import PRECISIONS, Plan, Prediction

if TYPE_CHECKING:
    from planner.validation import Evaluated
    from planner.validation.summary import Summary
    from runtime.auditing.audit import StageAudit

PlanOrPath = Plan | str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the step time of a plan depends on, one row for each thing that was given made more and less."""

    plan: Plan
    rows: tuple[Sensitivity, ...]

    def __repr__(self) -> str:
        return f"Explanation({self.plan.model.reference!r}, {len(self.rows)} changes)"

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas: name, change, and seconds of a step with the plan kept and searched again; None where it does not
        work or was not looked at."""
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
        given_up: what the engine cannot say, with the plan's word and the engine's.
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
    """Predictions beside measured runs, row by row, and what they amount to."""

    rows: "tuple[Evaluated, ...]"
    summary: "Summary"

    def __repr__(self) -> str:
        return f"Validation({self.summary.whole.evaluated} of {self.summary.whole.rows} rows evaluated)"

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


def load(path: str | os.PathLike[str]) -> Plan:
    """A plan from its file; raises PlanFileError where it is none. Loading runs no code of the file."""
    return loaded(path)


def save(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write a plan as a file, atomically, and return its path. Raises PlanFileError where it cannot be written."""
    from planner.plan.file import save_plan

    if not isinstance(plan, Plan):
        raise RequestError(f"plan is a {type(plan).__name__}: give a Plan, as result.plan is")
    save_plan(plan, os.fspath(path))
    return Path(path)


def explain(
    plan: PlanOrPath,
    *,
    model: str | None = None,
    search: bool = True,
    time_limit: float = 120.0,
    on_progress: Callable[[str], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Explanation:
    """What a step would take with other links, memory, batch, sequence or devices, the plan kept and searched again.

    Args:
        plan: a Plan, or the path of its file.
        model: the model, where the plan does not carry it.
        search: whether to search again, too.
        time_limit: seconds after which no search begins any more.
        on_progress: told in words what is looked at.
        cancelled: asked between searches; once it returns True, what is known is returned.
    """
    from planner.strategy_search.analysis.sensitivity import Search, World, sensitivities

    found = loaded(plan)
    machine, (graph, batch) = machine_of(found.cluster), planned_graph(found, model)
    bound = repriced(found, graph, batch, machine)
    ends, stop = time.perf_counter() + time_limit, cancelled or (lambda: False)
    again = Search(begins=lambda: search and time.perf_counter() < ends, cancelled=stop)
    world = World(plan=bound.plan, graph=graph, batch=batch, cluster=machine)
    rows = tuple(sensitivities(world, _retracing(found, model), again, on_progress or (lambda _: None)))
    return Explanation(plan=bound.plan, rows=rows)


def diff(
    first: PlanOrPath,
    second: PlanOrPath,
    *,
    model: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Comparison:
    """What differs between two plans of a model, and what each difference costs: `steps` sum to the difference.

    Args:
        first, second: Plans, or paths of their files.
        model: the model, where the plans do not carry it.
        on_progress: told how many differences are priced, and of how many.
        cancelled: asked on the way; once it returns True, the differences that are left are priced together.
    """
    plans, graphs = (loaded(first), loaded(second)), dict[str, Traced]()
    for one in plans:
        if one.model.fingerprint not in graphs:
            graph, batch = planned_graph(one, model)
            graphs[one.model.fingerprint] = Traced(graph=graph, batch=batch)
    return compare(*plans, graphs, on_progress or (lambda made, of: None), cancelled or (lambda: False))


def report(plan: PlanOrPath, path: str | os.PathLike[str], *, model: str | None = None) -> Path:
    """Write the page of a plan (`plan report --no-search`) and return its path. It loads nothing from anywhere."""
    from planner.plan.compare.verify import verify
    from planner.plan.writing import write_atomically
    from planner.report.data import report_of
    from planner.report.html import page

    found = loaded(plan)
    machine, (graph, batch) = machine_of(found.cluster), planned_graph(found, model)
    verdict = verify(found, graph, batch, machine)
    shown = report_of(verdict.bound, verdict.prediction, machine, remarks=tuple(verdict.remarks))
    write_atomically(Path(path), page(shown.report))
    return Path(path)


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

    Args:
        plan: a Plan, or the path of its file.
        engine: the engine.
        folder: where to write the files; else they are only returned.
        nearest: of a plan that the engine has no settings for take the nearest that it has, not the best, which is
            searched.
        tolerance: what the nearest may take longer, relatively, to be taken all the same.
        model: the model, where the plan does not carry it.
    """
    from dataclasses import asdict

    from planner.api.exporting import Way, check_fits, export_of
    from planner.api.folders import write_folder
    from planner.export.launching import folder_files

    found = loaded(plan)
    machine, (graph, batch) = machine_of(found.cluster), planned_graph(found, model)
    given = export_of(found, engine, machine, graph, batch, Way(nearest=nearest, most=tolerance))
    check_fits(given, found.model.reference)
    files = folder_files(given.target, given.job)
    if folder is not None:
        content = {"engine": engine, "model": found.model.reference, "given_up": [asdict(one) for one in given.steps]}
        write_folder(Path(folder), files, "export.json", content)
    return Exported(
        engine=engine,
        files=files,
        given_up=tuple((step.what, step.here, step.there) for step in given.steps),
        prediction=given.prediction,
        folder=None if folder is None else Path(folder),
    )


def audit(plan: PlanOrPath, *, model: str | None = None) -> "tuple[StageAudit, ...]":
    """Run one rank of every stage on tensors without data, and compare what it sends, computes and keeps with the
    prediction: `agrees` of every stage. Raises AuditError where that cannot be judged."""
    from planner.models.nicknames import full_model
    from planner.plan.binding.model_of import build_planned
    from runtime.auditing.audit import audit as audited

    found = loaded(plan)
    built = build_planned(found, None if model is None else full_model(model), why=", and an audit runs its operators")
    return tuple(audited(found, traced_model(built), built.batch, machine_of(found.cluster)))


def validate(path: str | os.PathLike[str], *, where: Mapping[str, str] | None = None, processes: int = 1) -> Validation:
    """Predictions for a table of measured runs (docs/validate.md), in so many processes; `where` keeps the rows that
    have these values in these columns."""
    from planner.validation import evaluate_rows, read_rows, summarise

    rows = read_rows(Path(path), dict(where or {}), None, strict=False)
    found = tuple(evaluate_rows(rows, processes, lambda count: None))
    return Validation(rows=found, summary=summarise(found))


def _seconds(outcome: object) -> float | None:
    return outcome.step_seconds if isinstance(outcome, Prediction) else None


def _retracing(plan: Plan, model: str | None) -> Callable[[int], Any]:
    """The model's graph for sequences of another length."""
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
