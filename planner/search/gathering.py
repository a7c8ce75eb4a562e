"""How the weights of a plan that was found are gathered fastest, where that is left to the search.

The sums that the search minimises gather each weight by itself, which takes the most time and the least memory. A plan
that gathers any may do so block by block, or ahead (`planner.plan.block_gathers`): the judge prices both, with the
memory that they hold, and the fastest that fits is taken.

Not good for: plans that are found only where gathers are hidden. They are searched with `gathers="ahead"`.
"""

from collections.abc import Sequence
from dataclasses import replace

from hardware_profiles import PYTORCH, Bytes, Machine
from planner.plan.bind import BoundPlan
from planner.plan.block_gathers import gathers_of_stage
from planner.plan.parked_saved import home_of_saved
from planner.plan.predict import predict
from planner.sharding.update import GATHERS


def fastest_gathers(bound: BoundPlan, cluster: Machine, limits: Sequence[Bytes]) -> BoundPlan:
    """The same plan with weights gathered as it takes it least, on ranks whose devices may use so many bytes. Software
    other than ours gathers as it was measured."""
    if cluster.software != PYTORCH or bound.plan.training.copies > 1 or _parks_what_it_saves(bound):
        return bound
    others = [_with(bound, gathers) for gathers in GATHERS if gathers != bound.plan.training.update.gathers]
    if not any(run.gathers for stage in range(len(bound.plan.stages)) for run in gathers_of_stage(others[0], stage)):
        return bound
    best = bound
    for other in others:
        prediction = predict(other, cluster)
        fits = all(stage.peak_bytes <= limit for stage, limit in zip(prediction.stages, limits, strict=True))
        if fits and prediction.step_seconds < best.plan.prediction.step_seconds:
            best = replace(other, plan=replace(other.plan, prediction=prediction))
    return best


def _with(bound: BoundPlan, gathers: str) -> BoundPlan:
    plan = bound.plan
    update = replace(plan.training.update, gathers=gathers)
    return replace(bound, plan=replace(plan, training=replace(plan.training, update=update)))


def _parks_what_it_saves(bound: BoundPlan) -> bool:
    return any(home_of_saved(bound, block) != "device" for block in bound.parked_blocks)
