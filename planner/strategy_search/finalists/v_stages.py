"""Stages in a V, from the plan that the search found for one stage on each rank.

    found, rank by rank     b b B b | b B b b        B: the embedding, the loss and lean blocks count, too
    chunks                  0 1 | 2 3                rank r holds chunk r and chunk 2p-1-r

The search fills p ranks with consecutive blocks, under the memory that the schedule holds on each, and decides how
every block is run. In a V a rank holds blocks of both halves of the model, so ranks are filled anew. Strategies and
ways to run blocks stay. Stages are cut from outside to inside so that the busiest rank is as little busy as possible,
and its two stages are as equal as that allows:

    busy(r, i, j) = min over a, b of max(busy(r-1, i-a, j-b), front(i-a .. i) + back(j-b .. j))

i and j blocks are given to the first r+1 ranks from the front and from the back, about r+1 stages of each. The search
puts the lean blocks of a rank first. Here they are dealt out evenly over its blocks, because the two halves of them lie
on two ranks now.

O(p n d) states with d^2 choices each, d = 2 `_SLACK` + 1. Not good for: blocks whose memory differs a lot, which is
divided by their time all the same; the prediction notices, and the search leaves more memory.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from planner.plan.plan import Stage
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.engine.assemble import Assembly
from planner.strategy_search.engine.outcome import RankFilling

_UNITS = 10**4
"""Units of an average block, to which times are rounded."""

_Best = tuple[tuple[int, int], tuple[tuple[int, int], ...]]
"""How busy the busiest rank is and how uneven stages are, and the blocks of both stages of each rank."""

_SLACK = 2
"""Number of blocks by which a stage may differ from the average."""


def spread_out(ranks: Sequence[RankFilling]) -> tuple[RankFilling, ...]:
    """The same ranks, with blocks of one kind that are run in two ways dealt out evenly."""
    return tuple(replace(rank, inner=_dealt(rank.inner)) for rank in ranks)


def _dealt(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    found = list(columns)
    for kind in {column.kind for column in columns}:
        places = [at for at, column in enumerate(columns) if column.kind == kind]
        runs = [list(run) for _, run in groupby((columns[at] for at in places), key=id)]
        if len(runs) != 2:
            continue
        few, many = sorted(runs, key=len)
        chosen = {(2 * number + 1) * len(places) // (2 * len(few)) for number in range(len(few))}
        for number, at in enumerate(places):
            found[at] = few[0] if number in chosen else many[0]
    return tuple(found)


def v_stages(found: Assembly, chain: Chain, ranks: int, micro_batches: int) -> tuple[Stage, ...]:
    """Two stages for each of `ranks` ranks; there must be enough blocks."""

    def seconds(column: Column) -> float:
        return column.amounts.part + column.amounts.step / micro_batches

    inner = found.blocks[chain.blocks_in_head : len(found.blocks) - chain.blocks_in_tail]
    usual = math.fsum(map(seconds, inner)) / max(1, len(inner))
    blocks = [usual] * chain.blocks_in_head + [seconds(one) for one in inner] + [usual] * chain.blocks_in_tail
    blocks[0] += max(0.0, seconds(found.before) - usual * chain.blocks_in_head)
    if found.after is not found.before:
        blocks[-1] += max(0.0, seconds(found.after) - usual * chain.blocks_in_tail)
    first, stages = 0, []
    for count in v_counts(blocks, ranks):
        stages.append(Stage(first_block=first, blocks=count))
        first += count
    return tuple(stages)


def v_counts(seconds: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Blocks of each of 2 `ranks` stages in a V for blocks that take `seconds` each; there must be at least 2 `ranks`
    blocks."""
    count, share, mean = len(seconds), len(seconds) / (2 * ranks), math.fsum(seconds) / len(seconds)
    sums = [0]
    for one in seconds:  # in whole numbers, so that equal times compare equal
        sums.append(sums[-1] + round(one / mean * _UNITS))
    back = [sums[count] - sums[count - number] for number in range(count + 1)]
    sizes = range(max(1, math.floor(share) - _SLACK), math.ceil(share) + _SLACK + 1)
    states: dict[tuple[int, int], _Best] = {(0, 0): ((0, 0), ())}
    for rank in range(ranks):
        further: dict[tuple[int, int], _Best] = {}
        left = ranks - rank - 1
        for (i, j), ((busy, uneven), chosen) in states.items():
            for a in sizes:
                ends = sizes if left else range(count - i - j - a, count - i - j - a + 1)
                for b in ends:
                    if b < 1 or i + a + j + b + 2 * left > count or (left and abs(i + a - (rank + 1) * share) > _SLACK):
                        continue
                    one, other = sums[i + a] - sums[i], back[j + b] - back[j]
                    score = (max(busy, one + other), uneven + (one - other) ** 2)
                    known = further.get((i + a, j + b))
                    if known is None or score < known[0]:
                        further[i + a, j + b] = (score, (*chosen, (a, b)))
        states = further
    (_, chosen) = min(states.values(), key=lambda state: state[0])
    return (*(a for a, _ in chosen), *(b for _, b in reversed(chosen)))
