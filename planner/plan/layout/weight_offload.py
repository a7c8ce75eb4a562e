"""Which weights a plan parks outside of the device, block by block: a block's come before it runs, and leave after it.

    forward     block 0 | block 1 | block 2 ...     while one computes, the weights of the next are under way
    backward    ... block 2 | block 1 | block 0     the same from the other end

So those of two blocks are on the device at a time. A block fetches ahead for its neighbour only if it parks weights
itself: beside a block that parks nothing none are on the device, and the next that parks waits for its own. Weights
that stand outside of the blocks, or that several blocks read, stay on the device.
"""

from collections.abc import Collection, Mapping, Sequence

from planner.plan.binding.bind import BoundPlan


def parks_weights(bound: BoundPlan) -> bool:
    """Whether any weight of the plan is parked."""
    return any(stored.weight_parked for stored in bound.parameters.values())


def parked_weights(bound: BoundPlan, operators: Sequence[int]) -> tuple[str, ...]:
    """The parked weights that a run of operators reads, in the order in which it reads them."""
    names = dict.fromkeys(name for at in operators for name in bound.graph.operators[at].operands)
    return tuple(name for name in names if name in bound.parameters and bound.parameters[name].weight_parked)


def block_of_parked(bound: BoundPlan, held: Collection[str]) -> Mapping[str, int]:
    """The block of each parked weight among those that are `held`."""
    found: dict[str, int] = {}
    for name in held:
        if bound.parameters[name].weight_parked:
            block = bound.blocks.block_of(bound.graph.consumers[name][0])
            assert block is not None, name  # planner.plan.binding.bind sees to it
            found[name] = block
    return found


def waited_for(parking: Collection[int], block: int, *, backward: bool) -> bool:
    """Whether a pass waits for the weights of a block: nobody before it, of those that are `parking`, fetches ahead."""
    return (block + 1 if backward else block - 1) not in parking
