"""Which schedules are possible: one list of conflicts, for plans that name a schedule and for requests that ask for
one."""

from dataclasses import dataclass

from costmodels import SCHEDULES, Schedule
from planner.faults import Fault
from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import Fp8
from planner.nearest import divisors, nearest_words
from planner.plan.plan import INTERLEAVED, SLICED, Plan
from planner.plan.refusing import refuse_plan
from planner.sharding.update import Update

PASSES = 2**18
"""Most passes of micro-batches through the ranks of a pipeline in one step that are simulated one by one: some
seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What the schedule steps of pipeline ranks depend on; None where it is not decided yet."""

    schedule: str | None
    pipeline: int | None
    virtual_stages: int | None
    slices: int | None
    interleave: int | None
    micro_batches: int | None
    global_batch: int | None
    clip_norm: float | None
    placed: bool
    owned: bool = False
    padded: bool = False

    @property
    def kind(self) -> Schedule | None:
        """What the schedule does."""
        return None if self.schedule is None else SCHEDULES[self.schedule]


def schedule_fault(turns: Turns) -> Fault | None:
    """The first conflict; None where there is none."""
    rules = (_stages_fault, _slices_fault, _interleave_fault, _placed_fault, _owners_fault, _rounds_fault)
    return next((fault for rule in rules if (fault := rule(turns)) is not None), None)


def _stages_fault(turns: Turns) -> Fault | None:
    """Conflicts of ranks, and of the stages on each of them."""
    schedule, ranks, virtual = turns.schedule, turns.pipeline, turns.virtual_stages
    if schedule and virtual is not None and turns.kind and turns.kind.v_shaped and virtual != 2:
        return Fault(
            option="schedule",
            value=schedule,
            reason=f"has two stages on each rank, in a V, not virtual_stages = {virtual}",
            hint=f"take virtual_stages = 2, or leave it out; {INTERLEAVED} has any number",
        )
    if schedule and virtual is not None and virtual > 1 and turns.kind and not turns.kind.virtual:
        return Fault(
            option="schedule",
            value=schedule,
            reason=f"has one stage on each rank, not virtual_stages = {virtual}",
            hint=f"take {INTERLEAVED}, or virtual_stages = 1",
        )
    if schedule and turns.kind and turns.kind.interleaved and virtual == 1:
        return Fault(
            option="schedule",
            value=schedule,
            reason="takes virtual_stages = 2 or more, not 1",
            hint="1f1b has one stage on each rank",
        )
    if ranks == 1 and schedule not in (None, "1f1b") and turns.kind and turns.kind.trains:
        return Fault(
            option="schedule",
            value=schedule,
            reason="is about a pipeline of 2 ranks or more, not pipeline = 1",
            hint="take 1f1b, or more ranks",
        )
    if ranks == 1 and virtual is not None and virtual > 1:
        return Fault(
            option="virtual_stages",
            value=f"{virtual}",
            reason="is about a pipeline of 2 ranks or more, not pipeline = 1",
            hint="take virtual_stages = 1",
        )
    return None


def _slices_fault(turns: Turns) -> Fault | None:
    schedule, slices = turns.schedule, turns.slices
    if schedule and slices == 1 and turns.kind and turns.kind.sliced:
        return Fault(
            option="schedule",
            value=schedule,
            reason="takes a sequence in slices, not slices = 1",
            hint="take slices = 2 or more, or 1f1b",
        )
    if slices in (None, 1):
        return None
    if turns.kind and not turns.kind.sliced:
        reason, hint = f"is for schedule = {SLICED}, not {schedule}", f"take slices = 1, or {SLICED}"
    elif turns.pipeline == 1:
        reason, hint = "is about a pipeline of 2 ranks or more, not pipeline = 1", "take slices = 1"
    else:
        return None
    return Fault(option="slices", value=f"{slices}", reason=reason, hint=hint)


def _interleave_fault(turns: Turns) -> Fault | None:
    schedule, interleave, parts = turns.schedule, turns.interleave, turns.micro_batches
    if interleave in (None, 1):
        return None
    if turns.kind and (turns.kind.splits_backward or not turns.kind.flushes):
        why = "takes its backward pass apart" if turns.kind.splits_backward else "has no flush"
        reason = f"is not for schedule = {schedule}, which {why}"
        hint = "take interleave = 1, or 1f1b, gpipe or seqpipe"
    elif parts is not None and parts % interleave:
        reason, hint = f"does not divide micro_batches = {parts}", nearest_words(interleave, divisors(parts))
    else:
        return None
    return Fault(option="interleave", value=f"{interleave}", reason=reason, hint=hint)


