"""Chooses the price of memory, and the shares of exposed communication, to try next for a configuration.

It takes those at which the bound of a rank from all known columns is highest (`master`): for the slowest rank first,
then for some others. Where nothing fits, it takes the leanest choice, with the memory that is used for a moment limited
to a share of the capacity.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.strategy_search.decomposition.division import Division
from planner.strategy_search.decomposition.pieces import NEITHER, WAITED, Amounts, Passes
from planner.strategy_search.decomposition.priced import State
from planner.strategy_search.decomposition.stage_filling import Filled
from planner.strategy_search.engine.composition import Composition

_IDLE = 0.97
"""A rank that is busy for less than this share of the slowest rank's time could hold more blocks, if they were lean."""

REDUCTIONS = 1e-2
"""If reductions take this share of a step or more, ways to run blocks with exposed reductions are looked for as well: a
backward pass may overlap less than assumed."""

_PROBES = 4
"""Number of ranks, evenly spaced, for whose micro-batches in flight prices are tried besides the slowest rank's."""

CAPS = (4.0, 16.0, 64.0)
"""If the leanest choice does not fit because of memory that is used for a moment, that memory is limited to the
capacity divided by these numbers, one after the other."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A price to try for one kind of devices: a price of memory, with the micro-batches in flight at which memory
    matters; shares of exposed communication; and the share of the interior as the tail has it (`Multipliers.solve`). If
    chunks run in different ways, `of_chunks` gives their micro-batches in flight, with none among them, in place of one
    number. `hosted` is a price of the host's memory."""

    kind: int
    price: float
    flights: float
    under: Passes = NEITHER
    at_tail: float = 0.0
    of_chunks: tuple[float, ...] = ()
    hosted: float = 0.0


