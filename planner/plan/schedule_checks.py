"""Which schedules can be had: one list of what clashes, for plans that name one and for requests that ask for one."""

from dataclasses import dataclass

from costmodels import SCHEDULES, Schedule
from planner.errors import PlanFileError
from planner.nearest import divisors, nearest_words
from planner.plan.plan import INTERLEAVED, SLICED, Plan

PASSES = 2**18
"""Passes of micro-batches through the ranks of a pipeline, in one step, that are followed one by one: some seconds."""

_PLACES = {
    "interleave": "training.interleave",
    "micro_batches": "training.micro_batches",
    "clip_norm": "training.clip_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What the turns of pipeline ranks depend on; None where it is not decided yet."""

    schedule: str | None
    pipeline: int | None
    virtual_stages: int | None
    slices: int | None
    interleave: int | None
    micro_batches: int | None
    global_batch: int | None
    clip_norm: float | None
    placed: bool

    @property
    def kind(self) -> Schedule | None:
        """What the schedule does."""
        return None if self.schedule is None else SCHEDULES[self.schedule]


def schedule_fault(turns: Turns) -> tuple[str, str] | None:
    """The option whose value cannot be had, and the value with the reason; None where all can."""
    rules = (_stages_fault, _slices_fault, _copies_fault, _placed_fault, _rounds_fault)
    return next((fault for rule in rules if (fault := rule(turns)) is not None), None)


def _stages_fault(turns: Turns) -> tuple[str, str] | None:
    """About ranks, and stages on each of them."""
    schedule, ranks, virtual = turns.schedule, turns.pipeline, turns.virtual_stages
    if virtual is not None and virtual > 1 and turns.kind and not turns.kind.interleaved:
        return "schedule", (
            f"{schedule} has one stage on each rank, not virtual_stages = {virtual}; take {INTERLEAVED}, or"
            " virtual_stages = 1"
        )
    if turns.kind and turns.kind.interleaved and virtual == 1:
        return "schedule", f"{schedule} takes virtual_stages = 2 or more, not 1; 1f1b has one stage on each rank"
    if ranks == 1 and schedule not in (None, "1f1b"):
        return "schedule", (
            f"{schedule} is about a pipeline of 2 ranks or more, not pipeline = 1; take 1f1b, or more ranks"
        )
    if ranks == 1 and virtual is not None and virtual > 1:
        return "virtual_stages", (
            f"{virtual} is about a pipeline of 2 ranks or more, not pipeline = 1; take virtual_stages = 1"
        )
    return None


def _slices_fault(turns: Turns) -> tuple[str, str] | None:
    schedule, slices, virtual = turns.schedule, turns.slices, turns.virtual_stages
    if slices == 1 and turns.kind and turns.kind.sliced:
        return "schedule", f"{schedule} takes a sequence in slices, not slices = 1; take slices = 2 or more, or 1f1b"
    if slices in (None, 1):
        return None
    if turns.kind and not turns.kind.sliced:
        return "slices", f"{slices} is for schedule = {SLICED}, not {schedule}; take slices = 1, or {SLICED}"
    if virtual is not None and virtual > 1:
        return "slices", f"{slices} takes one stage on each rank, not virtual_stages = {virtual}; set either to 1"
    if turns.pipeline == 1:
        return "slices", f"{slices} is about a pipeline of 2 ranks or more, not pipeline = 1; take slices = 1"
    return None


def _copies_fault(turns: Turns) -> tuple[str, str] | None:
    schedule, interleave, parts = turns.schedule, turns.interleave, turns.micro_batches
    if interleave in (None, 1):
        return None
    if turns.kind and (turns.kind.splits_backward or not turns.kind.flushes):
        why = "takes its backward pass apart" if turns.kind.splits_backward else "has no flush"
        return "interleave", (
            f"{interleave} is not for schedule = {schedule}, which {why};"
            " take interleave = 1, or 1f1b, gpipe or seqpipe"
        )
    if parts is not None and parts % interleave:
        near = nearest_words(interleave, divisors(parts))
        return "interleave", f"{interleave} does not divide micro_batches = {parts}; {near}"
    return None


def _placed_fault(turns: Turns) -> tuple[str, str] | None:
    """About tables outside of the devices."""
    if turns.placed and turns.kind and not turns.kind.flushes:
        return "schedule", (
            f"{turns.schedule} updates weights after every micro-batch, and rows of tables outside of the devices are"
            " updated once a step; take 1f1b, or leave the tables on the devices"
        )
    if turns.placed and ((turns.kind and turns.kind.sliced) or turns.slices != 1):
        option, value = ("slices", turns.slices or 0) if turns.slices != 1 else ("schedule", turns.schedule)
        return option, (
            f"{value} takes sequences in slices, whose look-ups of tables outside of the devices are not supported;"
            " take whole sequences, or leave the tables on the devices"
        )
    return None


def _rounds_fault(turns: Turns) -> tuple[str, str] | None:
    """About the number of micro-batches, and what a step without a flush cannot do."""
    schedule, ranks, parts = turns.schedule, turns.pipeline, turns.micro_batches
    if turns.kind and not turns.kind.flushes and turns.clip_norm is not None:
        return "clip_norm", (
            f"{turns.clip_norm:g} is about the norm of all gradients, which is known when all stages are done, and"
            f" schedule = {schedule} lets none wait; leave clip_norm out, or take 1f1b"
        )
    if ranks is None or parts is None:
        return None
    legal = () if turns.global_batch is None else divisors(turns.global_batch)
    if ranks > 1 and ranks * parts > PASSES:
        return "micro_batches", (
            f"{parts} with pipeline = {ranks}: {ranks * parts} passes of micro-batches through ranks, and at most"
            f" {PASSES} are followed; take fewer and larger micro-batches"
        )
    if turns.kind and turns.kind.versions == 2 and parts < ranks:
        near = nearest_words(parts, [number for number in legal if number >= ranks])
        return "micro_batches", (
            f"{parts} with pipeline = {ranks}: two versions of the weights are enough from {ranks} micro-batches on; of"
            f" a global batch of {turns.global_batch} {near}"
        )
    interleave = turns.interleave or 1
    if turns.virtual_stages is not None and turns.virtual_stages > 1 and parts % (interleave * ranks):
        near = nearest_words(parts, [number for number in legal if number % (interleave * ranks) == 0])
        return "micro_batches", (
            f"{parts} is no multiple of {interleave * ranks}, the pipeline ranks"
            f"{f' x {interleave} interleaved micro-batches' * (interleave > 1)} that"
            f" virtual stages take in rounds; of a global batch of {turns.global_batch} {near}; or take"
            " virtual_stages = 1"
        )
    return None


def check_schedule(plan: Plan) -> None:
    """Raise PlanFileError where the schedule of a plan cannot be had with its ranks, stages and micro-batches."""
    training = plan.training
    turns = Turns(
        schedule=plan.schedule,
        pipeline=plan.pipeline,
        virtual_stages=plan.virtual_stages,
        slices=plan.slices,
        interleave=training.interleave,
        micro_batches=training.micro_batches,
        global_batch=training.global_batch,
        clip_norm=training.update.clip_norm,
        placed=bool(training.update.placed),
    )
    fault = schedule_fault(turns)
    if fault is not None:
        raise PlanFileError(f"{_PLACES.get(fault[0], fault[0])}: {fault[1]}")
