"""Whether the exchange of experts runs under other work of their block, and under which.

The search sums up messages of experts as if they were waited for. What it has found is taken apart here: experts
whose exchange can run under the operators beside them (`planner.plan.layout.expert_overlap`), with as many of these
while rows go to their experts as saves most. The judge prices it, with the memory that it takes; it is taken where it
fits and saves `WORTH` of the step. On CPUs there is none unless somebody asks: their messages take the cores that
compute.

Where micro-batches take turns nothing of a block needs to be beside its experts: another micro-batch computes while
rows are on their way, there and back, forward and backward (`runtime.executor.interleaving`).

Not good for: plans whose sum, with everything waited for, is far from the least, and which would be the fastest so.
"""

from collections.abc import Sequence
from dataclasses import replace

from hardware_profiles import Bytes, Machine, device_type_of
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.expert_overlap import ExpertOverlap, expert_overlap_name, possible_expert_overlaps
from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.prediction.predict import predict
from planner.plan.prediction.walk import Walk, walks_of
from planner.strategy_search.engine.product_overlap import OverlapError, Overlapped, lacking, taken_by
from planner.strategy_search.engine.scheduling import WORTH
from planner.strategy_search.request.checks import runs_here
from planner.strategy_search.request.space import Pinned

Chosen = tuple[tuple[str, int], ...]


def may_exchange_under_work(pinned: Pinned, cluster: Machine) -> bool:
    """Whether experts may be exchanged under other work: where that is asked for, and on devices of our runtime."""
    asked = pinned.expert_overlap
    return runs_here(cluster) and asked is not False and (asked is not None or device_type_of(cluster) != "cpu")


def with_expert_overlap(bound: BoundPlan, pinned: Pinned, cluster: Machine, limits: Sequence[Bytes]) -> Overlapped:
    """The same plan with experts exchanged under other work, where that is faster or asked for; on ranks whose devices
    may use so many bytes. And what it lacks to have that, if it is only memory.

    Raises OverlapError where it is asked for, and no experts of the plan are exchanged, or there is no memory for it.
    """
    if not may_exchange_under_work(pinned, cluster):
        return Overlapped(bound)
    chosen = best_expert_overlaps(bound, cluster, every=bool(pinned.expert_overlap))
    if not chosen:
        if pinned.expert_overlap:
            raise OverlapError(
                "expert_overlap: the plan that was found exchanges no rows of experts, or a recomputed block keeps what"
                " they make; leave it out, or decide about expert"
            )
        return Overlapped(bound)
    training = replace(bound.plan.training, expert_overlap=chosen)
    tried = replace(bound, plan=replace(bound.plan, training=training))
    prediction = predict(tried, cluster)
    if not pinned.expert_overlap and prediction.step_seconds >= bound.plan.prediction.step_seconds * (1 - WORTH):
        return Overlapped(bound)
    missing = lacking(prediction, limits)
    if missing and pinned.expert_overlap:
        raise OverlapError(
            "expert_overlap: it needs more memory than the plan that was found leaves; leave it out",
            needed=taken_by(prediction, bound.plan.prediction),
        )
    if missing:
        return Overlapped(bound, missing, bound.plan.prediction.step_seconds - prediction.step_seconds)
    return Overlapped(replace(tried, plan=replace(tried.plan, prediction=prediction)))


def in_parts(bound: BoundPlan, pinned: Pinned, cluster: Machine) -> BoundPlan:
    """The same plan with all experts in parts, for others to compute while their rows are on their way, where that may
    be; its prediction is that of the plan as it was."""
    if not may_exchange_under_work(pinned, cluster):
        return bound
    names = {expert_overlap_name(at, bound) for at, _ in possible_expert_overlaps(bound, overlaps_of(bound))}
    training = replace(bound.plan.training, expert_overlap=tuple((name, 0) for name in sorted(names)))
    return replace(bound, plan=replace(bound.plan, training=training)) if names else bound


def best_expert_overlaps(bound: BoundPlan, cluster: Machine, *, every: bool = False) -> Chosen:
    """Those that save time, or `every` one, each with as many operators while rows go there as save most."""
    if not any(operator.rule.op_class == "experts" for operator in bound.operators):
        return ()
    walks, found = tuple[Walk, ...](), dict[str, int]()
    for at, beside in possible_expert_overlaps(bound, overlaps_of(bound)):
        name = expert_overlap_name(at, bound)
        if bound.plan.training.interleave > 1:
            found[name] = 0
        elif name not in found:
            walks = walks or walks_of(bound, cluster)
            exchanges = walks[walks[0].rank_of[at]].exchanges
            tried = [
                (sum(exchanges.saves(ExpertOverlap(at=at, there=beside[:count], back=beside[count:]))), -count)
                for count in range(len(beside) + 1)
            ]
            saved, count = max(tried)
            if saved > 0 or every or bound.plan.schedule_kind.paired:
                found[name] = -count
    return tuple(sorted(found.items()))
