"""Activation offload of recomputed blocks: the inputs of a block, between its forward and its backward pass.

    forward     block 0 | block 1 | block 2 ...       the inputs of a block are offloaded while the next one computes
    backward    ... block 2 | block 1 | block 0       and prefetched during the backward pass of the block behind it

A recomputed block keeps only its inputs (and the results of its kept operators, which stay on the device). It offloads
those inputs that no other block reads; a value that every block reads is stored once, and stays.
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
    """Whether a value is made outside of a block, has a gradient, and no other block reads it."""
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
