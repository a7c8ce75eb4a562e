"""Which schedule runs a plan of the search fastest.

The search minimises a sum that knows one order of turns, 1F1B. What it has found, its stages, strategies and micro-
batches, may be run in other orders of whole stages too (`COMPARED`): the judge prices each of them, pass by pass, with
the memory that it holds, and the fastest that fits is taken. 1F1B stays where others win nothing to speak of (`WORTH`):
they hold more. Interleaved stages are other stages, and are searched where they are asked for.

Not good for: plans that another order would have divided otherwise, with fewer blocks where it holds more.
"""

from dataclasses import replace

from hardware_profiles import PYTORCH, Bytes, Cluster
from planner.plan.bind import BoundPlan
from planner.plan.predict import predict

COMPARED = ("gpipe", "zb_h1")
"""Orders of whole stages and whole sequences, beside 1F1B."""

WORTH = 0.005
"""Share of the step that another schedule must save."""


def fastest_schedule(bound: BoundPlan, cluster: Cluster, limit: Bytes) -> BoundPlan:
    """The same plan in the order that takes it least, on devices that may use so many bytes. Software other than ours
    runs what it was measured with."""
    plan = bound.plan
    if plan.pipeline == 1 or plan.schedule != "1f1b" or plan.training.copies > 1 or cluster.software != PYTORCH:
        return bound
    best = bound
    for schedule in COMPARED:
        other = replace(bound, plan=replace(plan, schedule=schedule))
        prediction = predict(other, cluster)
        least = best.plan.prediction.step_seconds
        enough = least * (1 - WORTH) if best is bound else least
        if prediction.peak_bytes <= limit and prediction.step_seconds < enough:
            best = replace(other, plan=replace(other.plan, prediction=prediction))
    return best