class NextPrice:
    """Chooses from what was composed. `price`: about the seconds of the step that a byte more of memory would save;
    `under`: the shares that count of the communication that each pass's work cannot overlap; `share`: memory that is
    used for a moment is limited to the capacity divided by this number, 0 for no limit."""

    def __init__(self, composition: Composition) -> None:
        self.composition, self.setting, self.chain = composition, composition.setting, composition.chain
        self.block_ranges, self.multipliers = composition.block_ranges, composition.multipliers
        self.kinds = composition.pipeline_of_kinds.kinds
        self._unlike = self.setting.unlike(self.chain)
        self.tried: set[Asked] = set()
        self.price, self.under, self.share = 0.0, NEITHER, 0.0
        self.shares = list(CAPS)

    @property
    def knows_the_leanest(self) -> bool:
        """Whether the least memory was asked for in every way that is tried where nothing fits."""
        return not self.shares

    def next(self, state: State, ranks: Sequence[Filled], division: Division | None) -> Asked | None:
        """What to try at a state of the boundary; None if nothing is left to try."""
        if division is None:
            return self._leaner(state, ranks)
        setting, kinds, held = self.setting, self.kinds, division.block_ranges
        busy = [float(filled.busy[block_range]) for filled, block_range in zip(ranks, held, strict=True)]
        slowest = max(range(setting.ranks), key=lambda rank: busy[rank])
        best = self._dual(state, slowest, held[slowest])
        if best is not None:
            self.price, self.under = best.price, best.under  # also of prices that others have solved
            if self.new(best) is not None:
                return best
            if best.price and best.hosted and (apart := self.new(replace(best, hosted=math.inf))) is not None:
                return apart
        if self.chain.reduces and self._reductions(slowest, held[slowest]) > REDUCTIONS * division.seconds:
            flights = setting.flights(slowest) if self.price else 0.0
            asked = self.new(Asked(kinds[slowest], self.price, flights, (self.under[0], self.under[1], WAITED)))
            if asked is not None:
                return asked
        probes = dict.fromkeys((slowest, *(setting.ranks * part // _PROBES for part in range(_PROBES)), -1))
        for rank in sorted((probe % setting.ranks for probe in probes), key=lambda probe: -busy[probe]):
            start = sum(division.blocks[:rank])
            wider = self.block_ranges.wider(start, division.blocks[rank]) if setting.copies == 1 else None
            idle = busy[rank] < _IDLE * busy[slowest] and wider is not None
            if idle and wider is not None and math.isinf(ranks[rank].busy[wider]):
                asked = self.new(Asked(kinds[rank], math.inf, setting.flights(rank)))
            else:  # with one more block it would relieve the others
                asked = self._best(state, rank, wider if idle and wider is not None else held[rank])
            if asked is not None:
                return asked
        return None

    def of_later_ranks(self, asked: Asked) -> list[Asked]:
        """The same price for ranks with fewer micro-batches in flight, for which it proves nothing otherwise: if these
        ranks could take all the work that one rank has no time for, nothing would be proved of the step."""
        if not 0 < asked.price < math.inf or self._unlike or asked.hosted:
            return []
        last = self.setting.ranks - 1
        flights = dict.fromkeys(self.setting.flights(rank) for rank in (last // 2, last))
        fewer = (replace(asked, flights=number, at_tail=0.0) for number in flights if number < asked.flights)
        return [one for one in fewer if one.under[2] != WAITED and self.new(one) is not None]

    def _leaner(self, state: State, ranks: Sequence[Filled]) -> Asked | None:
        """Where nothing fits: the least memory, for the ranks that lack most."""
        setting, kinds = self.setting, self.kinds
        shares = self.composition.shared(self.block_ranges.blocks // (setting.ranks * setting.copies))
        wanted = [float(filled.least[share]) for filled, share in zip(ranks, shares, strict=True)]
        order = sorted(range(setting.ranks), key=lambda r: self.composition.capacity(r) - wanted[r])
        firsts = [next(rank for rank in order if kinds[rank] == kind) for kind in dict.fromkeys(kinds)]
        for rank in (*order[:2], *(rank for rank in firsts if len(firsts) > 1)):
            asked = self.new(Asked(kinds[rank], math.inf, setting.flights(rank)))
            if asked is None and setting.host < math.inf:
                asked = self.new(Asked(kinds[rank], math.inf, setting.flights(rank), hosted=math.inf))
            if asked is not None:
                return asked
        if self.shares:
            self.share = self.shares.pop(0)
            return Asked(kinds[order[0]], math.inf, setting.flights(order[0]))
        first = order[0]  # if no known column fits: the price of what would fit with as much memory
        return self._best(state, first, shares[first]) or self._best(state, first, shares[first], wanted[first])

    def _best(self, state: State, rank: int, block_range: int, capacity: float | None = None) -> Asked | None:
        """What `_dual` says; None if it was tried, or no known column fits."""
        asked = self._dual(state, rank, block_range, capacity)
        return None if asked is None else self.new(asked)

    def _dual(self, state: State, rank: int, block_range: int, capacity: float | None = None) -> Asked | None:
        """The price and the shares at which the bound of a rank with a range of blocks is highest, by all known
        columns; None if no known column fits. `capacity` replaces that of the rank's devices."""
        master = self.composition.master(state, rank, block_range, capacity=capacity)
        if master is None:
            return None
        (there, back, last), covering = master.under, self.composition.covering
        under = self.chain.shares((covering or there, covering or back, last), self.setting.ranks)
        scarce = master.price or master.hosted
        flights = self.setting.flights(rank) if scarce else 0.0
        chunks = (0.0, *(own for _, own in self.setting.together(rank))) if self._unlike and scarce else ()
        return Asked(self.kinds[rank], master.price, flights, under, master.at_tail, chunks, master.hosted)

    def _reductions(self, rank: int, block_range: int) -> float:
        """The most seconds of reductions that some way to run the blocks of a rank assumes to be overlapped."""
        every = self._amounts(rank, self.block_ranges.counts[:, block_range].tolist())
        return max((math.fsum(number * a.reduction for number, a in pairs) for pairs in every), default=0.0)

    def _amounts(self, rank: int, counts: Sequence[int]) -> list[list[tuple[int, Amounts]]]:
        """The amounts of each known way to run the blocks of a rank, or of the whole model if nothing repeats."""
        pool = self.composition.pool(rank)
        if pool:
            return [[(number, c.amounts) for number, c in zip(counts, way, strict=True)] for way in pool]
        if self.setting.ranks > 1 or self.block_ranges.blocks:
            return []
        return [[(1, priced.columns(priced.head, (), self.chain)[0].amounts)] for priced in self.multipliers[0].priced]

    def new(self, asked: Asked) -> Asked | None:
        """The price to try, noted as tried; None if it was tried before."""
        key = replace(asked, price=float(f"{asked.price:.4g}"))
        if key in self.tried:
            return None
        self.tried.add(key)
        return asked