def _placed_fault(turns: Turns) -> Fault | None:
    """Conflicts of tables outside of the devices."""
    schedule = turns.schedule
    if schedule and turns.placed and turns.kind and not turns.kind.flushes:
        return Fault(
            option="schedule",
            value=schedule,
            reason="updates weights after every micro-batch, and rows of tables outside of the devices are updated once"
            " a step",
            hint="take 1f1b, or leave the tables on the devices",
        )
    if turns.placed and ((turns.kind and turns.kind.sliced) or turns.slices != 1):
        sliced = turns.slices != 1
        return Fault(
            option="slices" if sliced else "schedule",
            value=f"{turns.slices or 0}" if sliced else f"{schedule}",
            reason="takes sequences in slices, whose look-ups of tables outside of the devices are not supported",
            hint="take whole sequences, or leave the tables on the devices",
        )
    return None


def _owners_fault(turns: Turns) -> Fault | None:
    """Conflicts of states that are shared out by whole parameters."""
    if not turns.owned or turns.kind is None or turns.kind.flushes:
        return None
    return Fault(
        option="zero_by",
        value="'parameters'",
        reason="broadcasts new weights once a step, behind all updates of their owner, and schedule ="
        f" {turns.schedule} updates weights after every micro-batch",
        hint="take slices, or 1f1b",
    )


def _rounds_fault(turns: Turns) -> Fault | None:
    """Conflicts of the number of micro-batches, and what a step without a flush cannot do."""
    if turns.kind and not turns.kind.flushes and turns.clip_norm is not None:
        return Fault(
            option="clip_norm",
            value=f"{turns.clip_norm:g}",
            reason="is about the norm of all gradients, which is known when all stages are done, and schedule ="
            f" {turns.schedule} lets none wait",
            hint="leave clip_norm out, or take 1f1b",
        )
    if turns.kind and not turns.kind.flushes and turns.padded:
        return Fault(
            option="schedule",
            value=f"{turns.schedule}",
            reason="updates weights after every micro-batch, and the last of a padded batch has fewer samples",
            hint="take 1f1b, or a global batch that divides",
        )
    ranks, parts = turns.pipeline, turns.micro_batches
    clash = None if ranks is None or parts is None else _round_words(turns, ranks, parts)
    return None if clash is None else Fault(option="micro_batches", value=f"{parts}", reason=clash[0], hint=clash[1])


def _round_words(turns: Turns, ranks: int, parts: int) -> tuple[str, str] | None:
    """Why `ranks` ranks cannot schedule `parts` micro-batches, and what to do; None where they can."""
    batch, interleave = turns.global_batch, turns.interleave or 1
    legal = () if batch is None else divisors(batch)
    if ranks > 1 and ranks * parts > PASSES:
        return (
            f"with pipeline = {ranks}: {ranks * parts} passes of micro-batches through ranks, and at most {PASSES} are"
            " followed",
            "take fewer and larger micro-batches",
        )
    if turns.kind and turns.kind.versions == 2 and parts < ranks:
        near = nearest_words(parts, [number for number in legal if number >= ranks])
        return (
            f"with pipeline = {ranks}: two versions of the weights are enough from {ranks} micro-batches on",
            f"of a global batch of {batch} {near}",
        )
    units = parts // interleave * (turns.slices or 1)
    rounds = turns.kind is None or not turns.kind.v_shaped
    if rounds and turns.virtual_stages is not None and turns.virtual_stages > 1 and units % ranks:
        near = nearest_words(parts, [number for number in legal if number % (interleave * ranks) == 0])
        return (
            f"is no multiple of {interleave * ranks}, the pipeline ranks"
            f"{f' x {interleave} interleaved micro-batches' * (interleave > 1)} that virtual stages take in rounds",
            f"of a global batch of {batch} {near}; or take virtual_stages = 1",
        )
    return None


def gathers_fault(update: Update, interleave: int) -> Fault | None:
    """Why interleaved micro-batches cannot gather weights as `update` says; None where they can."""
    if interleave == 1 or not update.by_block:
        return None
    return Fault(
        option="gathers",
        value=f"'{update.gathers}'",
        reason=f", but {interleave} micro-batches take turns operator by operator",
        hint="write 'each', or set interleave to 1",
    )


