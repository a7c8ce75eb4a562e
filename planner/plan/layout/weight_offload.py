"""Which weights a plan offloads, block by block: they come to the device before their block runs, and leave after it.

    forward     block 0 | block 1 | block 2 ...     while one computes, the weights of the next are prefetched
    backward    ... block 2 | block 1 | block 0     the same from the other end

So the weights of two blocks are on the device at a time. A block prefetches for its neighbour only if it offloads
weights itself: beside a block that offloads nothing no weights are prefetched, and the next block that offloads waits
for its own. Weights outside of the blocks, or that several blocks read, stay on the device.
"""

from collections.abc import Collection, Mapping, Sequence

from planner.plan.binding.bind import BoundPlan


def offloads_weights(bound: BoundPlan) -> bool:
    """Whether any weight of the plan is offloaded."""
    return bound.offloads_weights


def offloaded_weights(bound: BoundPlan, operators: Sequence[int]) -> tuple[str, ...]:
    """The offloaded weights that a run of operators reads, in the order in which it reads them."""
    if not offloads_weights(bound):
        return ()
    names = dict.fromkeys(name for at in operators for name in bound.graph.operators[at].operands)
    return tuple(name for name in names if name in bound.parameters and bound.parameters[name].weight_offloaded)


def block_of_offloaded(bound: BoundPlan, held: Collection[str]) -> Mapping[str, int]:
    """The block of each offloaded weight among those that are `held`."""
    found: dict[str, int] = {}
    if not offloads_weights(bound):
        return found
    for name in held:
        if bound.parameters[name].weight_offloaded:
            block = bound.blocks.block_of(bound.graph.consumers[name][0])
            assert block is not None, name  # planner.plan.binding.bind sees to it
            found[name] = block
    return found


def waited_for(offloading: Collection[int], block: int, *, backward: bool) -> bool:
    """Whether a pass waits for the weights of a block: no block before it, of those that are `offloading`, prefetches
    them."""
    return (block + 1 if backward else block - 1) not in offloading
