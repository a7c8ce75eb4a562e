"""How many replicas compute operators by themselves in a small plan (see `planner.sharding.per_replica`).

32 replicas on axes of 8 and 4    one a device     axes of 2 and 2    4 replicas
32 replicas on an axis of 8       four a device    an axis of 2       4 replicas, 2 a device
"""

import math
from collections.abc import Sequence

from planner.plan.binding.bind import BoundOperator, BoundPlan


def small_replicas(large: BoundPlan, small: Sequence[int]) -> int:
    """Replicas of a plan with the decisions of `large` on a mesh of the sizes `small`: a device has one or several, as
    many as the large plan up to two. 0 where it has none."""
    count, sizes = large.plan.training.update.replicas, large.plan.mesh.sizes
    found = 0
    for operator in large.operators:
        if operator.rule.replica is not None:
            axes = _axes(operator)
            each = count // math.prod(sizes[axis] for axis in axes)
            found = math.lcm(found or 1, math.prod(small[axis] for axis in axes) * min(each, 2))
    return found


def _axes(operator: BoundOperator) -> list[int]:
    """The axes that are given whole replicas."""
    return [axis for axis, choice in enumerate(operator.strategy) if choice == operator.rule.replica]
