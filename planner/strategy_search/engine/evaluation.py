"""One configuration priced: the best way to run every block on every stage, and a proof of how good it is.

A price of memory y (seconds per byte) turns each piece into a problem without limits, solved exactly for every state of
the boundary. Each such solution is two things at once:

    a bound     no stage s of n blocks is busy for less than  head + n inner + tail - y capacity     (Lagrange)
    a column    one more way to run a block, with which stages are filled until they fit          (stage_filling)

The price at which the two ways in the slowest stage cost the same is tried next (Dantzig and Wolfe 1960: column
generation; in one dimension it ends after a few steps). What remains between the bound and the result comes from whole
blocks: a stage cannot run half a block lean.

One file, as every turn of the loop reads the bounds and columns of those before it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.errors import LimitError
from planner.strategy_search.decomposition.division import Division, divide
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline, step_bounds
from planner.strategy_search.decomposition.lagrangian import Multipliers, Priced, Setting, State
from planner.strategy_search.decomposition.least_memory import impossible
from planner.strategy_search.decomposition.pieces import NEITHER, Chain, Column, Passes, Piece
from planner.strategy_search.decomposition.stage_filling import Filled, Filling, Rank, Way, fill_best
from planner.strategy_search.decomposition.stage_problem import Part, parts_problem
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.solvers import dynamic_programming
from planner.strategy_search.solvers.elimination.order import EXACT

Array = NDArray[np.float64]

ROUNDS = 16
"""Prices of memory tried for one configuration, at most; four are the rule."""

_IDLE = 0.97
"""A rank that is busy for a smaller share of the time of the slowest could hold more blocks, if they were lean."""

_PROBES = 4
"""Ranks, evenly spaced, beside the slowest, for whose micro-batches in flight prices are tried."""

_STEPS = (1.5, 1 / 1.5, 1.15, 1 / 1.15)
"""Factors between prices that are tried for what they prove."""

_SETTLED = 1e-3
"""How close to the best the exact solver goes, relatively."""

CAPS = (4.0, 16.0, 64.0)
"""Where the leanest choice does not fit because of what lives for a moment, that is kept below these shares of the
capacity, one after the other."""

Hint: TypeAlias = tuple[float, Passes]
"""A price of memory, seconds per byte, and shares of what travels under work, that mattered elsewhere."""

NO_HINT: Hint = (0.0, NEITHER)

_WORSE = 2
"""Numbers of recomputed blocks that only take longer, after which no more are tried."""

TOLERANCE = 1e-9
"""A result this close to its bound, relatively, is optimal: sums in another order differ by less."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankFilling:
    """One rank: inner blocks of each of its chunks, in order, and what it holds before and after them.

    `peak` bytes in all, `beside` of them for what other stages hand over.
    """

    head: Column | None
    inner: tuple[Column, ...]
    tail: Column | None
    peak: float
    beside: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What is known about a configuration.

    Attributes:
        seconds: of the best division found; infinite where none was.
        bound: no plan of this configuration takes less; infinite where nothing fits.
        state: candidates at the boundary.
        ranks: what each rank runs; empty where nothing was found.
        least: where nothing fits, bytes per device that the leanest way found would need.
        fullest: the rank that would need them.
        price: seconds of the step that a byte more of memory would save, about.
        solved: problems solved.
        under: shares that counted of what travels under the work of each pass, beyond that work.
        gathers: how weights are gathered (`planner.sharding.update.GATHERS`).
    """

    seconds: float
    bound: float
    state: State
    ranks: tuple[RankFilling, ...]
    least: float
    fullest: int = 0
    price: float
    solved: int
    under: Passes = NEITHER
    gathers: str = "each"


class Evaluation:
    """Evaluates one configuration of a chain, or of one for every kind of devices that the ranks are on.

    `cutoff`: plans as slow as that are of no interest; `enough`: one as fast as that will do; `hint`: a price of memory
    and shares of what travels under work to try early; `rounds`: prices to try at most; `multipliers`: what others have
    asked of the same pieces, or an empty list for those who come after; `proving`: whether prices are tried for no more
    than what they prove.
    """

    def __init__(
        self,
        chain: Chain | HeterogeneousPipeline,
        setting: Setting,
        *,
        cutoff: float = math.inf,
        enough: float = -math.inf,
        hint: Hint = NO_HINT,
        rounds: int = ROUNDS,
        multipliers: list[Multipliers] | None = None,
        proving: bool = True,
    ) -> None:
        self.rounds = rounds
        self.setting, self.cutoff, self.enough, self.hint = setting, cutoff, enough, hint
        self.pipeline_of_kinds = (
            chain if isinstance(chain, HeterogeneousPipeline) else HeterogeneousPipeline.alike(chain, setting)
        )
        self.chain = self.pipeline_of_kinds.chain
        self.multipliers = [] if multipliers is None else multipliers
        if not self.multipliers:
            self.multipliers += [
                Multipliers(one, setting.shared_weight, most=setting.most(self.chain))
                for one in self.pipeline_of_kinds.chains
            ]
        self.block_ranges = self.chain.block_ranges
        self.blocks = self.block_ranges.blocks
        self.pools: list[list[Way]] = [[] for _ in self.multipliers]
        self.tried: set[tuple[int, float, float, Passes]] = set()
        self.known = 0  # prices that others have asked for
        for kind, one in enumerate(self.multipliers):
            for priced in one.priced:
                self._new(kind, priced.price, priced.flights, priced.under)
        self.least, self.fullest = math.inf, 0
        self.price, self.under = 0.0, NEITHER
        self.share = 0.0  # of the capacity, one by so much, to which what lives for a moment is kept; 0 is no limit
        self.shares = list(CAPS)
        self.sharpened = not proving

    def run(self) -> Outcome:
        """Try prices until the best result is proved, or nothing more can be learnt."""
        best: tuple[float, State, tuple[RankFilling, ...]] | None = None
        setting = self.setting
        begun = self._begin()
        proved = self._bounds(self.multipliers[0].promising(setting, self.cutoff))
        hinted = self._hinted() if proved.min() < self.cutoff else []
        if hinted and (any(hinted[0][2]) or not self._roomy(proved)):
            for kind, multipliers in enumerate(self.multipliers):
                multipliers.solve_all([one for one in hinted if self._new(kind, *one)])
            proved = np.maximum(proved, self._bounds(proved < self.cutoff))
        closed, ruled_out = np.zeros(self.chain.shape, dtype=bool), False
        try:
            for _ in range(3 * self.rounds):
                open_bounds = np.where(closed, math.inf, proved)
                state = tuple(int(i) for i in np.unravel_index(int(open_bounds.argmin()), open_bounds.shape))
                limit = min(self.cutoff, math.inf if best is None else best[0])
                if open_bounds[state] >= limit * (1 - TOLERANCE):
                    break
                found, ranks, division = self._compose(state)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
                if best is not None and best[0] <= self.enough:
                    break
                if found is not None and found[0] <= proved[state] * (1 + TOLERANCE):
                    closed[state] = True
                    continue
                asked = self._next(ranks, division)
                if asked is None or len(self.multipliers[asked[0]].priced) - begun[asked[0]] >= self.rounds:
                    if found is None and not ruled_out:
                        proved, ruled_out = np.where(self._impossible(), math.inf, proved), True
                    if proved[state] < limit and self._sharpened(state, limit):
                        proved = np.maximum(proved, self._bounds(proved < limit))
                    closed[state] = True
                    continue
                kind, price, flights, under = asked
                if not self.multipliers[kind].knows(price, flights, under):
                    self.multipliers[kind].solve(price, flights, under)
                share = max(self.share, CAPS[1]) if price == math.inf else self.share
                if share:
                    self.multipliers[kind].solve(
                        price, flights, under, cap=self.pipeline_of_kinds.capacities[kind] / share
                    )
                proved = np.maximum(proved, self._bounds(proved < limit))
        except (LimitError, MemoryError):
            if best is None:
                raise
            return self._outcome(best[0], min(float(proved.min()), best[0]), best[1], best[2])
        bound = float(proved.min())
        if (
            best is None
            and setting.ranks == 1
            and bound < self.cutoff
            and len(self.multipliers[0].priced) - begun[0] < self.rounds
        ):
            best, bound = self._settled(bound)
        if best is None:
            self._look_at_the_leanest()
            return self._outcome(math.inf, bound, (), ())
        return self._outcome(best[0], min(bound, best[0]), best[1], best[2])

    def _begin(self) -> list[int]:
        """Solve the pieces with memory for free; how many prices of each kind of devices were known before."""
        for multipliers in self.multipliers:
            if len(self.multipliers) == 1:
                self.known = len(multipliers.priced)
                multipliers.begin(self.setting)
            else:
                multipliers.solve(0.0, 0.0)
        return [self.known] * len(self.multipliers)

    def _hinted(self) -> list[tuple[float, float, Passes]]:
        """Prices, flights and shares that the hint asks for."""
        price, under = self.hint
        under = under if self.chain.travels else NEITHER
        if not price:
            return [(0.0, 0.0, under)] if any(under) else []
        return [(price, one, under) for one in sorted({self._flights(0), self._flights(self.setting.ranks // 2)})]

    def _sharpened(self, state: State, limit: float) -> bool:
        """Ask for prices only for what they prove of a state in which no more is found: whether any was new. The bound
        is concave in the price, which is followed upwards, until it rules the state out; what is there for a moment
        counts as the average, and as the tail has it."""
        multipliers, flights = self.multipliers[0], self._flights(0)
        price = next((one.price for one in reversed(multipliers.priced) if one.proves and 0 < one.price < math.inf), 0)
        if self.sharpened or len(self.multipliers) > 1 or not price:
            return False
        self.sharpened = True
        for at_tail in (False, True) if self.chain.tail else (False,):
            alone = np.zeros(self.chain.shape, dtype=np.bool_)
            alone[state] = True
            best = float(self._bounds(alone)[state])
            for factor in _STEPS:
                better = True
                while better and best < limit:
                    multipliers.solve(price * factor, flights, self.under, at_tail=at_tail)
                    found = float(self._bounds(alone)[state])
                    better = found > best * (1 + _SETTLED)
                    best, price = (found, price * factor) if better else (best, price)
        return True

    def _impossible(self) -> NDArray[np.bool_]:
        """States of the boundary in which provably nothing fits; asked where nothing was found in one."""
        if len(self.multipliers) > 1:
            return np.zeros(self.chain.shape, dtype=np.bool_)
        return impossible(self.chain, self.setting)

    def _bounds(self, among: NDArray[np.bool_] | None = None) -> Array:
        """What is proved of every state by now; of those that are not `among` some, less."""
        return step_bounds(self.pipeline_of_kinds, self.multipliers, self.setting, among)

    def _look_at_the_leanest(self) -> None:
        """Compose where the boundary takes the least memory, to know how much is missing."""
        flights = self._flights(0)
        for kind, multipliers in enumerate(self.multipliers):
            if self._new(kind, math.inf, flights):
                multipliers.solve(math.inf, flights)
        for multipliers in self.multipliers:
            for known in [known for known in multipliers.priced if math.isinf(known.price)]:
                total = multipliers.value(known)
                self._compose(tuple(int(i) for i in np.unravel_index(int(total.argmin()), total.shape)))

    def _roomy(self, proved: Array) -> bool:
        """Whether the fastest way to run the first rank fits without a price, so that no hint is needed."""
        if len(self.multipliers) > 1:
            return False
        state = tuple(int(i) for i in np.unravel_index(int(proved.argmin()), proved.shape))
        flights, ends = self._flights(0), self.setting.in_flight
        free, chain = self.multipliers[0].priced[0], self.chain
        sides = [(free.best_column(free.head, state, chain), 1.0, ends[0][0])]
        for solved, count in zip(free.inner, self.block_ranges.totals, strict=True):
            sides.append((free.best_column(solved, state, chain), count / self.setting.ranks, flights))
        sides.append((free.best_column(free.tail, state, chain), float(self.setting.ranks == 1), ends[0][-1]))
        needed = sum(
            count * (column.amounts.fixed + live * column.amounts.live)
            for column, count, live in sides
            if column is not None
        )
        return needed <= self.setting.capacity

    def _settled(self, bound: float) -> tuple[tuple[float, State, tuple[RankFilling, ...]] | None, float]:
        """What the exact solver finds where prices found nothing, with all inner blocks alike; or that nothing fits.

        That is a proof for blocks that differ, too: of those in a stage, all could be run like the leanest. Of several
        recomputed pieces the interior of one counts, and what blocks hand over does not: no plan needs less, and what
        is found is filled in once more.
        """
        chain = self.chain
        best: tuple[float, State, tuple[RankFilling, ...]] | None = None
        fits = False
        sides = [pieces or (None,) for pieces in (chain.head, *chain.kinds, chain.tail)]
        for ways in itertools.product(*sides):
            counts = (chain.blocks_in_head, *self.block_ranges.totals, chain.blocks_in_tail)
            interiors: list[Piece | None] = [
                piece
                for piece, n in zip(ways, counts, strict=True)
                if piece and ((n and (piece.recompute or piece.home != "device")) or (not n and piece.replay.any()))
            ]
            interiors = interiors or [None]
            for counted in interiors:
                found, possible = self._settle(ways, counted)
                fits |= possible
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
        return best, bound if fits else math.inf

    def _settle(
        self, ways: Sequence[Piece | None], counted: Piece | None
    ) -> tuple[tuple[float, State, tuple[RankFilling, ...]] | None, bool]:
        """The best choice for head, one block of each kind and tail where the interior of one counts, if it fits;
        whether any may."""
        chain, setting, flights = self.chain, self.setting, self._flights(0)
        times = (1, *self.block_ranges.totals, 1)
        parts = [
            Part(piece=p, times=number, flights=flights, interior=p is counted)
            for p, number in zip(ways, times, strict=True)
            if p is not None
        ]
        ending = 0.0 if chain.blocks_in_tail or not self.blocks else max(0.0, -float(chain.ending.min()))
        found = parts_problem(parts, chain.boundary, weight=setting.weight, capacity=setting.capacity + ending)
        try:
            solution = dynamic_programming.solve(
                found.problem, upper_bound=self.cutoff, relative_gap=_SETTLED, cell_limit=EXACT
            )
        except ValueError:  # too wide to be solved exactly: nobody knows whether anything fits
            return None, True
        if solution.least_memory is not None:
            self.least = min(self.least, solution.least_memory)
        if solution.choice is None:
            return None, solution.status != "infeasible"
        taken = found.candidates(solution.choice)
        columns = [part.piece.chosen(*choice) for part, choice in zip(parts, taken, strict=True)]
        state = tuple(columns[0].candidates[key] for key in chain.boundary)
        head, tail = columns[0], columns[-1] if chain.tail else None
        self.pools = [[tuple(columns[1 : 1 + len(chain.kinds)])] if self.blocks else []]
        rank, whole = self._rank(0, state, head, tail), self.block_ranges.whole
        filled = fill_best([[rank]], self.pools[0], self.block_ranges, setting.micro_batches, setting.capacity)[0]
        if math.isinf(filled.busy[whole]):
            return None, True
        return (float(filled.busy[whole]), state, (self._filling(0, filled, [(head, tail)], whole),)), True

    def _outcome(self, seconds: float, bound: float, state: State, ranks: tuple[RankFilling, ...]) -> Outcome:
        return Outcome(
            seconds=seconds,
            bound=bound,
            state=state,
            ranks=ranks,
            least=self.least,
            fullest=self.fullest,
            price=self.price,
            under=self.under,
            solved=sum(len(multipliers.priced) - self.known for multipliers in self.multipliers),
        )

    # Composing

    def _compose(
        self, state: State
    ) -> tuple[tuple[float, State, tuple[RankFilling, ...]] | None, list[Filled], Division | None]:
        """The best division with the columns known at a state."""
        setting = self.setting
        chain, last = self.chain, setting.ranks - 1
        self.pools = [
            _distinct([way for priced in multipliers.priced for way in self._ways(multipliers.chain, priced, state)])
            for multipliers in self.multipliers
        ]
        described: list[tuple[Rank, ...]] = []
        variants = []
        whole = not chain.blocks_in_head and not chain.blocks_in_tail
        even = setting.chunks > 1 or (setting.even and whole and self.blocks % setting.ranks == 0)
        alone = self.blocks if setting.ranks == 1 else None
        equal = self.blocks // (setting.ranks * setting.chunks) if even else alone
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
            described.append(tuple(self._rank(rank, state, head, tail) for head, tail in chosen))
            variants.append(chosen)
        ranks, division = self._divided(described, equal)
        if division is None:
            share = math.ceil(self.blocks / setting.ranks) if equal is None else equal
            wanted = [float(filled.least[n]) for filled, n in zip(ranks, self._shared(share), strict=True)]
            fullest = max(range(setting.ranks), key=lambda rank: (wanted[rank] - self._capacity(rank), -rank))
            known = self.least - self._capacity(self.fullest)
            if wanted[fullest] - self._capacity(fullest) < known:
                self.least, self.fullest = wanted[fullest], fullest
            return None, ranks, None
        fillings = tuple(
            self._filling(rank, filled, chosen, block_range)
            for rank, (filled, chosen, block_range) in enumerate(
                zip(ranks, variants, division.block_ranges, strict=True)
            )
        )
        return (division.seconds, state, fillings), ranks, division

    def _divided(
        self, described: Sequence[tuple[Rank, ...]], equal: int | None
    ) -> tuple[list[Filled], Division | None]:
        """What every rank comes to, and the best division of the blocks, if any fits; with equally many recomputed
        blocks in every chunk, where the setting has it so: numbers are tried upwards, from none, until they only take
        longer."""
        ranks, division = self._divided_with(described, equal, None)
        if self.setting.counts == "any" or division is None:
            return ranks, division
        most = math.ceil(self.blocks / (self.setting.ranks * self.setting.chunks)) * (1 if equal is not None else 2)
        best: tuple[list[Filled], Division] | None = None
        worse = 0
        for count in range(self._recomputed(ranks, division, equal), most + 1):
            tried, found = self._divided_with(described, equal, count)
            if found is not None and (best is None or found.seconds < best[1].seconds):
                best, worse = (tried, found), 0
            elif best is not None:
                worse += 1
            if worse == _WORSE:
                break
        return (ranks, None) if best is None else best

    def _recomputed(self, ranks: Sequence[Filled], division: Division, equal: int | None) -> int:
        """The fewest recomputed blocks that every chunk must have where their sizes are known, else 0."""
        if equal is None or not self.blocks:
            return 0
        fewest = 0
        for rank, (filled, block_range) in enumerate(zip(ranks, division.block_ranges, strict=True)):
            taken, pool = filled.filling(block_range), self.pools[self.pipeline_of_kinds.kinds[rank]]
            count = int(self.block_ranges.lengths[block_range])
            first, second = (all(column.recompute for column in pool[at]) for at in (taken.first, taken.second))
            fewest = max(fewest, (taken.lean if second else 0) + (count - taken.lean if first else 0))
        return fewest

    def _divided_with(
        self, described: Sequence[tuple[Rank, ...]], equal: int | None, recomputed: int | None
    ) -> tuple[list[Filled], Division | None]:
        """What every rank comes to, and the best division of the blocks, if any fits, with so many recomputed blocks in
        every chunk; any where that is None.

        Only ranges of blocks of about as many blocks as a rank holds on average are priced, and longer ones where those
        do not prove that they are of no use: where a rank has room for them, and would be busy with them for no longer
        than the step found takes.
        """
        setting, lengths = self.setting, self.block_ranges.lengths
        kinds = self.pipeline_of_kinds.kinds
        longest = 2 * math.ceil(self.blocks / setting.ranks) + 1 if equal is None else equal + 1
        while True:
            some = np.flatnonzero(lengths <= longest if equal is None else (lengths == equal) | (lengths == longest))
            known: dict[tuple[int, tuple[Rank, ...]], Filled] = {}
            for kind, (pool, capacity) in enumerate(zip(self.pools, self.pipeline_of_kinds.capacities, strict=True)):
                own = list(dict.fromkeys(each for each, home in zip(described, kinds, strict=True) if home == kind))
                filled = fill_best(own, pool, self.block_ranges, setting.micro_batches, capacity, some, recomputed)
                known.update(((kind, each), found) for each, found in zip(own, filled, strict=True))
            ranks = [known[home, each] for home, each in zip(kinds, described, strict=True)]
            division = divide(
                ranks,
                self._fewest(),
                self.block_ranges,
                micro_batches=setting.micro_batches,
                chunks=setting.chunks,
                equal=equal,
                cutoff=self.cutoff,
            )
            held = any(np.isfinite(one.busy[lengths == longest]).any() for one in ranks)
            if equal is not None or longest >= self.blocks or not held or self._proves(division, longest):
                return ranks, division
            longest *= 2

    def _proves(self, division: Division | None, longest: int) -> bool:
        """Whether no division with a longer range of blocks than that is faster: it would hold one of just that
        length."""
        if division is None or max(division.blocks) >= longest:
            return False
        m = self.setting.micro_batches
        busy = [
            min(m * way[kind].amounts.part + way[kind].amounts.step for pool in self.pools for way in pool)
            for kind in range(len(self.block_ranges.counts))
        ]
        held = self.block_ranges.numbers[:, self.block_ranges.lengths == longest]
        return float((np.array(busy) @ held).min()) * self.setting.chunks >= division.seconds

    def _filling(
        self,
        rank: int,
        filled: Filled,
        ends: Sequence[tuple[Column | None, Column | None]],
        block_range: int,
    ) -> RankFilling:
        taken: Filling = filled.filling(block_range)
        head, tail = ends[taken.variant]
        start, count = int(self.block_ranges.starts[block_range]), int(self.block_ranges.lengths[block_range])
        pool = self.pools[self.pipeline_of_kinds.kinds[rank]]
        inner = tuple(
            pool[taken.second if at < taken.lean else taken.first][kind]
            for at, kind in enumerate(self.block_ranges.kinds[start : start + count])
        )
        peak, beside = float(filled.peak[block_range]), float(filled.beside[block_range])
        return RankFilling(head=head, inner=inner, tail=tail, peak=peak, beside=beside)

    def _ways(self, chain: Chain, priced: Priced, state: State) -> list[Way]:
        """Ways to run a block of each kind that a price knows: each in its cheapest; with one kind all of them, and so
        with several where memory is free, or all that counts."""
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

    def _shared(self, share: int) -> list[int]:
        """For every rank the range of blocks of so many blocks about where it stands."""
        setting, last = self.setting, self.blocks - share
        starts = [min(last, rank * self.blocks // setting.ranks) for rank in range(setting.ranks)]
        return [self.block_ranges.of(start, share) for start in starts]

    def _rank(self, rank: int, state: State, head: Column | None, tail: Column | None) -> Rank:
        setting, chain = self.setting, self.chain
        flights = setting.in_flight[rank]
        keeps = flights[1:] if rank == 0 else flights
        handed = float(chain.crossing.nbytes[state]) if setting.ranks > 1 else 0.0
        ends = [(head.amounts, flights[0])] if head is not None else []
        ends += [(tail.amounts, flights[-1])] if tail is not None else []
        last = rank == setting.ranks - 1
        return Rank(
            chunks=setting.chunks,
            in_flight=math.fsum(flights),
            ends=tuple(ends),
            received=handed * math.fsum(keeps),
            ending=float(chain.ending[state]) * flights[-1] if last and not chain.blocks_in_tail else 0.0,
            outliving=float(chain.handed[state]) * math.fsum(flights),
            before=head.recompute if head is not None and chain.blocks_in_head else None,
            after=tail.recompute if tail is not None and chain.blocks_in_tail else None,
            seconds=float(self.multipliers[0].crossing_seconds(self.setting, rank)[state]),
        )

    def _fewest(self) -> list[int]:
        """Every rank holds a block."""
        setting, chain = self.setting, self.chain
        if setting.ranks == 1:
            return [0]
        fewest = [1] * setting.ranks
        fewest[0] -= chain.blocks_in_head
        fewest[-1] -= chain.blocks_in_tail
        return fewest

    # Which price to try next

    def _next(self, ranks: Sequence[Filled], division: Division | None) -> tuple[int, float, float, Passes] | None:
        """A price of memory, for which kind of devices, the micro-batches in flight for which it matters, and shares
        of what travels under work; None where nothing is left to try."""
        setting, kinds = self.setting, self.pipeline_of_kinds.kinds
        if division is None:
            shares = self._shared(self.blocks // (setting.ranks * setting.chunks))
            wanted = [float(filled.least[share]) for filled, share in zip(ranks, shares, strict=True)]
            order = sorted(range(setting.ranks), key=lambda r: self._capacity(r) - wanted[r])
            firsts = [next(rank for rank in order if kinds[rank] == kind) for kind in dict.fromkeys(kinds)]
            for rank in (*order[:2], *(rank for rank in firsts if len(firsts) > 1)):
                if self._new(kinds[rank], math.inf, flights := self._flights(rank)):
                    return kinds[rank], math.inf, flights, NEITHER
            if not self.shares:
                flights = self._flights(order[0])
                price = self._price_of_leaning(order[0])
                new = price is not None and self._new(kinds[order[0]], price, flights)
                return (kinds[order[0]], price, flights, NEITHER) if new and price is not None else None
            self.share = self.shares.pop(0)
            return kinds[order[0]], math.inf, self._flights(order[0]), NEITHER
        held = division.block_ranges
        busy = [float(filled.busy[block_range]) for filled, block_range in zip(ranks, held, strict=True)]
        slowest = max(range(setting.ranks), key=lambda rank: busy[rank])
        self.price = self._crossing_price(slowest, ranks[slowest], held[slowest]) or 0.0
        if self.chain.travels and (under := self._covering_shares(slowest, held[slowest])) is not None:
            flights = self._flights(slowest) if self.price else 0.0
            if self._new(kinds[slowest], self.price, flights, under):
                self.under = under
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
            if asked is not None and self._new(kinds[rank], asked, flights := self._flights(rank), under):
                return kinds[rank], asked, flights, under
        return None

    def _covering_shares(self, rank: int, block_range: int) -> Passes | None:
        """The shares of what travels in each pass, beyond the work that covers it, at which a rank that has more of it
        than work and one that has less cost the same; 1 where all ways to run its blocks have more. None where none
        has."""
        counts, flights = self.block_ranges.counts[:, block_range].tolist(), self._flights(rank)
        ways = []
        for way in self.pools[self.pipeline_of_kinds.kinds[rank]]:
            pairs = [(number, column.amounts) for number, column in zip(counts, way, strict=True)]
            part = math.fsum(number * (a.part + self.price * (a.fixed + flights * a.live)) for number, a in pairs)
            there = math.fsum(number * a.excess_forward for number, a in pairs)
            ways.append((part, there, math.fsum(number * a.excess_backward for number, a in pairs)))
        shares = [_crossing_share([(way[0], way[1 + place]) for way in ways]) for place in (0, 1)]
        if shares == [None, None]:
            return None
        forward, backward = (known if one is None else one for one, known in zip(shares, self.under, strict=True))
        return forward, backward

    def _new(self, kind: int, price: float, flights: float, under: Passes = NEITHER) -> bool:
        key = (kind, float(f"{price:.6g}"), flights, under)
        if key in self.tried:
            return False
        self.tried.add(key)
        return True

    def _flights(self, rank: int) -> float:
        return self.setting.flights(rank)

    def _capacity(self, rank: int) -> float:
        return self.pipeline_of_kinds.capacities[self.pipeline_of_kinds.kinds[rank]]

    def _crossing_price(self, rank: int, filled: Filled, block_range: int) -> float | None:
        """The price of memory at which the two ways to run blocks in a rank cost the same."""
        flights, pool = self._flights(rank), self.pools[self.pipeline_of_kinds.kinds[rank]]
        m, counts = self.setting.micro_batches, self.block_ranges.counts[:, block_range].tolist()
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
        flights, m = self._flights(rank), self.setting.micro_batches
        points = []
        for way in self.pools[self.pipeline_of_kinds.kinds[rank]]:
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


def check_virtual_stages(chain: Chain, setting: Setting) -> None:
    """Raise NothingAgreesError where virtual stages cannot hold equal blocks."""
    if setting.chunks > 1 and (chain.blocks_in_head or chain.blocks_in_tail):
        place = "first block reads" if chain.blocks_in_head else "last block hands on"
        raise NothingAgreesError(
            f"virtual_stages = {setting.chunks}: all virtual stages hold equal blocks, but the {place} something"
            " else than the others; leave the virtual stages at 1"
        )


def _distinct(ways: Sequence[Way]) -> list[Way]:
    """Ways that cost the same are one."""
    return list({tuple((c.recompute, c.amounts) for c in way): way for way in ways}.values())


def _distinct_ends(
    ends: Sequence[tuple[Column | None, Column | None]],
) -> list[tuple[Column | None, Column | None]]:
    return list({tuple(None if c is None else (c.recompute, c.amounts) for c in pair): pair for pair in ends}.values())


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


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest of what was found for the ways to gather weights, with what is proved, or missing, of all of them."""
    best = min(outcomes, key=lambda outcome: (outcome.seconds, outcome.bound))
    leanest = min(outcomes, key=lambda outcome: outcome.least)
    return replace(
        best,
        bound=min(outcome.bound for outcome in outcomes),
        least=leanest.least,
        fullest=leanest.fullest,
        solved=sum(outcome.solved for outcome in outcomes),
    )


def ruled_out(gathers: str, seconds: float) -> Outcome:
    """Of a way to gather weights that was not tried, as it takes so many seconds or more."""
    return Outcome(
        seconds=math.inf, bound=seconds, state=(), ranks=(), least=math.inf, price=0.0, solved=0, gathers=gathers
    )
