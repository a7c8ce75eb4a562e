"""The best plan that an engine can say: the one seam between advice and the search.

What an engine needs is pinned, the search runs, and its plan is carried to the nearest one that the engine can say;
every way to recompute that an engine has a setting for is tried. Beside these, the configuration that there is stands
with other micro-batches and other recomputation. The fastest of all that fit is taken.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.api.carrying import Subject, plan_of
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.export.description import Description
    from planner.export.target import Target
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.plan import Prediction

_PINNED: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "megatron": ({"zero": 1, "sequence_parallel": True},),
    "megatron-bridge": ({"zero": 1, "sequence_parallel": True},),
    "nemo": ({"zero": 1, "sequence_parallel": True},),
    "mindspeed": ({"zero": 1, "sequence_parallel": True},),
    "mindformers": ({"zero": 1, "sequence_parallel": True},),
    "torchtitan": ({"zero": 3, "sequence_parallel": True}, {"zero": 2, "sequence_parallel": True}),
    "accelerate": ({"zero": 3, "pipeline": 1, "tensor": 1}, {"zero": 2, "pipeline": 1, "tensor": 1}),
    "deepspeed": tuple({"zero": stage, "pipeline": 1, "tensor": 1} for stage in (1, 2, 3)),
    "torch": ({"zero": 2, "context": 1}, {"zero": 3, "context": 1}),
}
"""What is decided for each engine before its plans are searched."""
_RECOMPUTE = ("none", "full")
_MOST = 32  # samples of a micro-batch that are tried


@dataclass(frozen=True, kw_only=True)
class EngineBest:
    """The best that was found in the words of an engine, priced."""

    description: "Description"
    bound: "BoundPlan"


def best_for_engine(
    subject: Subject, target: "Target", here: "Description", time_limit: float | None = None
) -> EngineBest | None:
    """The fastest plan of an engine for the job that a description says, that fits with the margin for the error of its
    prediction; None where none was found that does."""
    best: EngineBest | None = None
    for description in _candidates(subject, target, here, time_limit):
        bound = priced(subject, description)
        if bound is None or not roomy(subject, bound.plan.prediction):
            continue
        if best is None or bound.plan.prediction.step_seconds < best.bound.plan.prediction.step_seconds:
            best = EngineBest(description=description, bound=bound)
    return best


def priced(subject: Subject, description: "Description") -> "BoundPlan | None":
    """The plan of a description; None where there is none."""
    try:
        return plan_of(subject, description)
    except PlannerError:
        return None


def roomy(subject: Subject, prediction: "Prediction") -> bool:
    """Whether a plan fits with what the error of its prediction may add."""
    from hardware_profiles import parts_of

    margin = max(part.software.peak_high for part in parts_of(subject.cluster))
    return prediction.peak_bytes * margin <= prediction.capacity_bytes


def _candidates(
    subject: Subject, target: "Target", here: "Description", time_limit: float | None
) -> "Iterator[Description]":
    seen: set[Description] = set()
    for found in (*_varied(here), *_searched(subject, target, here, time_limit)):
        try:
            losses = target.nearest(found)
        except PlannerError:
            continue
        said = replace(losses[-1].description if losses else found, update=here.update)
        if said not in seen:
            seen.add(said)
            yield said


def _varied(here: "Description") -> "Iterator[Description]":
    """The configuration with other micro-batches and other recomputation."""
    from planner.export.description import Kept

    none = (0,) * len(here.layers)
    samples = here.micro_batch * here.micro_batches
    ways = [(here.full, here.selective, here.kept), (none, none, Kept()), (here.layers, none, Kept())]
    for micro in (2**power for power in range(_MOST.bit_length())):
        if samples % micro == 0 and micro <= _MOST:
            for full, selective, kept in ways:
                yield replace(
                    here, micro_batch=micro, micro_batches=samples // micro, full=full, selective=selective, kept=kept
                )


def _searched(
    subject: Subject, target: "Target", here: "Description", time_limit: float | None
) -> "Iterator[Description]":
    from planner.export.describe import describe
    from planner.strategy_search.objectives import plan_for
    from planner.strategy_search.request.offload import NOTHING
    from planner.strategy_search.request.request import SearchRequest
    from planner.strategy_search.request.space import Pinned

    request = SearchRequest(
        graph=subject.graph,
        batch=subject.batch,
        model=subject.model,
        cluster=subject.cluster,
        global_batch=here.global_batch,
        precision=here.precision,
        optimizer=here.optimizer,
        update=here.update,
        imbalance=here.imbalance,
        time_limit=time_limit,
    )
    for pins in _PINNED[target.name]:
        for way in _RECOMPUTE:
            pinned = Pinned(**pins, recompute=way, interleave=1, slices=1, even=True, offload=NOTHING)  # type: ignore[arg-type]
            try:
                result = plan_for(replace(request, pinned=pinned), lambda *_: None, lambda: False)
                yield replace(describe(result.bound), sequence_length=here.sequence_length)
            except PlannerError:
                continue
