"""Whether the exchange of experts (dispatch and combine) overlaps with other work of their block, and with which.

The objective counts the exchange of experts as exposed. Here overlaps are chosen for the plan found: experts whose
exchange can run beside other operators (`planner.plan.layout.expert_overlap`), with the number of operators beside the
dispatch that saves most. The prediction prices the plan with the memory that this takes. It is taken if it fits and
saves `WORTH` of the step. On CPUs there is no overlap unless the user asks for it: their communication takes the cores
that compute.

With interleaved micro-batches no operator of the block has to run beside its experts: another micro-batch computes
during dispatch and combine, forward and backward (`runtime.executor.interleaving`).

Not good for: plans whose objective, with everything exposed, is far from the lowest, and which would be the fastest
with overlap.
"""

from collections.abc import Sequence
from dataclasses import replace

from hardware_profiles import Bytes, Machine, device_type_of
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.expert_overlap import divided, expert_overlap_name, possible_expert_overlaps
from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.prediction.predict import predict
from planner.plan.prediction.walk.walk import Walk, walks_of
from planner.strategy_search.engine.product_overlap import OverlapError, Overlapped, lacking, taken_by
from planner.strategy_search.engine.scheduling import WORTH
from planner.strategy_search.request.checks import runs_here
from planner.strategy_search.request.space import Pinned

Chosen = tuple[tuple[str, int], ...]


def may_exchange_under_work(pinned: Pinned, cluster: Machine) -> bool:
    """Whether exchanges of experts may overlap with other work: the request must allow it, and our runtime must run the
    devices."""
    asked = pinned.expert_overlap
    return runs_here(cluster) and asked is not False and (asked is not None or device_type_of(cluster) != "cpu")


def with_expert_overlap(bound: BoundPlan, pinned: Pinned, cluster: Machine, limits: Sequence[Bytes]) -> Overlapped:
    """The same plan with overlapped exchanges of experts, if that is faster or asked for, within each rank's limit of
    bytes; and the memory that it lacks for that, if only memory is missing.

    Raises OverlapError if the request asks for it and the plan exchanges no experts, or has no memory for it.
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
    """The same plan with all experts in parts, where that is possible, so that other micro-batches compute during their
    exchange. The prediction remains that of the plan before."""
    if not may_exchange_under_work(pinned, cluster):
        return bound
    names = {expert_overlap_name(at, bound) for at, _ in possible_expert_overlaps(bound, overlaps_of(bound))}
    training = replace(bound.plan.training, expert_overlap=tuple((name, 0) for name in sorted(names)))
    return replace(bound, plan=replace(bound.plan, training=training)) if names else bound


def best_expert_overlaps(bound: BoundPlan, cluster: Machine, *, every: bool = False) -> Chosen:
    """The overlaps that save time, or `every` possible one, each with the number of operators beside the dispatch that
    saves most."""
    if not any(operator.rule.op_class == "experts" for operator in bound.operators):
        return ()
    walks, found = tuple[Walk, ...](), dict[str, int]()
    overlaps = overlaps_of(bound)
    for at, beside in possible_expert_overlaps(bound, overlaps):
        name = expert_overlap_name(at, bound)
        if bound.plan.training.interleave > 1:
            found[name] = 0
        elif name not in found:
            walks = walks or walks_of(bound, cluster)
            exchanges = walks[walks[0].rank_of[at]].exchanges
            tried = [
                (sum(exchanges.saves(divided(at, beside, count, overlaps))), -count) for count in range(len(beside) + 1)
            ]
            saved, count = max(tried)
            if saved > 0 or every or bound.plan.schedule_kind.paired:
                found[name] = -count
    return tuple(sorted(found.items()))
