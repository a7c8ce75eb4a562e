"""What recomputed blocks offload between forward and backward pass: what flows into them.

    forward     block 0 | block 1 | block 2 ...       what flowed into a block leaves while the next one computes
    backward    ... block 2 | block 1 | block 0       and comes back while the block behind it is differentiated

A recomputed block keeps nothing but what flows into it (and what its kept operators have made, which stays on the
device). Offloaded is of that what nobody but this block reads; what every block reads is there once, and stays.
"""

from planner.errors import PlanFileError
from planner.plan.binding.bind import BoundPlan


def offloaded_activations(bound: BoundPlan, block: int | None) -> tuple[str, ...]:
    """The values that a block offloads, in the order in which it reads them."""
    if block is None or block not in bound.offloaded_blocks or bound.recompute_of(block) is None:
        return ()
    graph, blocks = bound.graph, bound.blocks
    names = dict.fromkeys(name for at in blocks.operators(block) for name in graph.operators[at].operands)
    return tuple(name for name in names if _flows(bound, name, block))


def _flows(bound: BoundPlan, name: str, block: int) -> bool:
    """Whether a value is made outside of a block, has a gradient, and is read by no other block."""
    graph, blocks = bound.graph, bound.blocks
    if name not in graph.differentiable or name not in graph.producer:
        return False
    if blocks.block_of(graph.producer[name]) == block:
        return False
    readers = {blocks.block_of(use) for use in graph.consumers[name]}
    if readers == {block, None}:
        raise PlanFileError(
            f"block {block} cannot offload '{name}': what stands outside of the blocks reads it, too; set its"
            " activations_home to device"
        )
    return readers == {block}
