"""Blocks that can stand for each other: equal calls are not enough where gradients or readers differ.

    frozen rows ─> block 0 ─> block 1 ─> block 2 ─> ... ─> loss      block 0 needs no gradient of what it reads,
                                                                     block 1 and all later ones do

A block is priced once for all blocks of its run, so they must need the same gradients (a frozen part, a model whose
inputs go straight into its first block) and nobody may read out of their midst. What does not agree counts as before or
after the blocks.
"""

from planner.graph.blocks import NO_BLOCKS, BlockRun
from planner.graph.operator_graph import OperatorGraph


def uniform_blocks(graph: OperatorGraph, blocks: BlockRun) -> BlockRun:
    """The longest stretch of `blocks` that need the same gradients; none where what follows reads more than the last
    block."""
    if not blocks.count:
        return NO_BLOCKS
    kinds = [_gradients(graph, blocks, block) for block in range(blocks.count)]
    starts = [at for at in range(blocks.count) if at == 0 or kinds[at] != kinds[at - 1]]
    lengths = [stop - start for start, stop in zip(starts, [*starts[1:], blocks.count], strict=True)]
    longest = lengths.index(max(lengths))
    run = BlockRun(start=blocks.start + starts[longest] * blocks.period, period=blocks.period, count=lengths[longest])
    return run if run.count > 1 and not _read_from_outside(graph, run) else NO_BLOCKS


def _gradients(graph: OperatorGraph, blocks: BlockRun, block: int) -> tuple[tuple[bool, bool, bool], ...]:
    """For every operand whether an operator makes it, whether it varies, and whether it needs a gradient."""
    low = blocks.start + block * blocks.period
    return tuple(
        (name in graph.producer, name in graph.data_dependent, name in graph.differentiable)
        for op in graph.operators[low : low + blocks.period]
        for name in op.operands
    )


def _read_from_outside(graph: OperatorGraph, blocks: BlockRun) -> bool:
    """Whether what comes after the blocks reads a value that is made before the last block, but in a block."""
    return any(
        blocks.start <= graph.producer.get(name, -1) < blocks.stop - blocks.period
        for op in graph.operators[blocks.stop :]
        for name in op.operands
    )
