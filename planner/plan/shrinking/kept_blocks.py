"""Which blocks of a plan stand for all of them.

    a a a a a a b b b b a a a b b     runs of blocks that are alike in everything decided: a6 b4 a3 b2
    a a b b a a                       two of each run, and no way from one run to the next is left out

Two blocks are alike where they are of one kind, every operator has the same strategy, every parameter is stored alike
and both are recomputed and offloaded in one way. Of each run two are kept, so that blocks of one sort follow each other
and what stands between a run and the next is there, too. A part of the sequence that comes back to the same sort of
block is left out where every way from one sort to another is in what remains.
"""

from collections.abc import Hashable, Sequence
from itertools import groupby, pairwise

from planner.graph.blocks import block_parameters
from planner.plan.binding.bind import BoundPlan
from planner.plan.plan import Plan

_RUN = 2
"""Blocks that are kept of each run."""


def signatures(bound: BoundPlan) -> tuple[Hashable, ...]:
    """What is decided about each block: equal for blocks that are alike."""
    return tuple(_signature(bound, block) for block in range(bound.blocks.count))


def _signature(bound: BoundPlan, block: int) -> Hashable:
    kept = bound.recompute_of(block)
    return (
        bound.blocks.kinds[block],
        tuple(bound.operators[at].strategy for at in bound.blocks.operators(block)),
        tuple(bound.parameters[name] for name in block_parameters(bound.graph, bound.blocks, block)),
        None if kept is None else tuple(sorted(kept)),
        bound.offloaded_blocks.get(block),
    )


def kept_blocks(blocks: Sequence[int], signs: Sequence[Hashable]) -> list[int]:
    """Those of some blocks, in order, that stand for all of them; `signs` are those of all blocks of the plan."""
    runs = [list(run) for _, run in groupby(blocks, key=lambda block: signs[block])]
    runs = _without_returns(runs, signs)
    return [block for run in runs for block in run[:_RUN]]


def _without_returns(runs: list[list[int]], signs: Sequence[Hashable]) -> list[list[int]]:
    """The runs without stretches that come back to where they began, as long as every pair of neighbours remains."""

    def pairs(of: Sequence[Sequence[int]]) -> set[tuple[Hashable, Hashable]]:
        return {(signs[a[0]], signs[b[0]]) for a, b in pairwise(of)}

    wanted, at = pairs(runs), 0
    while at < len(runs):
        again = [later for later in range(at + 1, len(runs)) if signs[runs[later][0]] == signs[runs[at][0]]]
        for later in reversed(again):
            shorter = runs[: at + 1] + runs[later + 1 :]
            if pairs(shorter) == wanted:
                runs = shorter
                break
        else:
            at += 1
    return runs


def kept_of_stages(plan: Plan, signs: Sequence[Hashable], ranks: int, virtual: int) -> list[list[int]]:
    """For each stage of a plan with so many pipeline ranks and virtual stages the blocks that it has of `plan`, whose
    first and last ranks and chunks it keeps.

    The ranks between the first and the last become one or two (or none), which get what any of them has; of the chunks
    between the first and the last there is one.
    """
    stages, found = plan.stages, list[list[int]]()
    for chunk in range(virtual):
        own = _of_many(chunk, virtual, plan.virtual_stages)
        for place in range(ranks):  # along the stages
            inside = [stages[own * plan.pipeline + one] for one in _stood_for(place, ranks, plan.pipeline)]
            blocks = [one.first_block + k for one in inside for k in range(one.blocks)]
            found.append(kept_blocks(blocks, signs))
    return found


def _stood_for(rank: int, ranks: int, of: int) -> range:
    """The ranks of a large pipeline that one of a small one stands for: those between the ends are shared out."""
    if rank == 0:
        return range(1)
    if rank == ranks - 1:
        return range(of - 1, of)
    between, share = of - 2, ranks - 2
    return range(1 + (rank - 1) * between // share, 1 + rank * between // share)


def _of_many(number: int, few: int, many: int) -> int:
    """Which of many the first, the last, or one between them of a few stands for."""
    return many - 1 if number == few - 1 else number
