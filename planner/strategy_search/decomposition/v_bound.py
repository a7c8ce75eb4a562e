"""A lower bound for two stages on each rank in a V."""

import functools
import math

import numpy as np

from planner.strategy_search.decomposition.pieces import Weights
from planner.strategy_search.decomposition.priced import of_all_blocks
from planner.strategy_search.decomposition.questions import Questions, answers
from planner.strategy_search.decomposition.setting import Setting


def busy_in_a_v(questions: Questions, setting: Setting) -> float:
    """Least busy seconds per step of the slowest rank, with two stages on each rank in a V. Leaves out transfers
    between stages and everything that may overlap with computation. Infinite if there are too few blocks.

    The slowest rank is at least as slow as the average rank, and as the first one, which has both head and tail and
    holds the weights that they share only once. Every stage has at least one block. With N blocks of one kind, n of
    them on the first rank, some other rank has at least (N - n) / (ranks - 1) of them, rounded up."""
    chain, blocks, parts = questions.chain, questions.blocks, questions.parts
    weight, others = float(setting.micro_batches), setting.ranks - 1
    if 2 * setting.ranks > blocks + chain.blocks_at_ends:
        return math.inf
    weights = Weights(part=weight / parts, steady=weight * (1 - 1 / parts), step=1.0, reduction=1.0)
    (found,) = answers([(questions, questions.unpriced(weights))])
    head, inner, tail = found.values
    part, step = chain.tied
    ends = head + tail - weight * part - step
    fewest = max(0, 1 - chain.blocks_in_head) + max(0, 1 - chain.blocks_in_tail)
    slowest = (ends + of_all_blocks(chain.block_ranges.totals, inner)) / setting.ranks
    if len(inner) == 1:
        most_of_others = range(-(-(blocks - fewest) // others), 1, -1)
        first = (max(fewest, blocks - most * others) for most in most_of_others)
        ways = (np.maximum(ends + n * inner[0], m * inner[0]) for n, m in zip(first, most_of_others, strict=True))
        slowest = np.maximum(slowest, functools.reduce(np.minimum, ways))
    elif len(inner):
        slowest = np.maximum(slowest, ends + fewest * inner.min(axis=0))
    return float(slowest.min())
