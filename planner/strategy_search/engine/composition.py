"""Builds plans from the known columns of a configuration: blocks divided among the ranks, each rank filled as well as
the columns allow.

A column is one way to run a piece (`planner.strategy_search.decomposition.pieces`). At a state of the boundary every
rank may mix two ways to run its blocks (`stage_filling`), and the blocks are divided so that the slowest rank is as
fast as possible (`division`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.crossings import crossing_seconds
from planner.strategy_search.decomposition.division import Division, divide, step_of
from planner.strategy_search.decomposition.free_chunks import free_chunks
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.mixture import Mixture, best_mixture
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.decomposition.priced import Priced, State
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.decomposition.stage_filling import Filled, Filling, Handed, Known, Rank, Way, fill_best
from planner.strategy_search.engine.master import Master, master_of
from planner.strategy_search.engine.outcome import RankFilling

_WORSE = 2
"""After this many numbers of recomputed blocks that only take longer, no more are tried."""

_QUICKER = 1e-3
"""Share of the slowest rank's time that another mixture of ways to run its blocks must save."""

Composed: TypeAlias = tuple[float, State, tuple[RankFilling, ...]]
"""Seconds of a step, candidates at the boundary, and what each rank runs."""

Ends: TypeAlias = tuple[Column | None, Column | None]
"""The columns of a rank before its inner blocks and after them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tried:
    """The result of the columns known at a state: the best division, if any fits, and the plan `found` with it; the
    fillings of all `ranks`, how each rank is `described`, and its `ends`, in each variant."""

    found: Composed | None
    division: Division | None
    ranks: Sequence[Filled]
    described: Sequence[tuple[Rank, ...]]
    ends: Sequence[Sequence[Ends]]


class Composition:
    """Builds plans from what the multipliers of every kind of devices know.

    `cutoff`: divisions that take this long are of no interest. `covering`: if given, only ways to run blocks count that
    were solved with this share of the exposed communication of both passes. Where nothing fits, `least` is the memory,
    in bytes, that the leanest filling so far would need, on the rank `fullest`. `fitted`: whether in some state all
    ranks had memory for about equal shares of the blocks, however long they take.
    """

    def __init__(
        self,
        pipeline_of_kinds: HeterogeneousPipeline,
        setting: Setting,
        multipliers: Sequence[Multipliers],
        cutoff: float,
        *,
        covering: float = 0.0,
    ) -> None:
        self.covering = covering
        self.pipeline_of_kinds, self.chain = pipeline_of_kinds, pipeline_of_kinds.chain
        self.setting, self.multipliers, self.cutoff = setting, multipliers, cutoff
        self.block_ranges = self.chain.block_ranges
        self.blocks = self.block_ranges.blocks
        self.pools: list[list[Way]] = [[] for _ in multipliers]
        self.least, self.fullest, self.fitted = math.inf, 0, False
        self._filled: dict[object, Known] = {}  # pools of a state only grow

    def compose(self, state: State) -> Tried:
        """The best division with the columns known at a state."""
        setting = self.setting
        last = setting.ranks - 1
        self.pools = [
            _distinct([way for priced in known for way in self._ways(multipliers.chain, priced, state)])
            for multipliers, known in ((one, self._counted(one.priced)) for one in self.multipliers)
        ]
        described: list[tuple[Rank, ...]] = []
        variants = []
        given = self.given
        for rank in range(setting.ranks):
            multipliers = self.multipliers[self.pipeline_of_kinds.kinds[rank]]
            chosen = _distinct_ends(
                [
                    (
                        priced.best_column(priced.head, state, multipliers.chain) if rank == 0 else None,
                        priced.best_column(priced.tail, state, multipliers.chain) if rank == last else None,
                    )
                    for priced in (multipliers.priced if rank in (0, last) else multipliers.priced[:1])
                ]
            )
            described.append(tuple(self.rank(rank, state, head, tail) for head, tail in chosen))
            variants.append(chosen)
        ranks, division = self._divided(state, described, given)
        if division is None:
            share = math.ceil(self.blocks / setting.ranks) if given is None else max(given)
            wanted = [float(filled.least[n]) for filled, n in zip(ranks, self.shared(share), strict=True)]
            fullest = max(range(setting.ranks), key=lambda rank: (wanted[rank] - self.capacity(rank), -rank))
            self.fitted |= wanted[fullest] <= self.capacity(fullest)
            known = self.least - self.capacity(self.fullest)
            if wanted[fullest] - self.capacity(fullest) < known:
                self.least, self.fullest = wanted[fullest], fullest
            return Tried(found=None, division=None, ranks=ranks, described=described, ends=variants)
        self.fitted = True
        fillings = tuple(
            self.filling(rank, filled, chosen, block_range)
            for rank, (filled, chosen, block_range) in enumerate(
                zip(ranks, variants, division.block_ranges, strict=True)
            )
        )
        tried = Tried(
            found=(division.seconds, state, fillings),
            division=division,
            ranks=ranks,
            described=described,
            ends=variants,
        )
        return replace(tried, found=self._with_free_chunks(tried))

    def _with_free_chunks(self, tried: Tried) -> Composed | None:
        """What was found, with the virtual stages of a rank run in different ways where that is faster: the slowest
        rank first, until the slowest rank cannot be made faster."""
        if tried.found is None or tried.division is None or not self.setting.unlike(self.chain) or not self.blocks:
            return tried.found
        found = self._quicker(tried, partial(self._freed, tried))
        return found if found is not None and found[0] < tried.found[0] else tried.found

    def _freed(self, tried: Tried, rank: int, busy: float) -> Mixture | None:
        """The blocks of all chunks of a rank in a division, with chunks run in different ways, if that is faster than
        `busy`."""
        assert tried.division is not None
        block_range = tried.division.block_ranges[rank]
        found = free_chunks(
            tried.described[rank][tried.ranks[rank].filling(block_range).variant],
            [column for (column,) in self.pool(rank)],
            int(self.block_ranges.lengths[block_range]),
            self.setting.fullest[rank],
            self.setting.micro_batches,
            self.capacity(rank),
        )
        return found if found is not None and found.busy < busy else None

    def _quicker(self, tried: Tried, mixture: Callable[[int, float], Mixture | None]) -> Composed | None:
        """The same division with another mixture of ways on its slowest rank, then on the next, as long as `mixture`
        makes that rank faster; None if it never does."""
        assert tried.found is not None
        assert tried.division is not None
        (_, state, fillings), held, m = tried.found, tried.division.block_ranges, self.setting.micro_batches
        ranks, seen = list(fillings), set[int]()
        parts = [float(filled.part[n]) for filled, n in zip(tried.ranks, held, strict=True)]
        steps = [float(filled.step[n]) for filled, n in zip(tried.ranks, held, strict=True)]
        while (slowest := max(range(len(held)), key=lambda rank: m * parts[rank] + steps[rank])) not in seen:
            found = mixture(slowest, m * parts[slowest] + steps[slowest])
            if found is None:
                break
            seen.add(slowest)
            parts[slowest], steps[slowest] = found.part, found.step
            ranks[slowest] = replace(ranks[slowest], inner=found.inner, peak=found.peak, beside=found.beside)
        return (step_of(parts, steps, m, self.setting.chunks), state, tuple(ranks)) if seen else None

    def mixed(self, tried: Tried) -> Composed | None:
        """The same division with more ways to run the blocks of its slowest rank, and then of the next, or with other
        numbers of them than memory alone asks for; None if that is not faster."""
        if tried.found is None or tried.division is None or self.setting.counts != "any" or not self.blocks:
            return None
        if self.covering:  # the master mixes all ways
            return None
        return self._quicker(tried, partial(self._mixture, tried))

    def _mixture(self, tried: Tried, rank: int, busy: float) -> Mixture | None:
        """The cheapest mixture of ways for the blocks of a rank in a division, all chunks alike, if it is faster than
        `busy`."""
        assert tried.found is not None
        assert tried.division is not None
        block_range = tried.division.block_ranges[rank]
        if not self.block_ranges.lengths[block_range]:
            return None
        filled = tried.ranks[rank]
        taken = filled.filling(block_range)
        head, tail = tried.ends[rank][taken.variant]
        held = [column.amounts for column in (head, tail, *self._run(rank, taken)) if column is not None]
        at_once = max(a.replay for a in held) + max(a.transient for a in held) + float(filled.beside[block_range])
        master = self.master(tried.found[1], rank, block_range, at_once)
        if master is None:
            return None
        start, count = int(self.block_ranges.starts[block_range]), int(self.block_ranges.lengths[block_range])
        found = best_mixture(
            tried.described[rank][taken.variant],
            master.shares,
            self.block_ranges.kinds[start : start + count],
            self.setting.micro_batches,
            self.capacity(rank),
        )
        if found is None or found.busy >= busy * (1 - _QUICKER):
            return None
        return replace(found, inner=found.inner * self.setting.copies)

    def master(
        self,
        state: State,
        rank: int,
        block_range: int,
        at_once: float | None = None,
        capacity: float | None = None,
    ) -> Master | None:
        """The master program of a rank with a range of blocks, from all that is known at a state (see `master_of`),
        with the capacity of the rank's devices or the given one."""
        kind, counts = self.pipeline_of_kinds.kinds[rank], self.block_ranges.counts[:, block_range].tolist()
        setting = replace(self.setting, capacity=self.capacity(rank) if capacity is None else capacity)
        return master_of(self.multipliers[kind], setting, state, rank, counts, at_once)

    def _run(self, rank: int, taken: Filling) -> tuple[Column, ...]:
        """The ways in which a filling runs its blocks."""
        pool = self.pool(rank)
        return (*pool[taken.first], *(pool[taken.second] if taken.lean else ()))

    @property
    def given(self) -> tuple[int, ...] | None:
        """Inner blocks of a chunk of every rank, if all chunks hold equally many blocks, with those in head and
        tail."""
        setting, chain = self.setting, self.chain
        if setting.copies > 1 or setting.ranks == 1:
            return (self.blocks // (setting.ranks * setting.copies),) * setting.ranks
        each, rest = divmod(self.blocks + chain.blocks_at_ends, setting.ranks)
        if not setting.even or rest:
            return None
        middle = (each,) * (setting.ranks - 2)
        return (each - chain.blocks_in_head, *middle, each - chain.blocks_in_tail)

    def _divided(
        self, state: State, described: Sequence[tuple[Rank, ...]], given: Sequence[int] | None
    ) -> tuple[list[Filled], Division | None]:
        """The fillings of every rank, and the best division of the blocks, if any fits. If the setting asks for equal
        numbers of recomputed blocks in every chunk, numbers are tried upwards, from none, until they only take
        longer."""
        ranks, division = self._divided_with(state, described, given, None)
        if self.setting.counts == "any" or division is None:
            return ranks, division
        most = math.ceil(self.blocks / (self.setting.ranks * self.setting.chunks)) * (1 if given is not None else 2)
        best: tuple[list[Filled], Division] | None = None
        worse = 0
        for count in range(self._recomputed(ranks, division, given), most + 1):
            tried, found = self._divided_with(
                state, described, given, count * self.setting.chunks // self.setting.copies
            )
            if found is not None and (best is None or found.seconds < best[1].seconds):
                best, worse = (tried, found), 0
            elif best is not None:
                worse += 1
            if worse == _WORSE:
                break
        return (ranks, None) if best is None else best

    def _recomputed(self, ranks: Sequence[Filled], division: Division, given: Sequence[int] | None) -> int:
        """The fewest recomputed blocks that every chunk must have if the sizes of chunks are known, else 0."""
        if given is None or not self.blocks:
            return 0
        fewest = 0
        for rank, (filled, block_range) in enumerate(zip(ranks, division.block_ranges, strict=True)):
            taken, pool = filled.filling(block_range), self.pools[self.pipeline_of_kinds.kinds[rank]]
            count = int(self.block_ranges.lengths[block_range])
            first, second = (all(column.recompute for column in pool[at]) for at in (taken.first, taken.second))
            fewest = max(fewest, (taken.lean if second else 0) + (count - taken.lean if first else 0))
        return fewest

    def _divided_with(
        self, state: State, described: Sequence[tuple[Rank, ...]], given: Sequence[int] | None, recomputed: int | None
    ) -> tuple[list[Filled], Division | None]:
        """The fillings of every rank, and the best division of the blocks, if any fits, with `recomputed` blocks in
        every chunk; any number if that is None.

        At first only ranges of about as many blocks as a rank holds on average are priced. Longer ranges are priced if
        the short ones do not prove them useless: a rank must have memory for a longer range, and be busy with it for no
        longer than the step found so far.
        """
        setting, lengths = self.setting, self.block_ranges.lengths
        kinds = self.pipeline_of_kinds.kinds
        longest = 2 * math.ceil(self.blocks / setting.ranks) + 1 if given is None else max(given) + 1
        while True:
            some = np.flatnonzero(lengths <= longest if given is None else np.isin(lengths, (*given, longest)))
            known: dict[tuple[int, tuple[Rank, ...]], Filled] = {}
            for kind, (pool, capacity) in enumerate(zip(self.pools, self.pipeline_of_kinds.capacities, strict=True)):
                own = list(dict.fromkeys(each for each, home in zip(described, kinds, strict=True) if home == kind))
                before = self._filled.setdefault((state, kind, longest, recomputed), {})
                filled = fill_best(
                    own, pool, self.block_ranges, setting.micro_batches, capacity, some, recomputed, before
                )
                known.update(((kind, each), found) for each, found in zip(own, filled, strict=True))
            ranks = [known[home, each] for home, each in zip(kinds, described, strict=True)]
            division = divide(
                ranks,
                self.fewest(),
                self.block_ranges,
                micro_batches=setting.micro_batches,
                chunks=setting.chunks,
                given=given,
                cutoff=self.cutoff,
            )
            held = any(np.isfinite(one.busy[lengths == longest]).any() for one in ranks)
            if given is not None or longest >= self.blocks or not held or self._proves(division, longest):
                return ranks, division
            longest *= 2

    def _proves(self, division: Division | None, longest: int) -> bool:
        """Whether no division with a range of more than `longest` blocks is faster: it would include a range of that
        length."""
        if division is None or max(division.blocks) >= longest:
            return False
        m = self.setting.micro_batches
        busy = [
            min(m * way[kind].amounts.part + way[kind].amounts.step for pool in self.pools for way in pool)
            for kind in range(len(self.block_ranges.counts))
        ]
        held = self.block_ranges.numbers[:, self.block_ranges.lengths == longest]
        return float((np.array(busy) @ held).min()) * self.setting.copies >= division.seconds

    def filling(
        self,
        rank: int,
        filled: Filled,
        ends: Sequence[Ends],
        block_range: int,
    ) -> RankFilling:
        taken: Filling = filled.filling(block_range)
        head, tail = ends[taken.variant]
        start, count = int(self.block_ranges.starts[block_range]), int(self.block_ranges.lengths[block_range])
        pool = self.pool(rank)
        inner = tuple(
            pool[taken.second if at < taken.lean else taken.first][kind]
            for at, kind in enumerate(self.block_ranges.kinds[start : start + count])
        )
        peak, beside = float(filled.peak[block_range]), float(filled.beside[block_range])
        return RankFilling(head=head, inner=inner * self.setting.copies, tail=tail, peak=peak, beside=beside)

    def _counted(self, priced: Sequence[Priced]) -> list[Priced]:
        """The prices whose columns count."""
        return [one for one in priced if not self.covering or one.under[:2] == (self.covering, self.covering)]

    def _ways(self, chain: Chain, priced: Priced, state: State) -> list[Way]:
        """Ways to run a block of each kind that a price knows. With one kind of block, where memory is free, or at the
        price of the least memory, these are all of its columns; with several kinds the cheapest of each."""
        if not priced.inner:
            return []
        every = len(priced.inner) == 1 or priced.price in (0.0, math.inf)
        found: list[Way] = []
        if every:
            found += zip(*(priced.columns(solved, state, chain) for solved in priced.inner), strict=True)
        if len(priced.inner) > 1:
            best = [priced.best_column(solved, state, chain) for solved in priced.inner]
            found.append(tuple(column for column in best if column is not None))
        return found

    def shared(self, share: int) -> list[int]:
        """For every rank a range of `share` blocks, about where the rank stands in the model."""
        setting, last = self.setting, self.blocks - share
        starts = [min(last, rank * self.blocks // setting.ranks) for rank in range(setting.ranks)]
        return [self.block_ranges.of(start, share) for start in starts]

    def rank(self, rank: int, state: State, head: Column | None, tail: Column | None) -> Rank:
        setting, chain = self.setting, self.chain
        flights, moments = math.fsum(setting.in_flight[rank]), setting.fullest[rank]
        first, last = rank == 0, rank == setting.ranks - 1
        begun = 0.0 if head is None else head.amounts.live
        done = 0.0 if tail is None else tail.amounts.live
        ends = [(head.amounts, max(one[0] for one in moments))] if head is not None else []
        ends += [(tail.amounts, max(one[-1] for one in moments))] if tail is not None else []
        ending = float(chain.ending[state]) if last and not chain.blocks_in_tail else 0.0
        received, crossing = [], (chain.crossing.nbytes, chain.crossing.passing, chain.crossing.staying)
        crossed = [float(each[state]) if setting.ranks > 1 else 0.0 for each in crossing]
        for nbytes in crossed:
            received.append(_more(begun, -nbytes, [one[0] for one in moments] if first else [0.0]) + nbytes * flights)
            begun -= nbytes
        return Rank(
            chunks=setting.copies,
            in_flight=setting.flights(rank) * setting.copies,
            ends=tuple(ends),
            received=received[0],
            passing=received[1],
            staying=received[2],
            ending=_more(done, ending, [one[-1] for one in moments]),
            outliving=float(chain.handed[state]) * flights,
            before=head.recompute if head is not None and chain.blocks_in_head else None,
            after=tail.recompute if tail is not None and chain.blocks_in_tail else None,
            seconds=float(crossing_seconds(self.multipliers[0].chain, self.setting, rank)[state]),
            first=first,
            begins=first and head is not None and chain.begins,
            relays=setting.relays,
            host=setting.host,
            handed=Handed(
                received=crossed[0],
                passing=crossed[1],
                staying=crossed[2],
                ending=ending,
                outliving=float(chain.handed[state]),
            ),
        )

    def fewest(self) -> list[int]:
        """The fewest blocks of every rank: at least one, or one in each of its stages where these are cut after the
        search."""
        setting, chain = self.setting, self.chain
        if setting.ranks == 1:
            return [0]
        if setting.uneven:  # the first stage and the last may be empty
            inside = [setting.chunks] * (setting.ranks - 2)
            return [setting.chunks - 1, *inside, setting.chunks - 1]
        fewest = [1] * setting.ranks
        fewest[0] -= chain.blocks_in_head
        fewest[-1] -= chain.blocks_in_tail
        return fewest

    def pool(self, rank: int) -> list[Way]:
        """The ways to run blocks on the devices of a rank."""
        return self.pools[self.pipeline_of_kinds.kinds[rank]]

    def capacity(self, rank: int) -> float:
        return self.pipeline_of_kinds.capacities[self.pipeline_of_kinds.kinds[rank]]


def _more(nbytes: float, other: float, numbers: Sequence[float]) -> float:
    """Bytes that `other` adds to the maximum over some moments, with `numbers` micro-batches held at each moment."""
    return max((nbytes + other) * number for number in numbers) - max(nbytes * number for number in numbers)


def _distinct(ways: Sequence[Way]) -> list[Way]:
    """Ways with the same costs become one."""
    return list({tuple((c.recompute, c.amounts) for c in way): way for way in ways}.values())


def _distinct_ends(ends: Sequence[Ends]) -> list[Ends]:
    return list({tuple(None if c is None else (c.recompute, c.amounts) for c in pair): pair for pair in ends}.values())
