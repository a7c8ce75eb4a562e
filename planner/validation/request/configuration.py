"""A row as a request to the planner: a model, a machine, and a configuration with every decision fixed.

An empty cell means unknown. Then the usual default of frameworks is taken and noted: no recomputation, no ZeRO without
a distributed optimizer, no sequence parallelism, micro-batches of one sample. Nothing is assumed about the model and
the number of devices, except what a note says.
"""

import math
from dataclasses import dataclass, replace

from planner.models.dimensions import Dimensions
from planner.strategy_search.request.space import Pinned
from planner.validation.reading.row_files import readings_of, unread_of
from planner.validation.reading.row_limits import check_sizes
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.request.contradictions import refuse_contradictions
from planner.validation.request.decoder import model_of
from planner.validation.request.otherwise import refuse_otherwise
from planner.validation.request.parallelism import pinned_of
from planner.validation.request.recomputation import spared_of
from planner.validation.request.row_adapters import adapters_of_row
from planner.validation.request.stage_layers import stage_layers
from planner.validation.spared import NOTHING_SPARED, Spared
from planner.validation.stack.states import USUAL, States, states_of
from planner.validation.unsupported import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and on what; runs of one job differ only in their configuration."""

    model: Dimensions
    profile: str
    devices: int
    global_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job, its configuration, and the assumptions about it.

    Attributes:
        job: the model, machine and batch.
        pinned: the fixed decisions. If `stages` is given, it has one stage on a rank, and the resulting plan is cut
            anew.
        notes: what was assumed.
        recomputed_in_backward: see `Software.recomputed_in_backward`.
        stages: layers of every stage, virtual ones too, in the order of the model; None if all have the same number.
        spared: what some of its blocks do to save memory.
        states: what its optimizer keeps.
        untold: neither the row nor a recipe says anything about recomputation.
    """

    job: Job
    pinned: Pinned
    notes: tuple[str, ...]
    recomputed_in_backward: tuple[str, ...] = ()  # see above
    stages: tuple[int, ...] | None = None
    spared: Spared = NOTHING_SPARED
    states: States = USUAL
    untold: bool = False


def run_of(row: Row) -> Run:
    """A row as a request. Raises UnsupportedError with the reason if that is impossible."""
    notes: list[str] = []
    check_sizes(row)
    if not row.text("profile"):
        raise UnsupportedError("no hardware profile is given")
    model = replace(model_of(row, notes), adapters=adapters_of_row(row, notes))
    _check_training(row, notes)
    devices, global_batch = row.needed("n_devices"), row.needed("global_batch")
    notes += (*readings_of(row), *unread_of(row))
    states = states_of(row, notes)
    spared = spared_of(row, _layers_of_stage(row, model), notes)
    pinned = pinned_of(row, devices, model, spared, notes)
    stages = stage_layers(row, model, pinned.virtual_stages or 1, notes)
    if stages is not None:
        pinned = replace(pinned, virtual_stages=1, schedule="1f1b", even=False)
    job = Job(model=model, profile=row.text("profile"), devices=devices, global_batch=global_batch)
    recomputed_in_backward: tuple[str, ...] = ()
    if pinned.never_kept == ("attention",):  # Megatron checkpoints only attention: the block runs without recomputation
        recomputed_in_backward = pinned.never_kept
        pinned = replace(pinned, recompute="none", never_kept=())
    if spared is not None and row.text("recompute") and spared.recomputed >= _longest(model, pinned, stages):
        pinned, spared = replace(pinned, recompute="full"), NOTHING_SPARED
    return Run(
        job=job,
        pinned=pinned,
        notes=tuple(notes),
        recomputed_in_backward=recomputed_in_backward,
        stages=stages,
        spared=spared or NOTHING_SPARED,
        states=states,
        untold=spared is None and row.recomputation() is None,
    )


def _layers_of_stage(row: Row, model: Dimensions) -> int:
    """Layers of a stage, rounded up."""
    pipeline = row.integer("pp") or 1
    return math.ceil(model.layers / (pipeline * ((row.integer("vpp") or 1) if pipeline > 1 else 1)))


def _longest(model: Dimensions, pinned: Pinned, stages: tuple[int, ...] | None) -> int:
    """Blocks of the longest stage."""
    return max(stages) if stages else math.ceil(model.layers / ((pinned.pipeline or 1) * (pinned.virtual_stages or 1)))


def _check_training(row: Row, notes: list[str]) -> None:
    words = row.model_and_flags()
    refuse_otherwise(row)
    refuse_contradictions(row)
    if mentions(words, r"offload"):
        notes.append("what offloading moves takes no time here")
