"""Blocks that can stand for each other: equal calls are not enough where gradients or readers differ.

    frozen rows ─> block 0 ─> block 1 ─> block 2 ─> ... ─> loss      block 0 needs no gradient of what it reads,
                                                                     block 1 and all later ones do

A block is priced once for all blocks of its kind, so all must need the same gradients (a frozen part, or a model whose
inputs go straight into its first block, may break that) and no operator outside may read a value from the middle of a
block. Blocks that differ count as before or after the blocks.
"""

from dataclasses import replace

from planner.graph.blocks import NO_BLOCKS, Blocks
from planner.graph.kinds import lanes
from planner.graph.operator_graph import OperatorGraph


def uniform_blocks(graph: OperatorGraph, blocks: Blocks) -> Blocks:
    """The longest range of `blocks` in which blocks of a kind need the same gradients; none where later operators
    read more than the last block. Where no two neighbours agree, as in two blocks with adapters, of which only the
    second needs the gradient of its input, those that differ are of different kinds."""
    if not blocks.count:
        return NO_BLOCKS
    signs: list[object] = [_gradients(graph, blocks, block) for block in range(blocks.count)]
    found = _longest(blocks, signs)
    if found.count == 1:
        kinds: dict[object, int] = {}
        split = tuple(kinds.setdefault(both, len(kinds)) for both in zip(blocks.kinds, signs, strict=True))
        found = replace(blocks, kinds=split)
    if lanes(graph, found) is None:
        found = _longest(found, list(found.kinds), alike=True)
    return found if found.count > 1 and not _read_from_outside(graph, found) else NO_BLOCKS


def _longest(blocks: Blocks, signs: list[object], *, alike: bool = False) -> Blocks:
    """The longest range of blocks, the first one if several are equally long, in which blocks of one kind have one
    sign; all blocks, if `alike`."""
    best = (0, 0)
    for first in range(blocks.count):
        known: dict[int, object] = {}
        stop = first
        while stop < blocks.count and known.setdefault(0 if alike else blocks.kinds[stop], signs[stop]) == signs[stop]:
            stop += 1
        if stop - first > best[1]:
            best = (first, stop - first)
        if stop == blocks.count:
            break
    return blocks.part(*best)


def _gradients(graph: OperatorGraph, blocks: Blocks, block: int) -> tuple[tuple[bool, bool, bool], ...]:
    """For every operand whether an operator makes it, whether it varies, and whether it needs a gradient."""
    return tuple(
        (name in graph.producer, name in graph.data_dependent, name in graph.differentiable)
        for at in blocks.operators(block)
        for name in graph.operators[at].operands
    )


def _read_from_outside(graph: OperatorGraph, blocks: Blocks) -> bool:
    """Whether operators behind the blocks read a value that a block before the last one makes."""
    return any(
        blocks.start <= graph.producer.get(name, -1) < blocks.borders[-2]
        for op in graph.operators[blocks.stop :]
        for name in op.operands
    )
