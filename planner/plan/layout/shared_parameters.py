"""Parameters that several pipeline ranks hold, and whose gradients they add up: tied embeddings, as a rule."""

from typing import cast

from planner.plan.binding.bind import BoundPlan, stage_ends, stage_of_operators


def shared_parameters(bound: BoundPlan) -> frozenset[str]:
    """Their names."""
    key = ("shared parameters", stage_ends(bound), bound.plan.pipeline, bound.plan.schedule_kind.v_shaped)
    if key not in bound.graph.derived:
        stages, plan, uses = stage_of_operators(bound), bound.plan, bound.graph.consumers
        homes = {name: {plan.rank_of(stages[at]) for at in uses.get(name, ())} for name in bound.parameters}
        bound.graph.derived[key] = frozenset(name for name, ranks in homes.items() if len(ranks) > 1)
    return cast("frozenset[str]", bound.graph.derived[key])
