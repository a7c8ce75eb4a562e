"""Choices that contradict each other or have no meaning, for any model and any devices."""

from dataclasses import replace
from typing import get_args

from costmodels import SCHEDULES
from hardware_profiles import OP_CLASSES, PYTORCH, Cluster, Machine
from planner.errors import unknown_name
from planner.faults import Fault
from planner.nearest import divisors, nearest_words
from planner.plan.layout.kept import EVERY_SECOND_PRODUCT
from planner.plan.plan import INTERLEAVED
from planner.plan.schedule_checks import Turns, ring_fault, schedule_fault, stale_fp8_fault, tensor_overlap_fault
from planner.strategy_search.request.configurations import context_splits
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import ContextBy, Pinned, Running

_DEGREES = ("pipeline", "data", "context", "ulysses", "tensor", "expert", "replicas", "micro_batch", "micro_batches")
_SEARCHED = ("virtual_stages", "interleave", "slices", "tensor_overlap")  # 0 leaves these to the search


def pinned_fault(pinned: Pinned) -> Fault | None:
    """The first choice that contradicts another one or has no meaning; None if there is none."""
    rules = (_range_fault, _word_fault, _context_fault, _ulysses_fault, _pair_fault)
    return next((fault for rule in rules if (fault := rule(pinned)) is not None), None)


def turns_fault(request: SearchRequest) -> Fault | None:
    """Why the requested schedule cannot be combined with the other choices; None if it can."""
    pinned = request.pinned
    pipeline = 1 if request.cluster.devices == 1 else pinned.pipeline
    virtual = pinned.virtual_stages
    if virtual is None:
        virtual = 0 if pinned.schedule in (None, INTERLEAVED) else 2 if pinned.in_a_v else 1
    schedule, interleave, slices = pinned.schedule or "1f1b", pinned.interleave or 1, pinned.slices or 1
    asked = (pinned.tensor_overlap or 1) > 1
    if pinned.tensor_overlap not in (None, 1) and not runs_here(request.cluster):
        return Fault(
            option="tensor_overlap",
            value=f"{pinned.tensor_overlap or 'auto'}",
            reason="is about our own runtime, on devices of one kind; other software hides what its profile says",
            hint=f"leave it out, or set software to {PYTORCH.name}",
        )
    if request.update.by_block and not request.fp8.gathered and (own := request.cluster.software.name) != PYTORCH.name:
        return Fault(
            option="gathers",
            value=request.update.gathers,
            reason=f"is about our own runtime; {own} gathers as it does, and hides what its profile says",
            hint=f"leave it out, or set software to {PYTORCH.name}",
        )
    clash = None if schedule not in SCHEDULES else tensor_overlap_fault(asked, schedule, interleave, slices)
    if clash is not None:
        clash = replace(clash, value=f"{pinned.tensor_overlap or 'auto'}")
    if schedule in SCHEDULES:
        clash = clash or stale_fp8_fault(request.fp8, SCHEDULES[schedule], schedule)
    return clash or schedule_fault(
        Turns(
            schedule=pinned.schedule,
            pipeline=pipeline,
            virtual_stages=virtual or None,
            slices=1 if pinned.slices is None else pinned.slices or None,
            interleave=1 if pinned.interleave is None else pinned.interleave or None,
            micro_batches=pinned.micro_batches,
            global_batch=request.padded_batch,
            clip_norm=request.update.clip_norm,
            placed=bool(request.update.placed),
            owned=request.update.owned,
            padded=request.update.padding_samples > 0,
        )
    )


def runs_here(cluster: Machine) -> bool:
    """Whether plans are run by our own runtime, on devices of one kind."""
    return isinstance(cluster, Cluster) and cluster.software.name == PYTORCH.name


def _range_fault(pinned: Pinned) -> Fault | None:
    for name in _DEGREES:
        value = getattr(pinned, name)
        if value is not None and value < 1:
            return Fault(option=name, value=f"{value}", reason=": a degree is 1 or more")
    for name in _SEARCHED:
        value = getattr(pinned, name)
        if value is not None and value < 0:
            return Fault(option=name, value=f"{value}", reason=": 1 or more, or 0 to have them searched")
    if any(size < 1 for size in pinned.mesh or ()):
        return Fault(option="mesh", value=f"{pinned.mesh}", reason=": an axis has 1 device or more")
    if pinned.zero is not None and not 0 <= pinned.zero <= 3:
        reason = ": there are the stages 0, 1, 2 and 3 (Rajbhandari et al. 2020)"
        return Fault(option="zero", value=f"{pinned.zero}", reason=reason)
    return None


