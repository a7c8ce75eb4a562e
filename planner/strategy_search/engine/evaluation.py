"""Evaluation of one configuration: the best way to run every block on every stage, and a lower bound on the objective.

A price of memory y (seconds per byte, a Lagrange multiplier) turns each piece into a problem without a memory limit,
which is solved exactly for every state of the boundary. Each solution is two things at once:

    a bound     no stage s of n blocks is busy for less than  head + n inner + tail - y capacity     (Lagrange)
    a column    one more way to run a block; stages are filled with these until they fit          (stage_filling)

The next price is the one at which the two ways in the slowest stage cost the same (Dantzig and Wolfe 1960: column
generation; in one dimension it ends after a few steps). The gap that remains between bound and result comes from whole
blocks: a stage cannot run half a block lean.

This file holds the loop. `planner.strategy_search.engine.composition` builds plans from the columns,
`planner.strategy_search.engine.next_price` chooses the next price.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.errors import LimitError
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.least_memory import impossible
from planner.strategy_search.decomposition.pieces import NEITHER, Passes, Piece
from planner.strategy_search.decomposition.priced import State
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
"""Maximum number of prices of memory for one configuration; four are usual, up to twenty where memory is tight."""


_SETTLED = 1e-3
"""Relative gap of the exact solver."""

_FRONTS = 3_000
"""Maximum entries of a Pareto front in that solver: where times and bytes have no common measure, wider fronts, for
every way to run the blocks of each kind, take minutes."""


_OF_HOST = (1e-6, 1.0)
"""Prices of the host's memory that are tried one after the other where a plan does not fit there, in seconds of the
step for all of it. The first one only prefers what takes less of it among plans that are equally fast."""


Hint: TypeAlias = tuple[float, Passes]
"""A price of memory, in seconds per byte, and shares of exposed communication (`Passes`) that mattered elsewhere."""

NO_HINT: Hint = (0.0, NEITHER)


TOLERANCE = 1e-9
"""A result this close to its bound, relatively, is optimal: sums in another order differ by less."""


_STATES = 16
"""The evaluation stops after this many states of the boundary without a better result, if no bound leaves room for a
result that is better by more than `COARSE`. Whole blocks, and stages that cannot be equal, leave a gap to the bounds by
prices, so the bounds of many states say that they may be better. Twice as many if no state is as fast as the cutoff."""

_STATES_UNLIKE = 6
"""The same number where the chunks of a rank run in different ways, which leaves a wider gap."""


class Evaluation:
    """Evaluates one configuration of a chain, or of one chain for every kind of devices that the ranks are on.

    `cutoff`: plans that take this long are of no interest; `enough`: the evaluation stops at a plan this fast; `hint`:
    a price of memory and shares of exposed communication to try early; `rounds`: maximum number of prices;
    `multipliers`: what others have solved for the same pieces, or an empty list for later evaluations; `patterned`:
    whether operators have one pattern, so that whole blocks prove more than prices; `covering`: a share that always
    counts of the communication that the work of both passes cannot overlap. It replaces the shares that are best by the
    objective, which assumes more overlap than there may be.
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
        self.known = 0  # prices that others have solved
        self.free = 0.0  # the bound for any memory
        self.ruled_out = False  # states in which nothing fits are ruled out
        for kind, one in enumerate(self.multipliers):
            for priced in one.priced:
                self.next_price.new(
                    Asked(kind, priced.price, priced.flights, priced.under, priced.at_tail, hosted=priced.hosted)
                )
        self.whole_blocks = WholeBlocks(self.composition) if patterned and len(self.multipliers) == 1 else None

    def run(self) -> Outcome:
        """Try prices until the best result is proved optimal, or nothing more can be learnt."""
        best: Composed | None = None
        setting = self.setting
        unlike, closed_since = setting.unlike(self.chain), 0  # states closed since the best was found
        rounds = self.rounds * (2 if unlike else 1)  # each solves several prices
        begun = self._begin()
        proved = StateBounds.of(self.pipeline_of_kinds, self.multipliers, setting)
        fastest, free = proved.least(self.cutoff)
        self.free = 0.0 if self.known else free
        hinted = self._hinted() if free < self.cutoff else []
        scarce = bool(hinted) and not self._roomy(fastest)
        if scarce:
            self.next_price.price, self.next_price.under = self.hint
        if scarce or (hinted and any(hinted[0][2])):
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
                    if found is None:  # others have used up the prices
                        self._rules_out(proved, state)
                    proved.close(state)
                    continue
                multipliers, prices = self.multipliers[asked.kind], (asked.price, asked.flights, asked.under)
                wanted = [(asked.price, one, asked.under) for one in asked.of_chunks or (asked.flights,)]
                wanted = [one for one in wanted if not multipliers.knows(*one, asked.at_tail, asked.hosted)]
                multipliers.solve_all(wanted, at_tail=asked.at_tail, hosted=asked.hosted)
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
            if not known and not self.cutoff <= bound < math.inf:  # a plan may fit, but takes too long
                self._look_at_the_leanest()
            return self._outcome(math.inf, bound, (), ())
        return self._outcome(best[0], min(bound, best[0]), best[1], best[2])

    def _patience(self, least: float, best: Composed | None) -> float:
        """After how many states without a better result to stop, where `least` is the bound of the next state."""
        if self.whole_blocks is not None or (best is None and self.cutoff == math.inf):
            return math.inf  # only a plan shows that something fits
        if self.setting.unlike(self.chain):
            return _STATES_UNLIKE
        if least >= min(self.cutoff, math.inf if best is None else best[0]) * (1 - COARSE):
            return _STATES
        return 2 * _STATES if best is None else math.inf

    def _begin(self) -> list[int]:
        """Solve the pieces with memory for free. Returns how many prices each kind of devices had before."""
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
        """Prices, micro-batches in flight and shares that the hint asks for."""
        price, under = self.hint
        under = self.chain.shares(under, self.setting.ranks)
        if not price:
            return [(0.0, 0.0, under)] if any(under) else []
        return [(price, one, under) for one in self.setting.tried_first(self.chain)]

    def _rules_out(self, proved: StateBounds, state: State) -> bool:
        """Whether provably nothing fits at a state; computed once, for all states."""
        if not self.ruled_out:
            proved.raise_to(np.where(self._impossible(), math.inf, 0.0))
            self.ruled_out = True
        return proved.value(state) == math.inf

    def _impossible(self) -> NDArray[np.bool_]:
        """States of the boundary in which provably nothing fits; asked once nothing was found in a state."""
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
        """The plan of the exact solver where prices found none, with all inner blocks alike; or a proof that nothing
        fits.

        The proof holds for blocks that differ, too: all blocks of a stage could be run like the leanest of them. If
        several pieces are recomputed, the interior of only one counts, and what blocks hand over does not. No plan
        needs less memory than that, and the plan found is filled once more with everything counted. A plan that the
        host cannot hold is looked for again at prices of the host's memory.
        """
        found, fits = self._settled_at(0.0)
        for share in _OF_HOST if fits and self.setting.host < math.inf else ():
            if found is None:
                found, _ = self._settled_at(share * bound / self.setting.host)
        return found, bound if fits else math.inf

    def _settled_at(self, hosted: float) -> tuple[Composed | None, bool]:
        """The plan of the exact solver at a price of the host's memory, and whether any plan may fit on the device."""
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
                found, possible = self._settle(ways, counted, math.inf if best is None else best[0], hosted)
                fits |= possible
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
        return best, fits

    def _settle(
        self, ways: Sequence[Piece | None], counted: Piece | None, cutoff: float, hosted: float
    ) -> tuple[Composed | None, bool]:
        """The best choice for head, one block of each kind and tail, if it fits and takes less than `cutoff`; and
        whether any choice may fit. Of the interiors only that of `counted` counts."""
        chain, setting, flights = self.chain, self.setting, self.setting.flights(0)
        times = (1, *self.block_ranges.totals, 1)
        parts = [
            Part(piece=p, times=number, flights=flights, interior=p is counted)
            for p, number in zip(ways, times, strict=True)
            if p is not None
        ]
        ending = 0.0 if chain.blocks_in_tail or not self.blocks else max(0.0, -float(chain.ending.min()))
        found = parts_problem(
            parts, chain.boundary, weight=setting.weight, capacity=setting.capacity + ending, hosted=hosted
        )
        try:
            solution = dynamic_programming.solve(
                found.problem,
                upper_bound=min(self.cutoff, cutoff),
                relative_gap=_SETTLED,
                front_limit=_FRONTS,
                cell_limit=EXACT,
            )
        except ValueError:  # too wide to be solved exactly: whether anything fits is unknown
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
    """Raise NothingAgreesError if virtual stages cannot hold equal blocks."""
    if setting.copies > 1 and (chain.blocks_in_head or chain.blocks_in_tail):
        place = "first block reads" if chain.blocks_in_head else "last block hands on"
        raise NothingAgreesError(
            f"virtual_stages = {setting.chunks}: all virtual stages hold equal blocks, but the {place} something"
            " else than the others; leave the virtual stages at 1"
        )
