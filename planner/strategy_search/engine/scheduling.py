"""Which schedule runs a plan of the search fastest.

The objective of the search assumes one schedule, 1F1B. The plan found, with its stages, strategies and micro-batches,
may run in other schedules of whole stages too (`COMPARED`). The prediction prices each of them, pass by pass, with the
memory that it holds, and the fastest that fits is taken. 1F1B stays if the others save less than `WORTH`, because they
hold more memory. Interleaved schedules have other stages, and are searched where they are asked for. Plans with two
stages on each rank in a V (`IN_A_V`) are divided anew, for the few results that would be the fastest without their
bubble.

Interleaved micro-batches and slices of the sequence are tried on the best plan. Schedules without a flush run only if
the user asks for them: the plan found is run that way and priced.

Not good for: plans that another schedule would have divided otherwise, with fewer blocks where it holds more.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from costmodels import SCHEDULES
from hardware_profiles import PYTORCH, Bytes, Hidden, Machine, Seconds
from planner.errors import PlannerError, RequestError
from planner.plan.binding.bind import BoundPlan, bind_prepared
from planner.plan.layout.offloaded import offloaded_fault
from planner.plan.plan import SLICED, Plan, Prediction
from planner.plan.prediction.predict import interleaved_seconds, predict, predict_alike
from planner.plan.prediction.step import GATHERED_AHEAD, PIPELINE_BUBBLE, UNDER_EXCHANGE, UNDER_PRODUCTS
from planner.plan.prediction.walk.stage_cost import COMMUNICATION, GATHERING, REDUCING
from planner.plan.schedule_checks import check_schedule
from planner.strategy_search.request.checks import runs_here
from planner.strategy_search.request.offload import NOTHING
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pinned

COMPARED = tuple(name for name, schedule in SCHEDULES.items() if schedule.compared)
"""Schedules of whole stages and whole sequences, besides 1F1B."""

IN_A_V = tuple(name for name, schedule in SCHEDULES.items() if schedule.v_shaped)
"""Schedules with two stages on each rank in a V; the blocks are divided anew for them."""

Assumed: TypeAlias = Literal["1f1b", "forward", "in order", "offload"]
"""What an objective assumes that a schedule may do better (see `assumed`)."""

WORTH = 0.005
"""Share of the step that another schedule must save."""


def fastest_schedule(
    bound: BoundPlan, cluster: Machine, limits: Sequence[Bytes], cutoff: float = math.inf
) -> BoundPlan:
    """The same plan in its fastest schedule that keeps every rank within its limit of bytes. No schedule is tried if
    the plan without its bubble takes `cutoff` or longer. Software other than ours runs the schedule that it was
    measured with."""
    plan = bound.plan
    if (
        plan.pipeline == 1
        or plan.schedule != "1f1b"
        or plan.training.interleave > 1
        or cluster.software.name != PYTORCH.name
    ):
        return bound
    if _without_bubble(plan) >= cutoff:
        return bound
    return fastest_of(bound, in_orders(bound, cluster, limits))


def in_orders(bound: BoundPlan, cluster: Machine, limits: Sequence[Bytes] | None = None) -> list[BoundPlan]:
    """A 1F1B plan in each of the other compared schedules, priced; without those that do not fit within
    the limits of bytes of each rank, if limits are given."""
    others = [replace(bound, plan=replace(bound.plan, schedule=schedule)) for schedule in COMPARED]
    return [
        replace(other, plan=replace(other.plan, prediction=prediction))
        for other, prediction in zip(others, predict_alike(others, cluster, limits), strict=True)
        if prediction is not None and (limits is None or all_fit(prediction, limits, cluster))
    ]


def fastest_of(bound: BoundPlan, others: Sequence[BoundPlan]) -> BoundPlan:
    """The plan, or the fastest of the others if it saves `WORTH`."""
    best = bound
    for other in others:
        least = best.plan.prediction.step_seconds
        enough = least * (1 - WORTH) if best is bound else least
        if other.plan.prediction.step_seconds < enough:
            best = other
    return best


def with_turns(
    bound: BoundPlan, pinned: Pinned, cluster: Machine, limits: Sequence[Bytes], cutoff: Seconds = math.inf
) -> BoundPlan:
    """The same plan with interleaved micro-batches, or slices of its sequence, if the user decided about neither, and
    if that saves `WORTH` of its step and takes less than `cutoff`."""
    plan = bound.plan
    if not _turns_are_open(plan, pinned, cluster):
        return bound
    sends = plan.mesh.size > 1 and not plan.training.update.by_block
    cutoff = min(cutoff, plan.prediction.step_seconds * (1 - WORTH))
    tried = replace(pinned, interleave=0 if sends else 1, slices=0 if plan.pipeline > 1 else 1)
    others = [one for one in _tried(plan, tried) if (one.training.interleave > 1) != (one.slices > 1)]
    sliced = _sliced([_not_in_parts(one) for one in others if one.slices > 1], bound, cluster, cutoff)
    fits = plan.pipeline > 1 or least_interleaved_bytes(plan) <= limits[0]
    found = [*sliced, *_interleaved([one for one in others if fits and one.slices == 1], bound, cluster, cutoff)]
    fitting = [one for one in found if all_fit(one.plan.prediction, limits, cluster)]
    best = min(fitting, key=lambda one: one.plan.prediction.step_seconds, default=bound)
    return best if best.plan.prediction.step_seconds < cutoff else bound


def _without_bubble(plan: Plan) -> Seconds:
    """Step time of the busiest rank without waiting for others."""
    return plan.prediction.step_seconds - dict(plan.prediction.time)[PIPELINE_BUBBLE]


def _not_in_parts(plan: Plan) -> Plan:
    """The plan with the exchange of experts exposed: experts in parts overlap with other interleaved micro-batches
    only."""
    return replace(plan, training=replace(plan.training, expert_overlap=()))


def _sliced(plans: Sequence[Plan], bound: BoundPlan, cluster: Machine, cutoff: Seconds) -> list[BoundPlan]:
    """Those of some plans that may take less than `cutoff`. The plans differ in their slices, the fewest first. Slices
    only shorten the bubble: with more slices the work and the communication together take as long or longer."""
    found = list[BoundPlan]()
    for plan in plans:
        if _without_bubble(found[-1].plan if found else bound.plan) >= cutoff:
            break
        found += _priced([plan], bound, cluster)[0]
    return found


def _interleaved(plans: Sequence[Plan], bound: BoundPlan, cluster: Machine, cutoff: Seconds) -> list[BoundPlan]:
    """Those of some plans that take less than `cutoff`. The plans differ in how many micro-batches they interleave."""
    if not plans:
        return []
    try:
        first = _bound_again(plans[0], bound, {})
    except PlannerError:
        return []
    steps = interleaved_seconds(first, cluster, [one.training.interleave for one in plans])
    return _priced([one for one, seconds in zip(plans, steps, strict=True) if seconds < cutoff], bound, cluster)[0]


def least_interleaved_bytes(plan: Plan) -> Bytes:
    """A lower bound on the peak memory of a priced plan without a pipeline if micro-batches interleave: at least two
    hold activations, whichever moment is the fullest. With offload, only the peak of the plan itself."""
    prediction = plan.prediction
    return prediction.peak_bytes + (0.0 if prediction.offloaded else dict(prediction.memory)["activations"])


def turns_may_cover(bound: BoundPlan, pinned: Pinned, cluster: Machine) -> bool:
    """Whether the plan has coalesced all-gathers, with which micro-batches cannot interleave, and so much exposed
    communication that interleaving, with weights gathered one by one, may be faster."""
    plan = bound.plan
    if not _turns_are_open(plan, pinned, cluster) or plan.pipeline > 1 or not plan.training.update.by_block:
        return False
    time = dict(plan.prediction.time)
    waited = sum(time.get(name, 0.0) for name in (COMMUNICATION, GATHERING, REDUCING, GATHERED_AHEAD))
    return plan.training.micro_batches > 1 and waited >= WORTH * plan.prediction.step_seconds


def halves_may_cover(plan: Plan, pinned: Pinned, cluster: Machine, limit: Bytes, share: float) -> bool:
    """Whether a plan without a pipeline has no memory to interleave two micro-batches, and exposes communication
    between operators for so large a share of its step that halves of them, two at a time, may be faster: they take the
    same memory as one. Gathers and reductions of weights have overlaps of their own."""
    decided = pinned.micro_batches is not None or pinned.micro_batch is not None
    if decided or plan.pipeline > 1 or not _turns_are_open(plan, pinned, cluster):
        return False
    prediction, time = plan.prediction, dict(plan.prediction.time)
    exposed = sum(time.get(name, 0.0) for name in (COMMUNICATION, UNDER_PRODUCTS, UNDER_EXCHANGE))
    return least_interleaved_bytes(plan) > limit and exposed >= share * prediction.step_seconds


def _turns_are_open(plan: Plan, pinned: Pinned, cluster: Machine) -> bool:
    """Whether micro-batches and slices of the plan may run in another order."""
    return _turns_are_left(pinned, cluster) and plan.virtual_stages == 1


def _turns_are_left(pinned: Pinned, cluster: Machine) -> bool:
    """Whether the user left the order of micro-batches and slices open, and our own software runs them."""
    decided = pinned.interleave is not None or pinned.slices is not None or pinned.schedule is not None
    return runs_here(cluster) and not decided


def all_fit(prediction: Prediction, limits: Sequence[Bytes], cluster: Machine) -> bool:
    """Whether no device of a pipeline rank needs more bytes than its limit, and what is offloaded fits beside them."""
    on_devices = all(stage.peak_bytes <= limit for stage, limit in zip(prediction.stages, limits, strict=True))
    return on_devices and offloaded_fault(prediction, cluster) is None


def may_lie_in_a_v(request: SearchRequest) -> bool:
    """Whether the user left the placement of stages and the schedule open, and our own software runs them."""
    pinned = request.pinned
    decided = (pinned.schedule, pinned.virtual_stages, pinned.interleave, pinned.slices, pinned.pattern)
    return runs_here(request.cluster) and not pinned.even and all(value is None for value in decided)


def asks(pinned: Pinned) -> bool:
    """Whether the request asks for anything that is decided after the search."""
    kind = SCHEDULES[pinned.schedule or "1f1b"]
    behind = kind.sliced or not kind.flushes
    return behind or pinned.interleave not in (None, 1) or pinned.slices not in (None, 1)


def runs_in_order(request: SearchRequest, configuration: Configuration) -> bool:
    """Whether the bound of a configuration is a bound on its step as well, because all operators run in order: in one
    stage, without interleaving, slices or offload, and without software that hides a share of the communication."""
    hides = request.cluster.software.hidden != Hidden()
    return configuration.pipeline == 1 and not hides and not asks(request.pinned) and request.offload == NOTHING


def assumed(request: SearchRequest, space: Iterable[Configuration]) -> tuple[Assumed, ...]:
    """What the objectives of a space assume and a step may do better: with pipelines, 1F1B with exposed transfers, or
    forward passes alone that each take as long as their slowest stage; otherwise micro-batches one after the other,
    where they may interleave; and exposed offload. Empty if no step is shorter than its objective. Nothing about the
    schedule if a V is asked for, whose bound is by the work."""
    offload: tuple[Assumed, ...] = () if request.offload == NOTHING else ("offload",)
    return (*_assumed_order(request, space), *offload)


def _assumed_order(request: SearchRequest, space: Iterable[Configuration]) -> tuple[Assumed, ...]:
    pinned = request.pinned
    if pinned.in_a_v:
        return ()
    if any(configuration.pipeline > 1 for configuration in space):
        return ("forward",) if pinned.forward_only else ("1f1b",)
    return ("in order",) if asks(pinned) or _turns_are_left(pinned, request.cluster) else ()


def reorders(pinned: Pinned) -> bool:
    """Whether plans may run in other schedules than the search assumes."""
    return (pinned.schedule is None and pinned.pattern is None) or asks(pinned)


def as_asked(bound: BoundPlan, request: SearchRequest, cluster: Machine, limits: Sequence[Bytes]) -> BoundPlan:
    """The same plan with the interleaving and slices that the request asks for, or the fastest number of them that
    fits, and without a flush if the request asks for that, within each rank's limit of bytes. If nothing fits, the
    leanest plan is returned.

    Raises RequestError, with the numbers, if the plan cannot run this way.
    """
    found, refusal = _priced(_tried(bound.plan, request.pinned), bound, cluster)
    if not found:
        raise RequestError(f"the plan that was found cannot be taken so: {refusal}")
    if request.pinned.schedule is None and {request.pinned.interleave, request.pinned.slices} <= {None, 0, 1}:
        found.append(fastest_schedule(bound, cluster, limits))
    fitting = [one for one in found if all_fit(one.plan.prediction, limits, cluster)]
    if not fitting:
        return min(found, key=lambda one: one.plan.prediction.peak_bytes)
    return min(fitting, key=lambda one: one.plan.prediction.step_seconds)


def _tried(plan: Plan, pinned: Pinned) -> Iterator[Plan]:
    """The plan with each number of interleaved micro-batches and of slices that the request asks for."""
    for interleave in _asked(pinned.interleave, plan.training.micro_batches):
        training = replace(plan.training, interleave=interleave)
        for slices in _asked(pinned.slices, plan.model.sequence_length or 1):
            schedule = SLICED if slices > 1 else pinned.schedule or plan.schedule
            yield replace(plan, training=training, slices=slices, schedule=schedule)


def _priced(plans: Iterable[Plan], bound: BoundPlan, cluster: Machine) -> tuple[list[BoundPlan], PlannerError | None]:
    """Other plans for the graph of a micro-batch that `bound` has, with their predictions; and the error of the last
    plan that is impossible, if any."""
    found, refusal, known = list[BoundPlan](), None, dict[tuple[int, bool], BoundPlan]()
    for plan in plans:
        try:
            again = _bound_again(plan, bound, known)
        except PlannerError as error:
            refusal = error
            continue
        found.append(replace(again, plan=replace(plan, prediction=predict(again, cluster))))
    return found, refusal


def _bound_again(plan: Plan, bound: BoundPlan, known: dict[tuple[int, bool], BoundPlan]) -> BoundPlan:
    """Another plan for the graph of a micro-batch that `bound` has. `known` keeps bound plans by their number of slices
    and whether they interleave: the number of interleaved micro-batches changes the schedule only."""
    kind = (plan.slices, plan.training.interleave > 1)
    if kind not in known:
        known[kind] = bind_prepared(plan, bound.whole, bound.blocks)
    check_schedule(plan)
    return replace(known[kind], plan=plan)


def _asked(count: int | None, of: int) -> tuple[int, ...]:
    """The given number, or the numbers that are tried if it is left to the search."""
    return (count or 1,) if count != 0 else tuple(number for number in (1, 2, 4, 8, 16) if of % number == 0)
