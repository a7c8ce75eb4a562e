"""Activation offload of blocks that are not recomputed: the tensors that autograd saves.

    forward     block 0 | block 1 | block 2 ...       what a block saves is offloaded while the next one computes
    backward    ... block 2 | block 1 | block 0       and prefetched during the backward pass of the block behind it

A block offloads what it has made itself and no other block reads: results of its operators, tensors that these save
beside their results, and copies of its inputs in another layout. The inputs and outputs of a block stay on the device,
and so do weights. Tensors are told apart by their memory: a tensor that shares memory with one that stays, stays too.

A block begins to prefetch what the block before it has offloaded. Behind the last block of a run nothing prefetches:
the backward pass waits for the tensors of that block, and the forward pass waits until they are offloaded.
"""

from planner.plan.binding.bind import BoundPlan


def read_elsewhere(bound: BoundPlan, name: str, block: int) -> bool:
    """Whether anything outside of a block reads a value that the block makes."""
    readers = bound.graph.consumers.get(name, ())
    return name == bound.graph.loss or any(bound.blocks.block_of(use) != block for use in readers)
