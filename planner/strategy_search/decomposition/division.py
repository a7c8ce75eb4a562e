"""From stages to a pipeline: dynamic programming divides the blocks over the stages.

Every range of blocks has a price on every stage (`planner.strategy_search.decomposition.stage_filling`):

    blocks      0 ..... j-n ... j ..... N         done_s(j) = min over n of done_{s-1}(j-n) + part_s(j-n ... j)
    stages      |  s-1  |   s   |                 over the n that keep stage s busy no longer than a given time

The step takes (m - 1/v) max t + sum t / v + max u (costmodels.pipelines.schedules). So the largest allowed busy time is
raised from its minimum, until a smaller sum can no longer compensate for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.block_ranges import BlockRanges
from planner.strategy_search.decomposition.stage_filling import Filled

Array = NDArray[np.float64]

_ONCE = 5e-3
"""Share of a step that other divisions, with less work once a step, must promise to save."""

PACES = 64
"""How many busy times of the slowest rank are tried, from the fastest on; the first or second is nearly always best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The number of inner blocks per chunk on each rank, the ranges of blocks that these are, and the seconds of a
    step."""

    blocks: tuple[int, ...]
    block_ranges: tuple[int, ...]
    seconds: float


def divide(
    ranks: Sequence[Filled],
    least: Sequence[int],
    block_ranges: BlockRanges,
    *,
    micro_batches: int,
    chunks: int,
    given: Sequence[int] | None = None,
    cutoff: float = math.inf,
) -> Division | None:
    """The fastest division of the inner blocks over the ranks; None if none fits.

    Args:
        ranks: the prices of every range of inner blocks on each rank.
        least: the fewest inner blocks of each rank.
        block_ranges: the ranges of the inner blocks.
        micro_batches: per step.
        chunks: virtual stages on each rank.
        given: the inner blocks of a chunk of every rank, if that is decided; only that division is priced.
        cutoff: divisions that take at least this long are not of interest.
    """
    if len(ranks) == 1 and given is None:
        given = (block_ranges.blocks,)
    if given is not None:
        return _priced(ranks, tuple(given), block_ranges, micro_batches, chunks)
    best = _by_pace(ranks, least, block_ranges, micro_batches, chunks, cutoff)
    while best is not None:  # divisions with equal sums may differ in what a rank does once a step
        once = max(float(rank.step[n]) for rank, n in zip(ranks, best.block_ranges, strict=True))
        if once - _least_once(ranks, least, block_ranges) <= _ONCE * best.seconds:
            break
        ranks = [replace(rank, busy=np.where(rank.step < once, rank.busy, math.inf)) for rank in ranks]
        other = _by_pace(ranks, least, block_ranges, micro_batches, chunks, min(best.seconds, cutoff))
        if other is None or other.seconds >= best.seconds:
            break
        best = other
    return best


def _least_once(ranks: Sequence[Filled], least: Sequence[int], block_ranges: BlockRanges) -> float:
    """A lower bound on the longest that any rank is busy once a step."""
    held = (rank.step[block_ranges.lengths >= fewest] for rank, fewest in zip(ranks, least, strict=True))
    return max(float(steps.min(initial=math.inf)) for steps in held)


def _by_pace(
    ranks: Sequence[Filled],
    least: Sequence[int],
    block_ranges: BlockRanges,
    micro_batches: int,
    chunks: int,
    cutoff: float,
) -> Division | None:
    """The fastest of the divisions with the least sums of seconds per micro-batch, for each of some paces."""
    slowest = np.unique(np.concatenate([rank.busy[np.isfinite(rank.busy)] for rank in ranks]))
    low = int(np.searchsorted(slowest, _least_pace(ranks, least, block_ranges, slowest)))
    best: Division | None = None
    floor = math.inf
    for pace in slowest[low : low + PACES].tolist():
        blocks = _within(ranks, least, block_ranges, pace)
        found = None if blocks is None else _priced(ranks, blocks, block_ranges, micro_batches, chunks)
        if found is None:
            continue
        if best is None or found.seconds < best.seconds:
            best = found
        if floor == math.inf:
            free = _within(ranks, least, block_ranges, math.inf)
            assert free is not None
            held = _block_ranges(free, block_ranges)
            floor = math.fsum(rank.part[n] for rank, n in zip(ranks, held, strict=True)) / chunks
        if pace * (1 - 1 / (micro_batches * chunks)) + floor >= min(best.seconds, cutoff):
            break
    return best


def least_seconds(
    ranks: Sequence[Filled],
    parts: Sequence[Array],
    least: Sequence[int],
    block_ranges: BlockRanges,
    *,
    micro_batches: int,
    chunks: int,
    given: Sequence[int] | None = None,
) -> float:
    """A lower bound on the seconds of any division of the inner blocks; infinite if none fits. It uses the least busy
    time in which all blocks fit, and the least sum of seconds per micro-batch, with `parts` for every range on each
    rank.

    (m - 1/v) max t + max u >= max (m t + u) (1 - 1 / (m v)), since v m t is most of it."""
    if given is not None:
        held = _block_ranges(given, block_ranges)
        pace = max(float(rank.busy[n]) for rank, n in zip(ranks, held, strict=True))
        lone = math.fsum(float(part[n]) for part, n in zip(parts, held, strict=True))
    else:
        finite = [rank.busy[np.isfinite(rank.busy)] for rank in ranks]
        pace = _least_pace(ranks, least, block_ranges, np.unique(np.concatenate(finite)))
        lone = _least_sum(parts, least, block_ranges)
    if math.isinf(pace):  # inf times 0, for one micro-batch in one stage, is nan
        return math.inf
    return pace * (1 - 1 / (micro_batches * chunks)) + lone / chunks


def _least_sum(parts: Sequence[Array], least: Sequence[int], block_ranges: BlockRanges) -> float:
    """The least sum of seconds per micro-batch over all divisions."""
    blocks = block_ranges.blocks
    done = np.full(blocks + 1, math.inf)
    done[0] = 0.0
    at = np.arange(blocks + 1)
    start = np.maximum(at[:, None] - at[None, :], 0)  # blocks on earlier ranks, given blocks so far and here
    behind = at[:, None] >= at[None, :]
    held = block_ranges.number[start, np.minimum(start + at[None, :], blocks)]
    for part, fewest in zip(parts, least, strict=True):
        price = np.where(block_ranges.lengths >= fewest, part, math.inf)
        done = (np.where(behind, done[start], math.inf) + price[held]).min(axis=1)
    return float(done[blocks])


def _priced(
    ranks: Sequence[Filled], blocks: tuple[int, ...], block_ranges: BlockRanges, micro_batches: int, chunks: int
) -> Division | None:
    held = _block_ranges(blocks, block_ranges)
    seconds = step_seconds(ranks, held, micro_batches, chunks)
    return Division(blocks=blocks, block_ranges=held, seconds=seconds) if seconds < math.inf else None


def _block_ranges(blocks: Sequence[int], block_ranges: BlockRanges) -> tuple[int, ...]:
    """The numbers of the consecutive ranges with this many blocks per rank."""
    start, found = 0, []
    for count in blocks:
        found.append(block_ranges.of(start, count))
        start += count
    return tuple(found)


def step_seconds(ranks: Sequence[Filled], held: Sequence[int], micro_batches: int, chunks: int) -> float:
    """Seconds of a step if every rank holds the given range of blocks."""
    parts = [float(rank.part[n]) for rank, n in zip(ranks, held, strict=True)]
    steps = [float(rank.step[n]) for rank, n in zip(ranks, held, strict=True)]
    return step_of(parts, steps, micro_batches, chunks)


def step_of(parts: Sequence[float], steps: Sequence[float], micro_batches: int, chunks: int) -> float:
    """Seconds of a step for ranks with these seconds per micro-batch and per step
    (costmodels.pipelines.schedules.step_time)."""
    return (micro_batches - 1 / chunks) * max(parts) + math.fsum(parts) / chunks + max(steps)


def _least_pace(ranks: Sequence[Filled], least: Sequence[int], block_ranges: BlockRanges, paces: Array) -> float:
    """The least busy time in which all blocks fit; infinite if they never do."""
    low, high = 0, len(paces)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _room(ranks, least, block_ranges, paces[middle]) else (middle + 1, high)
    return float(paces[low]) if low < len(paces) else math.inf


def _room(ranks: Sequence[Filled], least: Sequence[int], block_ranges: BlockRanges, pace: float) -> bool:
    """Whether all blocks fit on the ranks if none is busy for longer than `pace`: each rank takes as many as it can,
    except those that later ranks must have."""
    start, later = 0, sum(least)
    for rank, fewest in zip(ranks, least, strict=True):
        later -= fewest
        held = block_ranges.number[start, start : block_ranges.blocks - later + 1]
        fitting = np.flatnonzero(rank.busy[held] <= pace)
        if not fitting.size or fitting[-1] < fewest:
            return False
        start += int(fitting[-1])
    return start == block_ranges.blocks


def _within(
    ranks: Sequence[Filled], least: Sequence[int], block_ranges: BlockRanges, pace: float
) -> tuple[int, ...] | None:
    """The division with the least sum of seconds per micro-batch in which no rank is busy for longer than `pace`."""
    blocks, lengths = block_ranges.blocks, block_ranges.lengths
    prices = [
        np.where((rank.busy <= pace) & (lengths >= fewest), rank.part, math.inf)
        for rank, fewest in zip(ranks, least, strict=True)
    ]
    longest = max(int(lengths[np.isfinite(price)].max(initial=0)) for price in prices)
    done = np.full(blocks + 1, math.inf)
    done[0] = 0.0
    taken = []
    at, here = np.arange(blocks + 1), np.arange(longest + 1)
    before = at[:, None] - here[None, :]  # blocks on earlier ranks, given blocks so far (rows) and here (columns)
    start = np.maximum(before, 0)
    held = block_ranges.number[start, np.minimum(start + here[None, :], blocks)]
    for price in prices:
        sums = np.where(before >= 0, done[start], math.inf) + price[held]
        taken.append(sums.argmin(axis=1))
        done = sums[at, taken[-1]]
    if not math.isfinite(done[blocks]):
        return None
    left, found = blocks, []
    for choice in reversed(taken):
        found.append(int(choice[left]))
        left -= found[-1]
    return tuple(reversed(found))
