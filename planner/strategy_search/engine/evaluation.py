"""One configuration priced: the best way to run every block on every stage, and a proof of how good it is.

A price of memory y (seconds per byte) turns each piece into a problem without limits, solved exactly for every state of
the boundary. Each such solution is two things at once:

    a bound     no stage s of n blocks is busy for less than  head + n inner + tail - y capacity     (Lagrange)
    a column    one more way to run a block, with which stages are filled until they fit          (stage_filling)

The price at which the two ways in the slowest stage cost the same is tried next (Dantzig and Wolfe 1960: column
generation; in one dimension it ends after a few steps). What remains between the bound and the result comes from whole
blocks: a stage cannot run half a block lean.

Here is the loop. What its columns make is put together in `planner.strategy_search.engine.composition`, the next price
is chosen in `planner.strategy_search.engine.next_price`.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.errors import LimitError
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline
from planner.strategy_search.decomposition.lagrangian import Multipliers, State
from planner.strategy_search.decomposition.least_memory import impossible
from planner.strategy_search.decomposition.pieces import NEITHER, Chain, Passes, Piece
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.decomposition.stage_filling import fill_best
from planner.strategy_search.decomposition.stage_problem import Part, parts_problem
from planner.strategy_search.decomposition.state_bounds import StateBounds
from planner.strategy_search.engine.composition import Composed, Composition
from planner.strategy_search.engine.next_price import CAPS, Asked, NextPrice
from planner.strategy_search.engine.outcome import COARSE, Outcome, RankFilling
from planner.strategy_search.engine.whole_blocks import WholeBlocks
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.solvers import dynamic_programming
from planner.strategy_search.solvers.elimination.order import EXACT

Array = NDArray[np.float64]

ROUNDS = 24
"""Prices of memory tried for one configuration, at most; four are the rule, up to twenty where memory is tight."""


_SETTLED = 1e-3
"""How close to the best the exact solver goes, relatively."""

_FRONTS = 3_000
"""Entries of a front of such a solution: where times and bytes have no common measure wider ones, of every way to run
the blocks of each kind, take minutes."""


Hint: TypeAlias = tuple[float, Passes]
"""A price of memory, seconds per byte, and shares of what travels under work, that mattered elsewhere."""

NO_HINT: Hint = (0.0, NEITHER)


TOLERANCE = 1e-9
"""A result this close to its bound, relatively, is optimal: sums in another order differ by less."""


_STATES = 16
"""States of the boundary in which nothing better is found, after which no others are looked at where nothing is proved
to be better by more than `COARSE`: whole blocks, and stages that cannot be equal, leave a part of what prices prove,
which says of many states that they may be better. Twice as many where nothing is as fast as the cutoff in any."""

_STATES_UNLIKE = 6
"""The same where chunks run unlike each other, which leaves more."""


class Evaluation:
    """Evaluates one configuration of a chain, or of one for every kind of devices that the ranks are on.

    `cutoff`: plans as slow as that are of no interest; `enough`: one as fast as that will do; `hint`: a price of memory
    and shares of what travels under work to try early; `rounds`: prices to try at most; `multipliers`: what others have
    asked of the same pieces, or an empty list for those who come after; `patterned`: whether operators have one
    pattern, so that whole blocks prove more than prices; `covering`: a share of what
    travels in both passes that counts whatever covers it, in place of those that are best by sums, which hope for more
    than may be covered.
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
        patterned: bool = False,
        covering: float = 0.0,
    ) -> None:
        self.rounds = rounds
        self.setting, self.cutoff, self.enough, self.hint = setting, cutoff, enough, hint
        self.pipeline_of_kinds = (
            chain if isinstance(chain, HeterogeneousPipeline) else HeterogeneousPipeline.alike(chain, setting)
        )
        self.chain = self.pipeline_of_kinds.chain
        self.multipliers = [] if multipliers is None else multipliers
        if not self.multipliers:
            most, holds = self.pipeline_of_kinds.blocks_of(setting)
            self.multipliers += [
                Multipliers(one, setting.shared_weight, most=most, holds=holds, single=setting.ranks == 1)
                for one in self.pipeline_of_kinds.chains
            ]
        self.block_ranges = self.chain.block_ranges
        self.blocks = self.block_ranges.blocks
        self.composition = Composition(self.pipeline_of_kinds, setting, self.multipliers, cutoff, covering=covering)
        self.next_price = NextPrice(self.composition)
        self.known = 0  # prices that others have asked for
        self.free = 0.0  # what is proved whatever the memory
        self.ruled_out = False  # it was asked in which states nothing fits
        for kind, one in enumerate(self.multipliers):
            for priced in one.priced:
                self.next_price.new(Asked(kind, priced.price, priced.flights, priced.under, priced.at_tail))
        self.whole_blocks = WholeBlocks(self.composition) if patterned and len(self.multipliers) == 1 else None

    def run(self) -> Outcome:
        """Try prices until the best result is proved, or nothing more can be learnt."""
        best: Composed | None = None
        setting = self.setting
        unlike, closed_since = setting.unlike(self.chain), 0  # the best was found
        rounds = self.rounds * (2 if unlike else 1)  # of which each asks for several
        begun = self._begin()
        proved = StateBounds.of(self.pipeline_of_kinds, self.multipliers, setting)
        fastest, free = proved.least(self.cutoff)
        self.free = 0.0 if self.known else free
        hinted = self._hinted() if free < self.cutoff else []
        if hinted and (any(hinted[0][2]) or not self._roomy(fastest)):
            for kind, multipliers in enumerate(self.multipliers):
                multipliers.solve_all([one for one in hinted if self.next_price.new(Asked(kind, *one)) is not None])
            proved.outdate()
        counted = np.full(self.chain.shape, self.whole_blocks is None)
        try:
            for _ in range(3 * self.rounds if self.whole_blocks is None else 9 * self.rounds):
                limit = min(self.cutoff, math.inf if best is None else best[0])
                state, least = proved.least(limit)
                if least >= limit * (1 - TOLERANCE):
                    break
                if self.whole_blocks is not None and not counted[state]:
                    proved.raise_at(state, self.whole_blocks.step_seconds(state, limit))
                    counted[state] = True
                    continue
                tried = self.composition.compose(state)
                found = tried.found
                if found is not None and (best is None or found[0] < best[0]):
                    best, closed_since = found, 0
                if best is not None and best[0] <= self.enough:
                    break
                if closed_since >= self._patience(least, best):
                    break
                if found is not None and found[0] <= least * (1 + TOLERANCE):
                    proved.close(state)
                    continue
                if found is None and self.next_price.knows_the_leanest and self._rules_out(proved, state):
                    continue
                asked = self.next_price.next(state, tried.ranks, tried.division)
                if asked is None or len(self.multipliers[asked.kind].priced) - begun[asked.kind] >= rounds:
                    mixed, closed_since = self.composition.mixed(tried), closed_since + 1
                    if mixed is not None and (best is None or mixed[0] < best[0]):
                        best, closed_since = mixed, 0
                    if found is None:  # as others have used up the prices
                        self._rules_out(proved, state)
                    proved.close(state)
                    continue
                multipliers, prices = self.multipliers[asked.kind], (asked.price, asked.flights, asked.under)
                wanted = [(asked.price, one, asked.under) for one in asked.of_chunks or (asked.flights,)]
                wanted = [one for one in wanted if not multipliers.knows(*one, asked.at_tail)]
                multipliers.solve_all(wanted, at_tail=asked.at_tail)
                share = max(self.next_price.share, CAPS[1]) if asked.price == math.inf else self.next_price.share
                if share:
                    multipliers.solve(*prices, cap=self.pipeline_of_kinds.capacities[asked.kind] / share)
                proved.outdate()
                if proved.value(state) <= least and (others := self.next_price.of_later_ranks(asked)):
                    multipliers.solve_all([(one.price, one.flights, one.under) for one in others])
                    proved.outdate()
            proved.reopen()
            _, bound = proved.least(min(self.cutoff, math.inf if best is None else best[0]))
        except (LimitError, MemoryError):
            if best is None:
                raise
            proved.reopen()
            _, bound = proved.least(-math.inf)
            return self._outcome(best[0], min(bound, best[0]), best[1], best[2])
        if (
            best is None
            and setting.ranks == 1
            and bound < self.cutoff
            and len(self.multipliers[0].priced) - begun[0] < self.rounds
        ):
            best, bound = self._settled(bound)
        if best is None:
            known = self.cutoff < math.inf and self.composition.least < math.inf
            if not known and not self.cutoff <= bound < math.inf:  # it may fit, and takes too long
                self._look_at_the_leanest()
            return self._outcome(math.inf, bound, (), ())
        return self._outcome(best[0], min(bound, best[0]), best[1], best[2])

    def _patience(self, least: float, best: Composed | None) -> float:
        """How many states in which nothing better is found are enough, where `least` is proved of the next one."""
        if self.whole_blocks is not None or (best is None and self.cutoff == math.inf):
            return math.inf  # of what may fit nothing is known but what was found
        if self.setting.unlike(self.chain):
            return _STATES_UNLIKE
        if least >= min(self.cutoff, math.inf if best is None else best[0]) * (1 - COARSE):
            return _STATES
        return 2 * _STATES if best is None else math.inf

    def _begin(self) -> list[int]:
        """Solve the pieces with memory for free; how many prices of each kind of devices were known before."""
        for multipliers in self.multipliers:
            if len(self.multipliers) == 1:
                self.known = len(multipliers.priced)
                multipliers.begin(self.setting)
                if covering := self.composition.covering:
                    multipliers.solve(0.0, 0.0, (covering, covering, 0.0))
            else:
                multipliers.solve(0.0, 0.0)
        return [self.known] * len(self.multipliers)

    def _hinted(self) -> list[tuple[float, float, Passes]]:
        """Prices, flights and shares that the hint asks for."""
        price, under = self.hint
        under = self.chain.shares(under, self.setting.ranks)
        if not price:
            return [(0.0, 0.0, under)] if any(under) else []
        return [(price, one, under) for one in self.setting.tried_first(self.chain)]

    def _rules_out(self, proved: StateBounds, state: State) -> bool:
        """Whether provably nothing fits at a state; noted of all states, once."""
        if not self.ruled_out:
            proved.raise_to(np.where(self._impossible(), math.inf, 0.0))
            self.ruled_out = True
        return proved.value(state) == math.inf

    def _impossible(self) -> NDArray[np.bool_]:
        """States of the boundary in which provably nothing fits; asked where nothing was found in one."""
        if len(self.multipliers) > 1:
            return np.zeros(self.chain.shape, dtype=np.bool_)
        return impossible(self.chain, self.setting)

    def _look_at_the_leanest(self) -> None:
        """Compose where the boundary takes the least memory, to know how much is missing."""
        flights = self.setting.flights(0)
        for kind, multipliers in enumerate(self.multipliers):
            if self.next_price.new(Asked(kind, math.inf, flights)) is not None:
                multipliers.solve(math.inf, flights)
        for multipliers in self.multipliers:
            for known in [known for known in multipliers.priced if math.isinf(known.price)]:
                total = multipliers.value(known)
                self.composition.compose(tuple(int(i) for i in np.unravel_index(int(total.argmin()), total.shape)))

    def _roomy(self, state: State) -> bool:
        """Whether the fastest way to run the first rank at a state fits without a price, so that no hint is needed."""
        if len(self.multipliers) > 1:
            return False
        flights, ends = self.setting.flights(0), self.setting.in_flight
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

    def _settled(self, bound: float) -> tuple[Composed | None, float]:
        """What the exact solver finds where prices found nothing, with all inner blocks alike; or that nothing fits.

        That is a proof for blocks that differ, too: of those in a stage, all could be run like the leanest. Of several
        recomputed pieces the interior of one counts, and what blocks hand over does not: no plan needs less, and what
        is found is filled in once more.
        """
        chain = self.chain
        best: Composed | None = None
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
                found, possible = self._settle(ways, counted, math.inf if best is None else best[0])
                fits |= possible
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
        return best, bound if fits else math.inf

    def _settle(
        self, ways: Sequence[Piece | None], counted: Piece | None, cutoff: float
    ) -> tuple[Composed | None, bool]:
        """The best choice for head, one block of each kind and tail where the interior of one counts, if it fits and
        takes less than `cutoff`; whether any may fit."""
        chain, setting, flights = self.chain, self.setting, self.setting.flights(0)
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
                found.problem,
                upper_bound=min(self.cutoff, cutoff),
                relative_gap=_SETTLED,
                front_limit=_FRONTS,
                cell_limit=EXACT,
            )
        except ValueError:  # too wide to be solved exactly: nobody knows whether anything fits
            return None, True
        if solution.least_memory is not None:
            self.composition.least = min(self.composition.least, solution.least_memory)
        if solution.choice is None:
            return None, solution.status != "infeasible"
        taken = found.candidates(solution.choice)
        columns = [part.piece.chosen(*choice) for part, choice in zip(parts, taken, strict=True)]
        state = tuple(columns[0].candidates[key] for key in chain.boundary)
        head, tail = columns[0], columns[-1] if chain.tail else None
        self.composition.pools = [[tuple(columns[1 : 1 + len(chain.kinds)])] if self.blocks else []]
        rank, whole = self.composition.rank(0, state, head, tail), self.block_ranges.whole
        filled = fill_best(
            [[rank]], self.composition.pools[0], self.block_ranges, setting.micro_batches, setting.capacity
        )[0]
        if math.isinf(filled.busy[whole]):
            return None, True
        return (float(filled.busy[whole]), state, (self.composition.filling(0, filled, [(head, tail)], whole),)), True

    def _outcome(self, seconds: float, bound: float, state: State, ranks: tuple[RankFilling, ...]) -> Outcome:
        return Outcome(
            seconds=seconds,
            bound=bound,
            free=self.free,
            state=state,
            ranks=ranks,
            least=self.composition.least,
            overfull=not ranks and not self.composition.fitted and self.composition.least < math.inf,
            fullest=self.composition.fullest,
            price=self.next_price.price,
            under=self.next_price.under,
            solved=sum(len(multipliers.priced) - self.known for multipliers in self.multipliers),
        )


def check_virtual_stages(chain: Chain, setting: Setting) -> None:
    """Raise NothingAgreesError where virtual stages cannot hold equal blocks."""
    if setting.copies > 1 and (chain.blocks_in_head or chain.blocks_in_tail):
        place = "first block reads" if chain.blocks_in_head else "last block hands on"
        raise NothingAgreesError(
            f"virtual_stages = {setting.chunks}: all virtual stages hold equal blocks, but the {place} something"
            " else than the others; leave the virtual stages at 1"
        )
