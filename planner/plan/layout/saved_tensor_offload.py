"""What blocks that are not recomputed offload between their two passes: what autograd saves.

    forward     block 0 | block 1 | block 2 ...       what a block saves leaves while the next one computes
    backward    ... block 2 | block 1 | block 0       and comes back while the block behind it is differentiated

Offloaded is what the block has made itself and nobody else reads: results of its operators, what these save beside
them, and copies of what flows in that have another layout. What flows into a block or out of it stays on the device,
and so do weights. It is known by memory: what shares the memory of something that stays, stays with it.

A block begins to bring back what the one before it has offloaded. Behind the last block of a row of them nobody does:
the backward pass waits for what it has offloaded, and the forward pass waits until it has left.
"""

from planner.plan.binding.bind import BoundPlan


def read_elsewhere(bound: BoundPlan, name: str, block: int) -> bool:
    """Whether anything outside of a block reads what it makes."""
    readers = bound.graph.consumers.get(name, ())
    return name == bound.graph.loss or any(bound.blocks.block_of(use) != block for use in readers)
