"""Plans whose experts are exchanged under other work."""

from dataclasses import replace

from planner.plan.binding.bind import bind
from planner.plan.layout.expert_overlap import expert_overlap_name, possible_expert_overlaps
from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.plan import Plan
from tests.distributed import plans


def exchanged(plan: Plan, model: str, there: int) -> Plan:
    """The plan with all overlaps that it can have, so many operators while rows go to their experts, or as many as
    there are; with none where that is less than none."""
    if there < 0:
        return plan
    bound = bind(plan, plans.traced(model), plans.BATCH)
    found = {
        expert_overlap_name(at, bound): min(there, len(beside))
        for at, beside in possible_expert_overlaps(bound, overlaps_of(bound))
    }
    return replace(plan, training=replace(plan.training, expert_overlap=tuple(sorted(found.items()))))
