"""A range of blocks run in more than two ways: whole numbers of blocks per way, close to the fractions of a mixture.

If memory and the collectives of both passes are binding, the cheapest mixture has up to four ways: one more than the
binding rows (`planner.strategy_search.engine.master`). It runs fractions of blocks in each way. All whole numbers
within `_AROUND` of these fractions are examined here, and priced as `stage_filling` prices pairs. This is exact for the
combinations examined, and it is one matrix of a few hundred rows.

Within a kind, the recomputed blocks come first or last, whichever holds fewer bytes of values that blocks hand over.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.decomposition.stage_filling import FITS, Rank

Array = NDArray[np.float64]

Shares = Sequence[Sequence[tuple[Column, float]]]
"""For each kind of block the ways to run it, and how many blocks run in each; these numbers may be fractions."""

_AROUND = 2
"""The largest distance, in blocks, of a whole number from the fraction of a mixture."""

_MOST = 4096
"""The largest number of combinations that are examined. If many kinds of blocks have more, none is."""

FIELDS = (
    "part", "step", "fixed", "live", "under", "last", "excess_forward", "excess_backward", "reduction", "backward",
    "hosted", "hosted_live",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Seconds per micro-batch and per step, bytes at the peak, and as part of them `beside`, which the columns do not
    have; `inner` has the columns of all blocks in their order."""

    part: float
    step: float
    busy: float
    peak: float
    beside: float
    inner: tuple[Column, ...]


def best_mixture(rank: Rank, shares: Shares, kinds: Sequence[int], weight: float, capacity: float) -> Mixture | None:
    """The fastest combination of whole numbers close to `shares` that fits; None if none fits. `kinds`: of the blocks
    of the rank, in their order. `weight`: the number of micro-batches."""
    ways = [(kind, column) for kind, own in enumerate(shares) for column, _ in own]
    counts = _whole_numbers(shares, [list(kinds).count(kind) for kind in range(len(shares))])
    if not len(counts):
        return None
    amounts = np.array([[getattr(column.amounts, name) for name in FIELDS] for _, column in ways])
    sums = dict(zip(FIELDS, rank.chunks * (counts @ amounts).T, strict=True))
    part, step = seconds_of(rank, [column for _, column in ways], counts, sums)
    beside, at_once, order = _beside(rank, ways, kinds, counts)
    held = sums["fixed"] + rank.in_flight / rank.chunks * sums["live"] + beside + at_once
    held += rank.stored
    hosted = rank.hosted + sums["hosted"] + rank.in_flight / rank.chunks * sums["hosted_live"]
    fits = (held <= capacity * (1 + FITS)) & (hosted <= rank.host * (1 + FITS))
    busy = np.where(fits, weight * part + step, math.inf)
    best = int(busy.argmin())
    if math.isinf(busy[best]):
        return None
    return Mixture(
        part=float(part[best]),
        step=float(step[best]),
        busy=float(busy[best]),
        peak=float(held[best]),
        beside=float(beside[best]),
        inner=in_order(ways, kinds, counts[best].tolist(), recomputed_first=order[best]),
    )


def seconds_of(rank: Rank, columns: Sequence[Column], counts: Array, sums: dict[str, Array]) -> tuple[Array, Array]:
    """Seconds per micro-batch, with exposed collectives, and per step, for every row of counts."""

    def ends(name: str) -> float:
        return math.fsum(getattr(amounts, name) for amounts, _ in rank.ends)

    def least(name: str, *, sent: bool = False) -> Array:
        """The least over the ways that are used; with `sent`, over those with any such seconds."""
        values = np.array([getattr(column.amounts, name) for column in columns])
        found = np.where((counts > 0) & ((values > 0) | (not sent)), values, math.inf).min(axis=1)
        return rank.chunks * np.where(np.isfinite(found), found, 0.0)

    excess = sum(np.maximum(ends(name) + sums[name], 0.0) for name in ("excess_forward", "excess_backward"))
    alone = rank.uncovered if rank.begins else least("under", sent=True)
    waits = np.maximum(excess, 0.0 if rank.relays else alone)
    once = rank.uncovered if rank.first else least("last", sent=True) / rank.chunks
    once = np.maximum(once - waits, 0.0) if rank.relays else 0.0
    sent, works = ends("reduction") + sums["reduction"], ends("backward") + sums["backward"]
    if rank.before is None:  # the block that runs backward last
        sent = sent - least("reduction")
    covered = np.minimum(sent, works * (1 - 1 / (1 + counts.sum(axis=1))))
    return rank.seconds + ends("part") + sums["part"] + waits, ends("step") + sums["step"] + once - covered


def _beside(
    rank: Rank, ways: Sequence[tuple[int, Column]], kinds: Sequence[int], counts: Array
) -> tuple[Array, Array, list[bool]]:
    """For every row of counts: bytes held of values that others hand over, transient bytes, and whether recomputed
    blocks come first."""
    handed: dict[tuple[bool, ...], tuple[float, bool]] = {}
    beside, at_once, order = np.zeros(len(counts)), np.zeros(len(counts)), list[bool]()
    for row, own in enumerate(counts.tolist()):
        used = tuple(number > 0 for number in own)
        if used not in handed:
            both = [(in_order(ways, kinds, own, recomputed_first=first), first) for first in (True, False)]
            handed[used] = min(
                ((rank.handing_over([column.recompute for column in run]), first) for run, first in both),
                key=lambda one: one[0],
            )
        held = [column.amounts for (_, column), some in zip(ways, used, strict=True) if some]
        held += [amounts for amounts, _ in rank.ends]
        at_once[row] = max(a.replay for a in held) + max(a.transient for a in held)
        beside[row] = handed[used][0]
        order.append(handed[used][1])
    return beside, at_once, order


def in_order(
    ways: Sequence[tuple[int, Column]], kinds: Sequence[int], counts: Sequence[float], *, recomputed_first: bool
) -> tuple[Column, ...]:
    """The columns of all blocks. Within each kind, the recomputed ones come first, or last."""
    every = sorted(zip(ways, counts, strict=True), key=lambda one: one[0][1].recompute != recomputed_first)
    left = {
        kind: iter([column for (own, column), number in every if own == kind for _ in range(round(number))])
        for kind in dict.fromkeys(kinds)
    }
    return tuple(next(left[kind]) for kind in kinds)


def _whole_numbers(shares: Shares, totals: Sequence[int]) -> Array:
    """Whole numbers of blocks per way, close to the shares, that sum up to the blocks of each kind, (rows, ways)."""
    every = []
    for own, total in zip(shares, totals, strict=True):
        ranges = [
            range(max(0, math.floor(share) - _AROUND), min(total, math.ceil(share) + _AROUND) + 1) for _, share in own
        ]
        if math.prod(map(len, ranges)) > _MOST:
            return np.zeros((0, 0))
        every.append([row for row in itertools.product(*ranges) if sum(row) == total])
    if math.prod(map(len, every)) > _MOST:
        return np.zeros((0, 0))
    return np.array([list(itertools.chain(*rows)) for rows in itertools.product(*every)], dtype=np.float64)
