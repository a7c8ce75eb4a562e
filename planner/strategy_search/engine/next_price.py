"""Which price of memory is tried next for a configuration.

The price at which the two ways to run the blocks of a rank cost the same: of the slowest rank first, then of some
others. Where nothing fits, the leanest choice, with what lives for a moment kept below a share of the capacity.
"""

import math
from collections.abc import Sequence

from planner.strategy_search.decomposition.division import Division
from planner.strategy_search.decomposition.pieces import NEITHER, WAITED, Amounts, Passes
from planner.strategy_search.decomposition.stage_filling import Filled, Way
from planner.strategy_search.engine.composition import Composition

_IDLE = 0.97
"""A rank that is busy for a smaller share of the time of the slowest could hold more blocks, if they were lean."""

REDUCTIONS = 1e-2
"""Share of a step that reductions take from which on ways to run blocks are looked for that wait for them: a backward
pass may cover less than is hoped for."""

_PROBES = 4
"""Ranks, evenly spaced, beside the slowest, for whose micro-batches in flight prices are tried."""

CAPS = (4.0, 16.0, 64.0)
"""Where the leanest choice does not fit because of what lives for a moment, that is kept below these shares of the
capacity, one after the other."""


class NextPrice:
    """Chooses by what was put together. `price`: seconds of the step that a byte more of memory would save, about;
    `under`: shares that count of what travels under the work of each pass; `share`: of the capacity, one by so much, to
    which what lives for a moment is kept, where 0 is no limit."""

    def __init__(self, composition: Composition) -> None:
        self.composition, self.setting, self.chain = composition, composition.setting, composition.chain
        self.block_ranges, self.multipliers = composition.block_ranges, composition.multipliers
        self.kinds = composition.pipeline_of_kinds.kinds
        self.tried: set[tuple[int, float, float, Passes]] = set()
        self.price, self.under, self.share = 0.0, NEITHER, 0.0
        self.shares = list(CAPS)

    def next(self, ranks: Sequence[Filled], division: Division | None) -> tuple[int, float, float, Passes] | None:
        """A price of memory, for which kind of devices, the micro-batches in flight for which it matters, and shares
        of what travels under work; None where nothing is left to try."""
        setting, kinds = self.setting, self.kinds
        if division is None:
            shares = self.composition.shared(self.block_ranges.blocks // (setting.ranks * setting.chunks))
            wanted = [float(filled.least[share]) for filled, share in zip(ranks, shares, strict=True)]
            order = sorted(range(setting.ranks), key=lambda r: self.composition.capacity(r) - wanted[r])
            firsts = [next(rank for rank in order if kinds[rank] == kind) for kind in dict.fromkeys(kinds)]
            for rank in (*order[:2], *(rank for rank in firsts if len(firsts) > 1)):
                if self.new(kinds[rank], math.inf, flights := self.setting.flights(rank)):
                    return kinds[rank], math.inf, flights, NEITHER
            if not self.shares:
                flights = self.setting.flights(order[0])
                price = self._price_of_leaning(order[0])
                new = price is not None and self.new(kinds[order[0]], price, flights)
                return (kinds[order[0]], price, flights, NEITHER) if new and price is not None else None
            self.share = self.shares.pop(0)
            return kinds[order[0]], math.inf, self.setting.flights(order[0]), NEITHER
        held = division.block_ranges
        busy = [float(filled.busy[block_range]) for filled, block_range in zip(ranks, held, strict=True)]
        slowest = max(range(setting.ranks), key=lambda rank: busy[rank])
        self.price = self._crossing_price(slowest, ranks[slowest], held[slowest]) or 0.0
        covers = self.chain.travels or (self.chain.reduces and setting.ranks == 1)
        if covers and (under := self._covering_shares(slowest, held[slowest])) is not None:
            flights = self.setting.flights(slowest) if self.price else 0.0
            if self.new(kinds[slowest], self.price, flights, under):
                self.under = under
                return kinds[slowest], self.price, flights, under
        if self.chain.reduces and self._reductions(slowest, held[slowest]) > REDUCTIONS * division.seconds:
            flights = self.setting.flights(slowest) if self.price else 0.0
            under = (self.under[0], self.under[1], WAITED)
            if self.new(kinds[slowest], self.price, flights, under):
                return kinds[slowest], self.price, flights, under
        probes = dict.fromkeys((slowest, *(setting.ranks * part // _PROBES for part in range(_PROBES)), -1))
        for rank in sorted((probe % setting.ranks for probe in probes), key=lambda probe: -busy[probe]):
            start = sum(division.blocks[:rank])
            wider = self.block_ranges.wider(start, division.blocks[rank]) if setting.chunks == 1 else None
            idle = busy[rank] < _IDLE * busy[slowest] and wider is not None
            if idle and math.isinf(ranks[rank].busy[wider]):
                asked: float | None = math.inf
            else:  # with one block more it would take work off the others
                asked = self._crossing_price(rank, ranks[rank], wider if idle and wider is not None else held[rank])
            under = NEITHER if asked == math.inf else self.under
            if asked is not None and self.new(kinds[rank], asked, flights := self.setting.flights(rank), under):
                return kinds[rank], asked, flights, under
        return None

    def _covering_shares(self, rank: int, block_range: int) -> Passes | None:
        """The shares of what travels in each pass, beyond the work that covers it, at which a rank that has more of it
        than work and one that has less cost the same; 1 where all ways to run its blocks have more. None where none
        has."""
        counts, flights = self.block_ranges.counts[:, block_range].tolist(), self.setting.flights(rank)
        points: tuple[list[tuple[float, float]], ...] = ([], [], [])
        m = self.setting.micro_batches
        for pairs in self._amounts(rank, counts):
            part = math.fsum(number * (a.part + self.price * (a.fixed + flights * a.live)) for number, a in pairs)
            step = math.fsum(number * (a.step - a.reduction + (m - 1) * a.part) for number, a in pairs)
            points[0].append((part, math.fsum(number * a.excess_forward for number, a in pairs)))
            points[1].append((part, math.fsum(number * a.excess_backward for number, a in pairs)))
            points[2].append((part + step, math.fsum(number * (a.reduction - a.backward) for number, a in pairs)))
        shares = [_crossing_share(each) for each in points]
        if shares == [None, None, None]:
            return None
        there, back, last = (known if one is None else one for one, known in zip(shares, self.under, strict=True))
        return self.chain.shares((there, back, last), self.setting.ranks)

    def _reductions(self, rank: int, block_range: int) -> float:
        """The most seconds of reductions that a way to run the blocks of a rank hopes to be covered."""
        every = self._amounts(rank, self.block_ranges.counts[:, block_range].tolist())
        return max((math.fsum(number * a.reduction for number, a in pairs) for pairs in every), default=0.0)

    def _amounts(self, rank: int, counts: Sequence[int]) -> list[list[tuple[int, Amounts]]]:
        """What each known way to run the blocks of a rank comes to, or the whole model, where nothing repeats."""
        pool = self.composition.pool(rank)
        if pool:
            return [[(number, c.amounts) for number, c in zip(counts, way, strict=True)] for way in pool]
        if self.setting.ranks > 1 or self.block_ranges.blocks:
            return []
        return [[(1, priced.columns(priced.head, (), self.chain)[0].amounts)] for priced in self.multipliers[0].priced]

    def new(self, kind: int, price: float, flights: float, under: Passes = NEITHER) -> bool:
        key = (kind, float(f"{price:.6g}"), flights, under)
        if key in self.tried:
            return False
        self.tried.add(key)
        return True

    def _crossing_price(self, rank: int, filled: Filled, block_range: int) -> float | None:
        """The price of memory at which the two ways to run blocks in a rank cost the same."""
        flights, pool = (
            self.setting.flights(rank),
            self.composition.pool(rank),
        )
        m, counts = (
            self.setting.micro_batches,
            self.block_ranges.counts[:, block_range].tolist(),
        )
        counts = counts if sum(counts) > 1 and len(counts) > 1 else [1] * len(counts)

        def cost(way: Way) -> tuple[float, float]:
            pairs = [(number, column.amounts) for number, column in zip(counts, way, strict=True)]
            memory = math.fsum(number * (a.fixed + flights * a.live) for number, a in pairs)
            return memory, math.fsum(number * (m * a.part + a.step) for number, a in pairs)

        if not pool:
            return self._ends_price(flights)
        taken = filled.filling(block_range)
        memory, busy = cost(pool[taken.second])
        if taken.lean:
            rich, fast = cost(pool[taken.first])
            if fast < busy and rich > memory:  # of several kinds of blocks not all need be slower
                return (busy - fast) / (rich - memory)
        faster = [(rich, fast) for rich, fast in map(cost, pool) if fast < busy and rich > memory]
        return min(((busy - fast) / (rich - memory) for rich, fast in faster), default=None)

    def _price_of_leaning(self, rank: int) -> float | None:
        """The price of memory at which the fastest and the leanest way known to run the blocks of a rank cost the same:
        where nothing fits, but only just, it shows how slow that would be."""
        flights, m = self.setting.flights(rank), self.setting.micro_batches
        points = []
        for way in self.composition.pool(rank):
            amounts = [
                (number, column.amounts) for number, column in zip(self.chain.block_ranges.totals, way, strict=True)
            ]
            memory = math.fsum(number * (a.fixed + flights * a.live) for number, a in amounts)
            points.append((memory, math.fsum(number * (m * a.part + a.step) for number, a in amounts)))
        if not points:
            return None
        lean, fast = min(points), min(points, key=lambda point: (point[1], point[0]))
        return (lean[1] - fast[1]) / (fast[0] - lean[0]) if lean[0] < fast[0] and lean[1] > fast[1] else None

    def _ends_price(self, flights: float) -> float | None:
        """The same for a model without repeated blocks, between the leanest and the fastest way known."""
        m = self.setting.micro_batches
        columns = [p.columns(p.head, (), self.chain)[0].amounts for p in self.multipliers[0].priced]
        points = sorted({(a.fixed + flights * a.live, m * a.part + a.step) for a in columns})
        if len(points) < 2:
            return None
        fits = [p for p in points if p[0] <= self.setting.capacity] or points[:1]
        over = [p for p in points if p[0] > fits[-1][0]]
        if not over or over[0][1] >= fits[-1][1]:
            return None
        return (fits[-1][1] - over[0][1]) / (over[0][0] - fits[-1][0])


def _crossing_share(points: Sequence[tuple[float, float]]) -> float | None:
    """For ways that take so long, and have so much that travels more than work: the share of that at which the two
    cost the same between which a mixture is quickest that just covers; a half where waiting for the rest is quicker
    than that, as what would cover it better is not known yet."""
    over, covered = [p for p in points if p[1] > 0], [p for p in points if p[1] <= 0]
    if not over or not covered:
        return 1.0 if over else None
    mixtures = {
        (one[0] * other[1] - other[0] * one[1]) / (other[1] - one[1]): (other[0] - one[0]) / (one[1] - other[1])
        for one in over
        for other in covered
    }
    share = mixtures[min(mixtures)]
    if share > 1:
        return 0.5
    return float(f"{share:.6g}") if share > 0 else None
