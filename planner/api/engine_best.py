"""The best plan that an engine can run: the only place where advice calls the search.

The space of the engine is searched exactly (`planner.strategy_search.within`), with a bound. If the job is outside of
that space (experts in some engines, several kinds of devices), the engine's requirements are pinned, the search runs,
and its plan is converted to the nearest one of the engine, without a bound. The given configuration with other
micro-batches and other recomputation is tried too. The fastest plan that fits is taken.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from planner.api.carrying import Subject, asked_like, plan_of
from planner.errors import LimitError, PlannerError, StoppedBy

if TYPE_CHECKING:
    from planner.export.description import Description
    from planner.export.target import Target
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.plan import Prediction
    from planner.strategy_search.engine.scheduling import Assumed
    from planner.strategy_search.request.request import SearchRequest
    from planner.strategy_search.result import Progress, SearchResult

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
"""Decisions pinned for each engine before its plans are searched."""
_RECOMPUTE = ("none", "full")
_SAME = 1e-9
_MOST = 32  # largest micro-batch size that is tried


@dataclass(frozen=True, kw_only=True)
class EngineBest:
    """The best plan found, as a description of the engine, priced. `gap`: by how much a plan of the engine's space may
    be faster; None if the space was not searched, or gradients have another dtype there. `assumed`: what the objective
    assumes (`planner.strategy_search.result.SearchResult`)."""

    description: "Description"
    bound: "BoundPlan"
    gap: float | None = None
    assumed: "tuple[Assumed, ...]" = ()


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Limits of the search: seconds per search, `cancelled` to end all of them, and `on_progress`. `stops` gets what
    ended a search before its end."""

    time_limit: float | None = None
    on_progress: "Callable[[Progress], None]" = lambda _: None
    cancelled: Callable[[], bool] = lambda: False
    stops: "list[StoppedBy]" = field(default_factory=list)

    def plan_for(self, request: "SearchRequest") -> "SearchResult":
        """The best plan of a request, or the best so far."""
        from planner.strategy_search.objectives import plan_for

        try:
            found = plan_for(request, self.on_progress, self.cancelled)
        except LimitError as error:
            self.stops.append(error.by)
            raise
        if found.statistics.stopped_by is not None:
            self.stops.append(found.statistics.stopped_by)
        return found


def best_for_engine(subject: Subject, target: "Target", here: "Description", patience: Patience) -> EngineBest | None:
    """The fastest plan of an engine for the job of a description that fits with the memory margin; None if none was
    found."""
    best: EngineBest | None = None
    inside = _within_space(subject, target, here, patience)
    for description in _candidates(subject, target, here, patience, inside):
        bound = priced(subject, description)
        if bound is None or not roomy(subject, bound.plan.prediction):
            continue
        if best is None or bound.plan.prediction.step_seconds < best.bound.plan.prediction.step_seconds:
            best = EngineBest(description=description, bound=bound)
    if best is None or inside is None:
        return best
    there = inside.plan.training.update.gradient_dtype
    if there != best.description.update.gradient_dtype:
        return best
    slower = best.bound.plan.prediction.step_seconds > inside.plan.prediction.step_seconds * (1 + _SAME)
    return best if slower else replace(best, gap=inside.gap, assumed=inside.assumed)


def _within_space(subject: Subject, target: "Target", here: "Description", patience: Patience) -> "SearchResult | None":
    """The best plan in the engine's space for the training of a description; None if the job is outside of that space
    or nothing fits."""
    from planner.engines.spaces import SPACES

    if target.name not in SPACES:
        return None
    request = asked_like(subject, here, space=SPACES[target.name], time_limit=patience.time_limit)
    try:
        return patience.plan_for(request)
    except PlannerError:
        return None


def priced(subject: Subject, description: "Description") -> "BoundPlan | None":
    """The plan of a description; None if there is none."""
    try:
        return plan_of(subject, description)
    except PlannerError:
        return None


def roomy(subject: Subject, prediction: "Prediction") -> bool:
    """Whether a plan fits with its memory margin."""
    from hardware_profiles import parts_of

    margin = max(part.software.peak_high for part in parts_of(subject.cluster))
    return prediction.peak_bytes * margin <= prediction.capacity_bytes


def _candidates(
    subject: Subject, target: "Target", here: "Description", patience: Patience, inside: "SearchResult | None"
) -> "Iterator[Description]":
    from planner.export.describe import describe

    seen: set[Description] = set()
    if inside is None:
        searched = tuple(_searched(subject, target, here, patience))
    else:
        searched = tuple(replace(describe(one.bound), sequence_length=here.sequence_length) for one in inside.plans)
    for found in (*_varied(here), *searched):
        asked = replace(found, update=here.update)
        try:
            losses = target.nearest(asked)
        except PlannerError:
            continue
        said = losses[-1].description if losses else asked
        if said not in seen:
            seen.add(said)
            yield said


def _varied(here: "Description") -> "Iterator[Description]":
    """The configuration with other micro-batches and other recomputation."""
    from planner.plan.layout.kept import Kept

    none = (0,) * len(here.layers)
    samples = here.micro_batch * here.micro_batches
    ways = [(here.full, here.selective, here.kept), (none, none, Kept()), (here.layers, none, Kept())]
    for micro in (2**power for power in range(_MOST.bit_length())):
        if samples % micro == 0 and micro <= _MOST:
            for full, selective, kept in ways:
                yield replace(
                    here, micro_batch=micro, micro_batches=samples // micro, full=full, selective=selective, kept=kept
                )


def _searched(subject: Subject, target: "Target", here: "Description", patience: Patience) -> "Iterator[Description]":
    from planner.export.describe import describe
    from planner.strategy_search.request.offload import NOTHING
    from planner.strategy_search.request.space import Pinned

    request = asked_like(subject, here, here.update, time_limit=patience.time_limit)
    for pins in _PINNED[target.name]:
        for way in _RECOMPUTE:
            if patience.cancelled():
                patience.stops.append("interrupt")
                return
            pinned = Pinned(**pins, recompute=way, interleave=1, slices=1, even=True, offload=NOTHING)  # type: ignore[arg-type]
            try:
                result = patience.plan_for(replace(request, pinned=pinned))
                yield replace(describe(result.bound), sequence_length=here.sequence_length)
            except PlannerError:
                continue
