"""`planner.import_plan`: the settings of another engine, or strategies of operators, as a plan with its price."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.api.checks import public
from planner.api.exported_folders import exported_as
from planner.api.importing import Asked, asked_for, imported
from planner.api.importing_operators import imported_operators
from planner.api.jobs import HARDWARE, traced_model, warned
from planner.errors import RequestError
from planner.plan.plan import Plan
from planner.report.imported import Remarks

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel
    from planner.plan.binding.bind import BoundPlan


@dataclass(frozen=True, kw_only=True)
class ImportedPlan:
    """Settings of an engine as a plan.

    Attributes:
        bound: the plan with the graph of its model.
        remarks: settings without a price (`unmodelled`), settings that are priced otherwise (`notes`), and settings
            that are not part of a plan (`unread`).
    """

    bound: "BoundPlan"
    remarks: Remarks

    @property
    def plan(self) -> Plan:
        return self.bound.plan

    @property
    def fits(self) -> bool:
        """Whether the predicted peak fits into the memory of a device."""
        return self.plan.prediction.peak_bytes <= self.plan.prediction.capacity_bytes

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return (
            f"ImportedPlan({self.plan.model.reference!r}, {self.plan.prediction.step_seconds:.3g} s a step, {fits};"
            f" {len(self.remarks.unmodelled)} settings without a price)"
        )


def imported_plan(
    asked: Asked, traced: "Callable[[BuiltModel], OperatorGraph]", noted: Callable[[str], None]
) -> ImportedPlan:
    """Read a file and price it. `traced` traces a model; `noted` gets notes on its operators.

    Raises RequestError or ExportError, with the name of the file.
    """
    from planner.export.targets import OPERATOR_TARGETS

    written = exported_as(asked.file)
    asked = replace(asked, engine=asked.engine or written.engine)
    if asked.engine is not None and asked.engine in OPERATOR_TARGETS:
        model = asked.model or written.model
        if model is None:
            raise RequestError(f"{asked.file}: strategies of operators name no model; name it with --model")
        bound, notes = imported_operators(asked, model, OPERATOR_TARGETS[asked.engine], traced, noted)
        return ImportedPlan(bound=bound, remarks=Remarks(notes=notes))
    if asked.global_batch is not None or asked.micro_batches is not None:
        raise RequestError("--global-batch, --micro-batches: these settings say how many; leave them out")
    found = imported(asked, traced, noted)
    reading = found.reading
    remarks = Remarks(unmodelled=reading.unmodelled, notes=reading.notes, unread=reading.unread)
    return ImportedPlan(bound=found.bound, remarks=remarks)


@public
def import_plan(
    path: str | os.PathLike[str],
    hardware: str | os.PathLike[str] = HARDWARE,
    *,
    engine: str | None = None,
    model: str | None = None,
    devices: int | None = None,
    seq_len: int | None = None,
    cluster: str | None = None,
    software: str | None = None,
    recipe: str = "",
    global_batch: int | None = None,
    micro_batches: int | None = None,
) -> ImportedPlan:
    """Convert the settings of another engine to a plan, and predict its cost. The plan may not fit.

    Args:
        path: a script, or a TOML, YAML, JSON or Python file of the engine; strategies of operators; or a folder that
            `export` wrote.
        hardware, cluster: as for `search`.
        engine: whose settings they are, as "torchtitan" or "mindspore"; guessed from the file where not given.
        model: the model, where the file does not say it.
        devices, seq_len: how many, and tokens of a sample, where the file does not say it.
        software: the training stack; that of the engine where not given.
        recipe: which recipe of a file with several.
        global_batch, micro_batches: samples and micro-batches of a step, for strategies of operators alone.

    Raises:
        RequestError: if the file cannot be read, names no model or number of devices, or contradicts an argument.
        ExportError: for settings that no plan can express, or that are none of the engine's.
        ModelError: where the model cannot be found or traced.
    """
    asked = asked_for(
        path, hardware, engine=engine, model=model, devices=devices, seq_len=seq_len, cluster=cluster,
        software=software, recipe=recipe, global_batch=global_batch, micro_batches=micro_batches,
    )  # fmt: skip
    return imported_plan(asked, traced_model, warned)
