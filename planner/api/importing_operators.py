"""Imports of files that list strategies of operators, such as MindSpore's: matched in the model and completed by
a search.

What such a file does not say comes from the `export.json` that `plan export` writes beside it, or else from the
defaults of a search; the report says which.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_profiles.foreign import ForeignTextError, parse_json
from planner.api.exported_folders import MARKER
from planner.api.importing import Asked, refusing
from planner.api.texts import bytes_of, text_of
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.export.mindspore.sidecar import Sidecar
    from planner.export.target import OperatorReading, OperatorTarget
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.plan import Training
    from planner.strategy_search.fixed.fixed_schedule import Order


def imported_operators(
    given: Asked,
    model: str,
    target: "OperatorTarget",
    traced: "Callable[[BuiltModel], OperatorGraph]",
    noted: Callable[[str], None],
) -> "tuple[BoundPlan, tuple[str, ...]]":
    """The plan of a file for a model, and notes on it. `traced` traces a model; `noted` gets notes on its operators.
    Errors name the file."""
    from hardware_profiles import of_one_kind
    from planner.models.zoo import build_model
    from planner.plan.binding.bind import prepare
    from planner.plan.binding.machine import computing_in
    from planner.plan.outline import model_reference
    from planner.plan.plan import PRECISIONS
    from planner.sharding.discover import discover
    from planner.strategy_search.fixed.by_operator import ByOperator, operator_plan
    from planner.strategy_search.job import default_precision, machine_from, samples_per_device
    from planner.strategy_search.request.request import SearchRequest
    from planner.strategy_search.request.space import Pinned

    path = given.file / target.main if given.file.is_dir() else given.file
    content, beside = bytes_of(path), _beside(path.parent / MARKER, target.name)
    machine = of_one_kind(machine_from(given.hardware, levels=given.cluster, software=given.software), "import")
    precision = default_precision(machine) if beside is None else beside.training.precision
    length = beside.sequence_length if beside is not None and ":" not in model else None
    built = build_model(model, dtype=PRECISIONS[precision], sequence_length=length)
    graph = discover(traced(built), None, noted)
    update, imbalance = (beside.training.update, beside.training.imbalance) if beside else (None, None)
    prepared, blocks = (
        prepare(graph) if update is None or imbalance is None else prepare(graph, imbalance, update.placed)
    )
    with refusing(path, target.name):
        reading = target.read(content, prepared, blocks, given.devices)
        running = beside.running(prepared, blocks) if beside else (("none", ()),) * blocks.count
    devices = _devices(reading)
    samples = samples_per_device(graph, built.batch, model) * devices
    training = _training(reading, given, precision, samples) if beside is None else _changed(beside.training, given)
    request = SearchRequest(
        graph=graph,
        batch=built.batch,
        model=model_reference(graph, name=model, sequence_length=built.sequence_length, batch=built.batch),
        cluster=computing_in(machine.with_devices(devices), training.precision),
        global_batch=training.global_batch,
        precision=training.precision,
        optimizer=training.optimizer,
        update=training.update,
        imbalance=training.imbalance,
        pinned=Pinned(mesh=reading.mesh, pipeline=reading.pipeline, micro_batches=training.micro_batches),
    )
    decisions = ByOperator(
        operators={at: (wish.axes, wish.cuts) for at, wish in reading.operators.items()},
        parameters=reading.parameters,
        order=_order(reading, beside, training.interleave),
        running=running,
    )
    bound = operator_plan(request, decisions)
    told = () if beside else (_assumed(bound, bool(reading.parameters)),)
    return bound, (*reading.notes, *told)


def _order(reading: "OperatorReading", beside: "Sidecar | None", interleave: int) -> "Order":
    """Stages and schedule: those of export.json, or, for a file alone, the simplest that its stages allow."""
    from planner.strategy_search.fixed.fixed_schedule import Order

    virtual = len(reading.stages) // reading.pipeline
    return Order(
        stages=reading.stages,
        virtual_stages=virtual,
        schedule=beside.schedule if beside else _schedule(reading.pipeline, virtual),
        slices=beside.slices if beside else 1,
        interleave=interleave,
    )


def _devices(reading: "OperatorReading") -> int:
    found = reading.pipeline
    for size in reading.mesh:
        found *= size
    return found


def _training(reading: "OperatorReading", given: Asked, precision: str, samples: int) -> "Training":
    """The training of a file alone: the defaults of a search, with the fewest micro-batches that fill the pipeline."""
    from planner.plan.plan import Training

    training = Training(global_batch=samples, micro_batches=reading.pipeline, precision=precision, optimizer="adamw")
    return _changed(training, given)


def _changed(training: "Training", given: Asked) -> "Training":
    return replace(
        training,
        global_batch=given.global_batch or training.global_batch,
        micro_batches=given.micro_batches or training.micro_batches,
    )


def _schedule(pipeline: int, virtual_stages: int) -> str:
    from planner.export.description import schedule_of

    return schedule_of(pipeline, virtual_stages)


def _assumed(bound: "BoundPlan", layouts: bool) -> str:
    """The settings that a file alone does not have."""
    plan, training = bound.plan, bound.plan.training
    stored = "" if layouts else ", how parameters are stored (as the search finds best)"
    return (
        f"the file does not say: a global batch of {training.global_batch} samples (--global-batch), micro-batches:"
        f" {training.micro_batches} (--micro-batches), {training.precision}, {training.optimizer}, schedule"
        f" {plan.schedule}, no recomputation{stored}"
    )


def _beside(path: Path, engine: str) -> "Sidecar | None":
    """The export.json that `plan export` wrote beside a file; None if there is none."""
    from planner.export.description import ExportError
    from planner.export.mindspore.sidecar import sidecar_of

    if not path.is_file():
        return None
    try:
        content = parse_json(text_of(path))
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}; export again, or move the other file elsewhere") from error
    if not isinstance(content, dict) or content.get("engine") != engine:
        return None
    try:
        return sidecar_of(content)
    except ExportError as error:
        raise ExportError(f"{path.parent}: {error}") from error