def tensor_overlap_fault(overlaps: bool, schedule: str, interleave: int, slices: int) -> Fault | None:
    """Why collectives of tensor parallelism, if any, cannot run under their products; None where they can.
    Interleaved micro-batches, slices, and deferred weight gradients run operator by operator."""
    if not overlaps:
        return None
    if interleave > 1:
        clash, hint = f"interleave = {interleave}", "take one of them"
    elif slices > 1:
        clash, hint = f"slices = {slices}", "take one of them"
    elif SCHEDULES[schedule].splits_backward:
        clash, hint = f"schedule = {schedule}", "leave out tensor_overlap, or take 1f1b"
    else:
        return None
    return Fault(
        option="tensor_overlap",
        value="",
        reason=f"takes collectives and their products in one, and {clash} takes operators apart",
        hint=hint,
    )


def ring_fault(slices: int, ring: str) -> Fault | None:
    """Why `ring` cannot pass keys round where a sequence is taken in this number of slices; None where it can."""
    if slices == 1:
        return None
    return Fault(
        option="slices",
        value=f"{slices}",
        reason=f"and {ring}: a slice remembers the keys of those before it, a ring sends them round",
        hint="take one of them",
    )


def check_schedule(plan: Plan) -> None:
    """Raise PlanFileError where the schedule of a plan is impossible with its ranks, stages and micro-batches."""
    training = plan.training
    turns = Turns(
        schedule=plan.schedule,
        pipeline=plan.pipeline,
        virtual_stages=plan.virtual_stages,
        slices=plan.slices,
        interleave=training.interleave,
        micro_batches=training.micro_batches,
        global_batch=training.padded_batch,
        clip_norm=training.update.clip_norm,
        placed=bool(training.update.placed),
        owned=training.update.owned,
        padded=training.update.padding_samples > 0,
    )
    refuse_plan(schedule_fault(turns))
    refuse_plan(sliced_fp8_fault(training.fp8, plan.slices))
    refuse_plan(stale_fp8_fault(training.fp8, plan.schedule_kind, plan.schedule))
    offloaded = any(stored.weight_offloaded for group in plan.groups for _, stored in group.parameters)
    refuse_plan(gathered_fault(training.fp8, training.update, offloaded))
    refuse_plan(sliced_replicas_fault(training.update, plan.slices))
    overlaps = bool(training.tensor_overlap)
    refuse_plan(tensor_overlap_fault(overlaps, plan.schedule, training.interleave, plan.slices))


def stale_fp8_fault(fp8: Fp8, schedule: Schedule, name: str) -> Fault | None:
    """Why a schedule cannot have delayed scales, or scales of weights that are gathered in fp8; None where it can."""
    if schedule.flushes or not (fp8.delayed or fp8.gathered):
        return None
    if not fp8.delayed:
        reason = f"has scales that are found as a step begins, and schedule = {name} changes weights within it"
        return Fault(option="fp8_gathered", value="true", reason=reason, hint="take a schedule with a flush, as 1f1b")
    reason = f"has scales of the step before, and schedule = {name} begins steps before others have ended"
    return Fault(option="fp8", value=fp8.recipe, reason=reason, hint="take a schedule with a flush, as 1f1b")


def gathered_fault(fp8: Fp8, update: Update, offloaded: bool) -> Fault | None:
    """Why weights cannot be gathered in fp8 as `update` gathers them, given whether the weights of some blocks are
    `offloaded`; None where they can. They are cast for a block, before it begins."""
    if not fp8.gathered:
        return None
    if not update.by_block:
        reason = f"casts the weights of a block before it begins; gathers = {update.gathers} brings each as it is used"
        return Fault(option="fp8_gathered", value="true", reason=reason, hint="take gathers = ahead or block")
    if offloaded or update.local_parameters:
        reason = "goes neither with offloaded weights nor with local parameters, which are not gathered"
        return Fault(option="fp8_gathered", value="true", reason=reason, hint="leave one of them out")
    return None


def sliced_replicas_fault(update: Update, slices: int | None) -> Fault | None:
    """Why operators cannot be computed by every replica where a sequence comes in slices; None where they can."""
    if not update.per_replica or slices in (None, 1):
        return None
    return Fault(
        option="slices",
        value=f"{slices}",
        reason="cut what operators named in per_replica look at",
        hint="take slices = 1, or leave per_replica out",
    )


def sliced_fp8_fault(fp8: Fp8, slices: int | None) -> Fault | None:
    """Why linear layers cannot be in fp8 where a sequence comes in slices; None where they can. A scale over all slices
    is known only after the last of them."""
    recipe = RECIPES.get(fp8.recipe)
    if recipe is None or recipe.of_rows_alone or slices in (None, 1):
        return None
    alone = ", ".join(name for name, one in RECIPES.items() if one.of_rows_alone)
    return Fault(
        option="slices",
        value=f"{slices}",
        reason=f"cut what fp8 = {fp8.recipe} has one scale for",
        hint=f"take slices = 1, or fp8 = {alone}",
    )
