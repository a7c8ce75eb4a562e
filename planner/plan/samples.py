"""Whether the devices of a plan that split the batch can share out the samples of its micro-batches."""

import math

from planner.nearest import divisors, multiples, nearest_of
from planner.plan.plan import Plan
from planner.sharding.layout import shard


def samples_fault(plan: Plan) -> str | None:
    """Why they cannot, with the nearest numbers that they can; None where samples come out even."""
    training, devices = plan.training, _sharing(plan)
    batch, parts, each = training.global_batch, training.micro_batches, training.part
    if each % devices == 0:
        return None
    legal = [count for count in divisors(batch) if batch // count % devices == 0]
    near = {"micro_batches": (parts, legal), "global_batch": (batch, multiples(batch, parts * devices))}
    return (
        f"training.micro_batches: {parts} of a global batch of {batch} have {each} sample{'s' * (each > 1)} each, which"
        f" {devices} devices cannot share out evenly; {nearest_of(near)}; or split something else than the batch"
    )


def _sharing(plan: Plan) -> int:
    """Devices among which the samples of an input are shared out: those of the axes that cut its first dim."""
    shares = [
        math.prod(axis.size for axis, placed in zip(plan.mesh.axes, layout, strict=False) if placed == shard(0))
        for _, layout in plan.inputs
    ]
    return math.lcm(*shares)