def _word_fault(pinned: Pinned) -> Fault | None:
    words = (
        ("schedule", pinned.schedule, SCHEDULES),
        ("value of recompute", pinned.recompute, get_args(Running)),
        ("value of context_by", pinned.context_by, get_args(ContextBy)),
        *(("op class of never_kept", name, (*OP_CLASSES, EVERY_SECOND_PRODUCT)) for name in pinned.never_kept),
    )
    for kind, word, known in words:
        if word is not None and word not in known:
            return Fault(reason=unknown_name(kind, word, known))
    return None


def _context_fault(pinned: Pinned) -> Fault | None:
    if pinned.context_by not in (None, "heads") and not pinned.manual:
        return Fault(
            option="context_by",
            value=pinned.context_by,
            reason="is about a context axis",
            hint="decide a degree too, as in context = 2",
        )
    if pinned.zigzag is not None and pinned.context_by in (None, "heads"):
        return Fault(
            option="zigzag",
            value="yes" if pinned.zigzag else "no",
            reason="is about a ring, which context_by = heads has not",
            hint="set context_by to ring, hybrid or auto, or leave zigzag out",
        )
    if pinned.context_by in ("ring", "hybrid"):
        return ring_fault(pinned.slices or 1, f"context_by = {pinned.context_by}")
    return None


def _ulysses_fault(pinned: Pinned) -> Fault | None:
    """In a context of N devices, M = `ulysses` split heads: M must divide N, and must leave a ring in a hybrid."""
    if pinned.ulysses is not None and pinned.context_by not in ("hybrid", "auto"):
        return Fault(
            option="ulysses",
            value=f"{pinned.ulysses}",
            reason="is about a context by heads inside of a ring",
            hint="set context_by to hybrid or auto",
        )
    if pinned.context is None:
        return None
    least = 2 if pinned.context_by == "hybrid" else 1
    legal = [heads for heads in divisors(pinned.context) if heads >= least and pinned.context // heads >= least]
    if pinned.ulysses is not None and pinned.context % pinned.ulysses:
        return Fault(
            option="ulysses",
            value=f"{pinned.ulysses}",
            reason=f"does not divide context = {pinned.context}",
            hint=nearest_words(pinned.ulysses, legal),
        )
    if pinned.context_by == "hybrid" and not list(context_splits(pinned, pinned.context)):
        heads = f" and ulysses = {pinned.ulysses}" if pinned.ulysses else ""
        near = f"; {nearest_words(pinned.ulysses, legal)}" if pinned.ulysses and legal else ""
        return Fault(
            option="context_by",
            value="hybrid",
            reason=f"with context = {pinned.context}{heads}: a hybrid has 2 devices or more in its ring and 2 or more"
            " by heads",
            hint=f"give another degree, or set context_by to ring or heads{near}",
        )
    return None


def _pair_fault(pinned: Pinned) -> Fault | None:
    """Options that decide the same thing, and options that have no meaning without another one."""
    if (pinned.replicas or 1) > 1 and not pinned.zero:
        return Fault(
            option="replicas",
            value=f"{pinned.replicas}",
            reason=": groups of devices share out what zero says, each for itself",
            hint="give zero = 1, 2 or 3 too",
        )
    if pinned.micro_batch is not None and pinned.micro_batches is not None:
        reason = "micro_batch (samples) and micro_batches (how many) decide the same"
        return Fault(reason=reason, hint="give one of them")
    if pinned.manual and pinned.mesh is not None:
        return Fault(reason="a mesh and degrees of parallelism decide the same", hint="give either of them")
    if pinned.whole_experts is not None and pinned.expert is None:
        reason = "whole_experts says over which devices experts are cut"
        return Fault(reason=reason, hint="give expert, how many parts, too")
    return None
