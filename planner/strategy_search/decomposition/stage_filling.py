"""From ways to run a block to whole stages.

A stage of n blocks runs some blocks in one way (fast) and the others in another (lean): no more lean ones than its
memory requires. So every range of blocks has a price on every stage, and
`planner.strategy_search.decomposition.division` divides the blocks by these prices.

With several kinds of blocks, a way says how to run a block of each kind. Ranges of blocks with the same kinds in the
same order cost the same (`planner.strategy_search.decomposition.block_ranges`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.limits import checked
from planner.strategy_search.decomposition.block_ranges import BlockRanges
from planner.strategy_search.decomposition.pieces import Amounts, Column

Array = NDArray[np.float64]
Way = tuple[Column, ...]
"""How to run a block of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """Bytes that the blocks of a chunk keep per micro-batch of values that other blocks hand to them (see `Rank`).
    `ending` belongs to the last chunk of the model; it is 0 on other ranks."""

    received: float
    passing: float
    staying: float
    ending: float
    outliving: float

    def of(self, blocks: int, recomputed: int, *, first: bool, last: bool) -> float:
        """The bytes for a chunk of `blocks` blocks of which the first `recomputed` are recomputed; `first` and `last`
        say whether it is the first or last chunk of the model."""
        again, ahead = recomputed > 0, recomputed == blocks
        found = self.outliving if again and not ahead else 0.0
        found += 0.0 if first else self.staying + (0.0 if again else self.received + self.passing)
        return found + (self.ending if last and not ahead else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What one rank of the pipeline holds in addition to its inner blocks, and how it is run.

    Attributes:
        chunks: virtual stages on the rank. Each holds the same number of inner blocks and runs them alike.
        in_flight: micro-batches whose activations all chunks hold together.
        ends: what the first and the last chunk of the model hold in addition: amounts, and their micro-batches in
            flight.
        received: bytes that a chunk keeps of the outputs of the block before it, times micro-batches in flight, if its
            first block is not recomputed.
        passing: the same for values that every block reads, if no block is recomputed: a recomputed block keeps them as
            its own input.
        staying: the same for values without gradients, or read by blocks of some kinds only, however blocks are run.
        ending: bytes that the last block keeps in addition if it is not recomputed, times its micro-batches in flight.
        outliving: bytes that a recomputed block hands to one that is not recomputed and keeps them, times micro-batches
            in flight.
        before, after: whether the block in the head, or in the tail, is recomputed; None if there is no such block.
        seconds: transfers from and to other ranks, per micro-batch.
        first: whether the rank computes the operators before the blocks.
        begins: whether the weights of these operators share a coalesced all-gather. Its exposed seconds then take the
            place of those of a block.
        relays: whether weights for one pass of the rank are gathered during another. The uncovered seconds are then
            exposed once a step.
        handed: what one chunk keeps of one micro-batch.
        host: bytes of the host's memory that a device may use.
    """

    chunks: int
    in_flight: float
    ends: tuple[tuple[Amounts, float], ...]
    received: float
    passing: float
    staying: float
    ending: float
    outliving: float
    before: bool | None
    after: bool | None
    seconds: float
    first: bool = False
    begins: bool = False
    relays: bool = False
    handed: Handed | None = None
    host: float = math.inf

    @property
    def uncovered(self) -> float:
        """Seconds of the coalesced all-gather of the head that have no computation before them to overlap with, and of
        its gradient reductions that have none behind them."""
        head = self.ends[0][0] if self.begins else Amounts()
        return head.uncovered_forward + head.uncovered_backward

    @property
    def stored(self) -> float:
        """Bytes that the operators outside of the inner blocks keep on the device."""
        return math.fsum(a.fixed + a.live * flights for a, flights in self.ends)

    @property
    def hosted(self) -> float:
        """Bytes that they keep on the host."""
        return math.fsum(a.hosted + a.hosted_live * flights for a, flights in self.ends)

    def handing_over(self, blocks: Sequence[bool]) -> float:
        """Bytes that inner blocks hold of values that others hand to them. `blocks` says for each block, in the order
        of the model, whether it is recomputed."""
        ways = [way for way in (self.before, *blocks, self.after) if way is not None]
        if not ways:
            return self.received + self.passing + self.staying + self.ending
        outliving = sum(first and not second for first, second in pairwise(ways)) * self.outliving
        received = (0.0 if ways[0] else self.received) + (0.0 if any(ways) else self.passing)
        return received + self.staying + (0.0 if ways[-1] else self.ending) + outliving


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Inner blocks of one chunk: `lean` of them run in way number `second` of the pool, the others in way number
    `first`. `variant` is the choice for whatever else the rank holds."""

    variant: int
    first: int
    second: int
    lean: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Filled:
    """The best fillings of a rank, for every range of inner blocks of a chunk.

    Seconds per micro-batch, per step, and busy in a whole step; bytes at the peak, and as part of them `beside`, which
    are held of values that other blocks hand over and are not in the columns. Infinite where nothing fits.
    """

    part: Array
    step: Array
    busy: Array
    peak: Array
    beside: Array
    least: Array  # the least bytes in which the range fits
    variant: NDArray[np.intp]
    first: NDArray[np.intp]
    second: NDArray[np.intp]
    lean: NDArray[np.intp]

    def filling(self, block_range: int) -> Filling:
        return Filling(**{name: int(getattr(self, name)[block_range]) for name in _CHOICES})

    def among(self, some: NDArray[np.intp], count: int) -> "Filled":
        """The same for `count` ranges of blocks, of which these are `some`; the others get infinity."""
        spread: dict[str, Any] = {}
        for name in (*_SECONDS_AND_BYTES, "least", *_CHOICES):
            spread[name] = np.zeros(count, dtype=np.intp) if name in _CHOICES else np.full(count, math.inf)
            spread[name][some] = getattr(self, name)
        return replace(self, **spread)

    def or_else(self, other: "Filled", variant: int = 0) -> "Filled":
        """The faster of two fillings for every range of blocks; the other one is that of a variant."""
        better, least = other.busy < self.busy, np.minimum(self.least, other.least)
        if not better.any():
            return replace(self, least=least)
        fields = (*_SECONDS_AND_BYTES, "first", "second", "lean")
        taken = {name: np.where(better, getattr(other, name), getattr(self, name)) for name in fields}
        return replace(self, **taken, least=least, variant=np.where(better, variant, self.variant))


_SECONDS_AND_BYTES = ("part", "step", "busy", "peak", "beside")
_CHOICES = ("variant", "first", "second", "lean")

Known: TypeAlias = dict[Rank, tuple[int, Filled]]
"""For ranks that were filled, from how many ways of a pool, and how. The pool may have got more ways since."""


def fill_best(
    ranks: Sequence[Sequence[Rank]],
    pool: Sequence[Way],
    block_ranges: BlockRanges,
    weight: float,
    capacity: float,
    some: NDArray[np.intp] | None = None,
    recomputed: int | None = None,
    known: Known | None = None,
) -> list[Filled]:
    """`fill`, where each rank takes the best of several variants of what it holds in addition to its inner blocks.
    Ranks that are `known` are filled only with pairs that have one of the ways added since; what is found is added."""
    known = {} if known is None else known
    groups: dict[int, list[Rank]] = {}
    for rank in dict.fromkeys(rank for variants in ranks for rank in variants):
        groups.setdefault(known[rank][0] if rank in known else 0, []).append(rank)
    for old, own in groups.items():
        if old == len(pool) > 0:
            continue
        added = fill(own, pool, block_ranges, weight, capacity, some, recomputed, old)
        for rank, more in zip(own, added, strict=True):
            known[rank] = len(pool), known[rank][1].or_else(more) if old else more
    found = []
    for variants in ranks:
        best = known[variants[0]][1]
        for place, rank in enumerate(variants[1:], start=1):
            best = best.or_else(known[rank][1], place)
        found.append(best)
    return found


def fill(
    ranks: Sequence[Rank],
    pool: Sequence[Way],
    block_ranges: BlockRanges,
    weight: float,
    capacity: float,
    some: NDArray[np.intp] | None = None,
    recomputed: int | None = None,
    old: int = 0,
) -> list[Filled]:
    """Price every range of inner blocks on every rank, with at most two ways of the pool at a time. If `some` are
    given, the other ranges get infinity.

    A rank is busy for `weight` (the number of micro-batches) times its seconds per micro-batch, plus its seconds per
    step, minus the gradient reductions that overlap with the last backward pass.

    With `recomputed`, exactly that many blocks of every chunk are recomputed, or all blocks of a shorter chunk.

    The lean blocks come first in a stage: if they are recomputed, it need not keep what it receives. An empty pool
    stands for a model without inner blocks. Pairs of the first `old` ways of the pool are left out.
    """
    priced = block_ranges if some is None else block_ranges.only(some)
    at_once = max(1, _CELLS // (max(1, len(pool) * (len(pool) + 1) // 2) * len(priced.lengths)))
    found: list[Filled] = []
    for start in checked(range(0, len(ranks), at_once)):
        found += _filled(ranks[start : start + at_once], pool, priced, weight, capacity, recomputed, old)
    return found if some is None else [filled.among(some, len(block_ranges.lengths)) for filled in found]


def _filled(
    ranks: Sequence[Rank],
    pool: Sequence[Way],
    block_ranges: BlockRanges,
    weight: float,
    capacity: float,
    recomputed: int | None = None,
    old: int = 0,
) -> list[Filled]:
    mixed, outer = _Mixed(ranks, pool, block_ranges, weight, old), _Ends(ranks, weight)
    at_once = np.maximum(mixed.largest("replay"), outer.replay) + np.maximum(
        mixed.largest("transient"), outer.transient
    )
    some = block_ranges.lengths > 0
    beside = np.where(some, mixed.beside(), outer.handed)
    held = outer.memory + beside + np.where(some, at_once, outer.replay + outer.transient)
    all_fast = mixed.total("memory")
    over = held + all_fast - capacity
    same = (mixed.fast == mixed.lean)[:, None]
    lean = np.where(same, 0, mixed.saving(over))
    fits = np.where(same, over <= FITS * capacity, lean <= block_ranges.lengths - 1) & mixed.pays[:, :, None]
    if recomputed is not None:
        allowed, wanted = mixed.with_recomputed(recomputed)
        fits &= allowed & (lean <= wanted)
        lean = wanted
    lean = np.where(fits, lean, 0)
    moved = block_ranges.along[:, block_ranges.starts + lean] - block_ranges.before[:, None, None]  # of each kind
    if mixed.offloads:
        fits &= outer.hosted + mixed.total("hosted") + mixed.change("hosted", moved) <= outer.host * (1 + FITS)
    busy = outer.busy + mixed.total("busy") + mixed.change("busy", moved)
    waits = once = np.zeros(1)
    if mixed.travels:
        for name, own in (("excess_forward", outer.excess_forward), ("excess_backward", outer.excess_backward)):
            waits = waits + np.maximum(own + mixed.total(name) + mixed.change(name, moved), 0.0)
        alone, once = outer.uncovered, outer.uncovered_once
        alone = np.maximum(alone, outer.waits * mixed.least("under"))
        waits = np.maximum(waits, alone)  # the excess counts this block, too
        once = np.maximum(np.maximum(once, outer.ends * mixed.least("last")) - waits, 0.0)
        busy = busy + weight * waits + once
    covered = np.zeros(1)
    if mixed.reduces:
        sent = outer.reduction + mixed.total("reduction") + mixed.change("reduction", moved) - mixed.reduced_last()
        works = outer.backward + mixed.total("backward") + mixed.change("backward", moved)
        first = np.where(some, 1 / (1 + block_ranges.lengths), 0.0)  # the slot with the first gradients
        covered = np.minimum(sent, works * (1 - first))
        busy = busy - covered
    busy = np.where(fits, busy, math.inf)
    best = busy.argmin(axis=1)

    def of_best(values: Any) -> Any:
        return np.take_along_axis(values, best[:, None, :], axis=1)[:, 0]

    chosen, quickest = of_best(lean), of_best(busy)

    def total(field: str, base: Array) -> Array:
        return np.where(np.isfinite(quickest), base + mixed.mixture(field, best, chosen), math.inf)

    waits, once, covered = (of_best(np.broadcast_to(each, busy.shape)) for each in (waits, once, covered))
    part, step = total("part", outer.part[:, 0] + waits), total("step", outer.step[:, 0] + once - covered)
    busy, peak = (
        total("busy", outer.busy[:, 0] + weight * waits + once - covered),
        total("memory", np.zeros(1)) + of_best(held),
    )
    handed, least = of_best(beside), np.where(same, held + all_fast, math.inf).min(axis=1)
    return [
        Filled(
            part=part[at],
            step=step[at],
            busy=busy[at],
            peak=peak[at],
            beside=handed[at],
            least=least[at],
            variant=np.zeros(len(some), dtype=np.intp),
            first=mixed.fast[best[at]],
            second=mixed.lean[best[at]],
            lean=chosen[at],
        )
        for at in range(len(ranks))
    ]


class _Mixed:
    """The cost of every range of blocks whose first blocks run in one way of the pool, `lean`, and the others in
    another, `fast`. Arrays are (ranks, pairs of ways, ranges of blocks). `pays` says for each rank which pairs can be
    of use. Pairs of the first `old` ways are left out."""

    def __init__(
        self, ranks: Sequence[Rank], pool: Sequence[Way], block_ranges: BlockRanges, weight: float, old: int = 0
    ) -> None:
        self.ranks, self.block_ranges = ranks, block_ranges
        kinds = len(block_ranges.counts)
        pool = pool or [()]
        amounts = np.array(
            [[[getattr(column.amounts, name) for name in _AMOUNTS] for column in way] for way in pool], dtype=np.float64
        ).reshape(1, len(pool), kinds, len(_AMOUNTS))
        part, step, fixed, live, replay, transient, under, last, *rest = np.moveaxis(amounts, -1, 0)
        excess_forward, excess_backward, reduction, backward, hosted, hosted_live = rest
        chunks, in_flight = (
            np.array([getattr(rank, name) for rank in ranks])[:, None, None] for name in ("chunks", "in_flight")
        )
        self.costs = {  # (ranks, or 1 if all are equal; ways; kinds)
            "part": chunks * part,
            "step": chunks * step,
            "busy": chunks * (weight * part + step),
            "memory": chunks * fixed + in_flight * live,
            "replay": replay,
            "transient": transient,
            "under": chunks * under,
            "last": last,
            "excess_forward": chunks * excess_forward,
            "excess_backward": chunks * excess_backward,
            "reduction": chunks * reduction,
            "backward": chunks * backward,
            "hosted": chunks * hosted + in_flight * hosted_live,
        }
        self.travels = bool(under.any()) or any(a.under for rank in ranks for a, _ in rank.ends)
        self.reduces = bool(reduction.any()) or any(a.reduction for rank in ranks for a, _ in rank.ends)
        self.offloads = bool((hosted + hosted_live).any()) or any(a.hosted for rank in ranks for a, _ in rank.ends)
        self.recompute = np.array([[column.recompute for column in way] for way in pool], dtype=np.bool_)
        self.recompute = self.recompute.reshape(len(pool), kinds)
        self.fast, self.lean, self.pays = self._pairs(old)

    def _pairs(self, old: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
        """Every way with itself, and with each leaner but slower way that could make a stage fit: that way takes no
        more memory for any kind of block, and less for at least one of them."""
        memory, busy = self.costs["memory"], self.costs["busy"]
        no_more = (memory[:, None, :, :] <= memory[:, :, None, :]).all(axis=-1)
        pays = (memory[:, None, :, :] < memory[:, :, None, :]) & (busy[:, None, :, :] > busy[:, :, None, :])
        found = (no_more & pays.any(axis=-1)) | np.eye(memory.shape[1], dtype=np.bool_)
        found[:, :old, :old] = False
        fast, lean = np.nonzero(found.any(axis=0))
        return fast, lean, found[:, fast, lean]

    def total(self, field: str) -> Array:
        """The cost of ranges whose blocks all run in the first way."""
        found: Array = (self.costs[field] @ self.block_ranges.numbers)[:, self.fast]
        return found

    def change(self, field: str, moved: Array) -> Array:
        """The cost that `moved` blocks (kinds, ranks or 1, pairs, ranges of blocks) add in the second way."""
        more = self.costs[field][:, self.lean] - self.costs[field][:, self.fast]
        found = np.zeros(moved.shape[1:])
        for kind, blocks in enumerate(moved):
            found += more[:, :, kind, None] * blocks
        return found

    def mixture(self, field: str, pair: NDArray[np.intp], lean: NDArray[np.intp]) -> Array:
        """The cost of every range of blocks with one of the pairs, and `lean` blocks in its second way. All arrays are
        (ranks, ranges of blocks)."""
        costs = np.broadcast_to(self.costs[field], (len(self.ranks), *self.costs[field].shape[1:]))
        rank = np.arange(len(self.ranks))[:, None]
        fast = costs[rank, self.fast[pair]]  # (ranks, ranges of blocks, kinds)
        more = costs[rank, self.lean[pair]] - fast
        changed = more * (self.block_ranges.along.T[self.block_ranges.starts + lean] - self.block_ranges.before.T)
        total: Array = (fast * self.block_ranges.numbers.T).sum(axis=-1) + changed.sum(axis=-1)
        return total

    def saving(self, over: Array) -> NDArray[np.intp]:
        """The fewest blocks, at least 1, that save this many bytes in the second way; more than the range has if none
        do."""
        saved = self.costs["memory"][:, self.fast] - self.costs["memory"][:, self.lean]
        sums, starts = saved @ self.block_ranges.along, self.block_ranges.starts
        wanted = sums[:, :, starts] + over - 1e-9 * saved.max(axis=-1, initial=0.0)[:, :, None]
        found, some = np.ones(over.shape, dtype=np.intp), self.pays & (self.fast != self.lean)
        if len(self.block_ranges.along) == 1:
            found[some] = _first_reaching(saved[some], wanted[some], self.block_ranges.blocks) - starts
        else:
            for row in zip(*np.nonzero(some), strict=True):
                found[row] = sums[row].searchsorted(wanted[row]) - starts
        return np.maximum(found, 1)

    def with_recomputed(self, count: int) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        """Which pairs can recompute `count` blocks of every range, or all blocks of a shorter one, and how many blocks
        then run in the second way, (pairs, ranges of blocks)."""
        lengths = self.block_ranges.lengths
        wanted = np.minimum(count, lengths)
        every: NDArray[np.bool_] = np.all(self.recompute, axis=1)
        none: NDArray[np.bool_] = np.all(~self.recompute, axis=1)
        same = (self.fast == self.lean)[:, None]
        alike = np.where(every[self.fast][:, None], wanted == lengths, none[self.fast][:, None] & (wanted == 0))
        apart = (none[self.fast] & every[self.lean])[:, None] & (wanted > 0) & (wanted < lengths)
        return np.where(same, alike, apart), np.where(same, 0, wanted)

    def largest(self, field: str) -> Array:
        """The largest cost of a block in the range, over its kinds and both ways."""
        rows = np.maximum(self.costs[field][:, self.fast], self.costs[field][:, self.lean])
        found = np.zeros((*rows.shape[:2], len(self.block_ranges.lengths)))
        for kind, number in enumerate(self.block_ranges.numbers):
            np.maximum(found, np.where(number > 0, rows[:, :, kind, None], 0.0), out=found)
        return found

    def least(self, field: str) -> Array:
        """The least of one block, (ranks or 1, pairs, ranges of blocks). `under`: the collectives of each chunk that
        have no computation before them to overlap with. `last`: those that have none behind them."""
        return self._least_of_kinds(self.costs[field][:, self.fast])

    def reduced_last(self) -> Array:
        """Least seconds to reduce the gradients of the block that runs backward last, (ranks or 1, pairs, ranges of
        blocks). No computation overlaps with them. Zero if that block is in the head."""
        reduction = np.minimum(self.costs["reduction"][:, self.fast], self.costs["reduction"][:, self.lean])
        inner = np.array([rank.before is None for rank in self.ranks])[:, None, None]
        return np.where(inner, self._least_of_kinds(reduction), 0.0)

    def _least_of_kinds(self, values: Array) -> Array:
        """For (ranks or 1, pairs, kinds), the least over the kinds of blocks in each range; 0 without blocks."""
        found = np.full((*values.shape[:2], len(self.block_ranges.lengths)), math.inf)
        for kind, number in enumerate(self.block_ranges.numbers):
            np.minimum(found, np.where(number > 0, values[:, :, kind, None], math.inf), out=found)
        return np.where(np.isfinite(found), found, 0.0)

    def beside(self) -> Array:
        """Bytes that blocks hold of values that others hand to them: the most over all numbers of blocks in the second
        way. With one kind of block, the number makes no difference."""
        ways, which = np.unique(
            np.concatenate([self.recompute[self.fast], self.recompute[self.lean]], axis=1), axis=0, return_inverse=True
        )
        kinds = len(self.block_ranges.counts)
        sides = {(rank.before, rank.after) for rank in self.ranks}
        times = {side: np.stack([self._handed(*side, way[:kinds], way[kinds:]) for way in ways]) for side in sides}
        held = np.stack([times[rank.before, rank.after] for rank in self.ranks])  # (ranks, ways, 4, ranges of blocks)
        received, passing, staying, ending, outliving = (
            np.array([getattr(rank, name) for rank in self.ranks])[:, None, None]
            for name in ("received", "passing", "staying", "ending", "outliving")
        )
        found: Array = held[:, :, 0] * received + held[:, :, 1] * ending + held[:, :, 2] * outliving
        if passing.any():
            found += held[:, :, 3] * passing
        if staying.any():
            found += staying
        return found[:, which.reshape(-1)]

    def _handed(
        self, before: bool | None, after: bool | None, fast: NDArray[np.bool_], lean: NDArray[np.bool_]
    ) -> Array:
        """How often a range of blocks holds its received values, its ending, the values that a recomputed block hands
        to another one, and the values that every block reads, (4, ranges of blocks). For one pair of ways, with the
        kinds of blocks that each recomputes."""
        held = self.block_ranges
        some = np.flatnonzero(held.lengths)
        found = np.zeros((4, len(held.lengths)))
        if not some.size:
            return found
        behind, ahead = fast[list(held.kinds)], lean[list(held.kinds)]
        first, last = held.starts[some], held.starts[some] + held.lengths[some] - 1
        changes = (ahead[:-1] & ~ahead[1:]) | (behind[:-1] & ~behind[1:])
        between = ahead[:-1] & ~behind[1:] & ~changes  # where the second way ends
        sums, once = (np.concatenate(([0], np.cumsum(each))) for each in (changes, between))
        number = sums[last] - sums[first] + (once[last] > once[first])
        number += bool(before) & ~ahead[first]
        number += behind[last] & (after is False)
        found[0, some] = ~ahead[first] if before is None else not before
        found[1, some] = ~behind[last] if after is None else not after
        found[2, some] = number
        found[3, some] = ~(ahead[first] | behind[last]) if not before and not after else 0.0
        return found


_AMOUNTS = (
    "part", "step", "fixed", "live", "replay", "transient", "under", "last", "excess_forward", "excess_backward",
    "reduction", "backward", "hosted", "hosted_live",
)  # fmt: skip

FITS = 1e-9
"""A peak that exceeds the capacity by this relative amount still fits: sums in different orders differ by less."""


_CELLS = 2**17
"""Cells of an array over ranks, pairs and ranges of blocks that are priced together: a few such arrays stay in a
cache."""


class _Ends:
    """What ranks hold in addition to their inner blocks, (ranks, 1, 1). `handed` is what a rank without inner blocks
    holds of values that others hand over."""

    def __init__(self, ranks: Sequence[Rank], weight: float) -> None:
        def each(value: Callable[[Rank], float]) -> Array:
            return np.array([value(rank) for rank in ranks])[:, None, None]

        self.part = each(lambda rank: rank.seconds + math.fsum(a.part for a, _ in rank.ends))
        self.step = each(lambda rank: math.fsum(a.step for a, _ in rank.ends))
        self.excess_forward = each(lambda rank: math.fsum(a.excess_forward for a, _ in rank.ends))
        self.excess_backward = each(lambda rank: math.fsum(a.excess_backward for a, _ in rank.ends))
        self.reduction = each(lambda rank: math.fsum(a.reduction for a, _ in rank.ends))
        self.backward = each(lambda rank: math.fsum(a.backward for a, _ in rank.ends))
        self.uncovered = each(lambda rank: 0.0 if rank.relays else rank.uncovered)
        self.uncovered_once = each(lambda rank: rank.uncovered if rank.relays else 0.0)
        self.waits = each(lambda rank: float(not (rank.relays or rank.begins)))
        self.ends = each(lambda rank: float(rank.relays and not rank.first))
        self.busy = weight * self.part + self.step
        self.memory = each(lambda rank: rank.stored)
        self.hosted = each(lambda rank: rank.hosted)
        self.host = each(lambda rank: rank.host)
        self.replay = each(lambda rank: max((a.replay for a, _ in rank.ends), default=0.0))
        self.transient = each(lambda rank: max((a.transient for a, _ in rank.ends), default=0.0))
        self.handed = each(lambda rank: rank.handing_over([]))


def _first_reaching(step: Array, wanted: Array, most: int) -> NDArray[np.intp]:
    """How many of each `step`, (rows, 1), add up to what is `wanted`, (rows, columns); one more than `most` if that
    many do not."""
    found = np.ceil(wanted / step).clip(0, most + 1)
    found -= (found > 0) & ((found - 1) * step >= wanted)  # the quotient was rounded
    found += (found <= most) & (found * step < wanted)
    return found.astype(np.intp)
