"""Choices that contradict each other or mean nothing, whatever the model and the devices are."""

from typing import get_args

from costmodels import SCHEDULES
from hardware_profiles import OP_CLASSES
from planner.errors import RequestError, unknown_name
from planner.faults import assigned, refuse
from planner.nearest import divisors, nearest_words
from planner.plan.plan import INTERLEAVED
from planner.plan.schedule_checks import Turns, ring_fault, schedule_fault
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import ContextBy, Pinned, Running, context_splits

_DEGREES = ("pipeline", "data", "context", "ulysses", "tensor", "expert", "replicas", "micro_batch", "micro_batches")
_SEARCHED = ("virtual_stages", "interleave", "slices")  # where 0 has them searched


def check_pinned(pinned: Pinned) -> None:
    """Raise RequestError where choices contradict each other or mean nothing."""
    for name in _DEGREES:
        value = getattr(pinned, name)
        if value is not None and value < 1:
            raise RequestError(f"{name} = {value}: a degree is 1 or more")
    for name in _SEARCHED:
        value = getattr(pinned, name)
        if value is not None and value < 0:
            raise RequestError(f"{name} = {value}: 1 or more, or 0 to have them searched")
    if any(size < 1 for size in pinned.mesh or ()):
        raise RequestError(f"mesh = {pinned.mesh}: an axis has 1 device or more")
    _check_words(pinned)
    _check_context_by(pinned)
    _check_ulysses(pinned)
    if pinned.zero is not None and not 0 <= pinned.zero <= 3:
        raise RequestError(f"zero = {pinned.zero}: there are the stages 0, 1, 2 and 3 (Rajbhandari et al. 2020)")
    if (pinned.replicas or 1) > 1 and not pinned.zero:
        raise RequestError(
            f"replicas = {pinned.replicas}: groups of devices share out what zero says, each for itself; give zero = 1,"
            " 2 or 3 too"
        )
    if pinned.micro_batch is not None and pinned.micro_batches is not None:
        raise RequestError("micro_batch (samples) and micro_batches (how many) decide the same; give one of them")
    if pinned.manual and pinned.mesh is not None:
        raise RequestError("a mesh and degrees of parallelism decide the same; give either of them")
    if pinned.whole_experts is not None and pinned.expert is None:
        raise RequestError("whole_experts says over which devices experts are cut; give expert, how many parts, too")


def check_turns(request: SearchRequest) -> None:
    """Raise RequestError where the schedule that is asked for cannot be had with what else is."""
    pinned = request.pinned
    pipeline = 1 if request.cluster.devices == 1 else pinned.pipeline
    virtual = pinned.virtual_stages
    if virtual is None:
        virtual = 0 if pinned.schedule == INTERLEAVED else 1
    fault = schedule_fault(
        Turns(
            schedule=pinned.schedule,
            pipeline=pipeline,
            virtual_stages=virtual or None,
            slices=1 if pinned.slices is None else pinned.slices or None,
            interleave=1 if pinned.interleave is None else pinned.interleave or None,
            micro_batches=pinned.micro_batches,
            global_batch=request.global_batch,
            clip_norm=request.update.clip_norm,
            placed=bool(request.update.placed),
        )
    )
    refuse(fault, RequestError, assigned)


def _check_words(pinned: Pinned) -> None:
    if pinned.schedule is not None and pinned.schedule not in SCHEDULES:
        raise RequestError(unknown_name("schedule", pinned.schedule, SCHEDULES))
    if pinned.recompute is not None and pinned.recompute not in get_args(Running):
        raise RequestError(unknown_name("value of recompute", pinned.recompute, get_args(Running)))
    if pinned.context_by not in get_args(ContextBy):
        raise RequestError(unknown_name("value of context_by", pinned.context_by, get_args(ContextBy)))
    for name in pinned.repeated:
        if name not in OP_CLASSES:
            raise RequestError(unknown_name("op class of repeated", name, OP_CLASSES))


def _check_context_by(pinned: Pinned) -> None:
    if pinned.context_by != "heads" and not pinned.manual:
        raise RequestError(
            f"context_by = {pinned.context_by} is about a context axis; decide a degree too, as in context = 2"
        )
    if pinned.zigzag is not None and pinned.context_by == "heads":
        raise RequestError(
            f"zigzag = {'yes' if pinned.zigzag else 'no'} is about a ring, which context_by = heads has not; set"
            " context_by to ring, hybrid or auto, or leave zigzag out"
        )
    if pinned.context_by in ("ring", "hybrid"):
        refuse(ring_fault(pinned.slices or 1, f"context_by = {pinned.context_by}"), RequestError, assigned)


def _check_ulysses(pinned: Pinned) -> None:
    """Of a context of N devices, M = `ulysses` split heads: M divides N, and leaves a ring to a hybrid."""
    if pinned.ulysses is not None and pinned.context_by not in ("hybrid", "auto"):
        raise RequestError(
            f"ulysses = {pinned.ulysses} is about a context by heads inside of a ring; set context_by to hybrid or auto"
        )
    if pinned.context is None:
        return
    least = 2 if pinned.context_by == "hybrid" else 1
    legal = [heads for heads in divisors(pinned.context) if heads >= least and pinned.context // heads >= least]
    if pinned.ulysses is not None and pinned.context % pinned.ulysses:
        raise RequestError(
            f"ulysses = {pinned.ulysses} does not divide context = {pinned.context};"
            f" {nearest_words(pinned.ulysses, legal)}"
        )
    if pinned.context_by == "hybrid" and not list(context_splits(pinned, pinned.context)):
        heads = f" and ulysses = {pinned.ulysses}" if pinned.ulysses else ""
        near = f"; {nearest_words(pinned.ulysses, legal)}" if pinned.ulysses and legal else ""
        raise RequestError(
            f"context_by = hybrid with context = {pinned.context}{heads}: a hybrid has 2 devices or more in its ring"
            f" and 2 or more by heads; give another degree, or set context_by to ring or heads{near}"
        )
