"""Lagrangian lower bounds: prices of memory, and what each price proves.

A price y (seconds per byte) replaces the memory limit. Each piece is then a problem without limits, and it is solved
exactly for every state of the boundary. The values bound the busy time of any stage of n blocks that fits in memory:

    busy >= head + n inner + tail - y capacity                                          (Lagrange)

This holds for every y. With blocks of several kinds, n inner is a sum over the kinds, in the order of the model
(`planner.strategy_search.decomposition.in_order`). If the blocks of a stage are not one range, or if ranks have devices
of several kinds, blocks are measured in units instead: a block of kind k counts u_k units, for any choice of u. A stage
with n units is then busy for at least n min_k (inner_k / u_k). Every price suggests units for which this is exact.

The pieces of a larger micro-batch also bound its k-th parts: together, k parts take at least as long as the whole, and
each part holds at least a k-th of its activations.

    questions       the pieces to solve at a price: the weights of their seconds and bytes
    priced          the answer: the pieces solved at that price, and their values
    usable_prices   which of the solved prices bound a rank
    rank_bounds     how busy a rank with some blocks is by these prices, and how many blocks it can hold
    lines           the least time in which all ranks hold all blocks

`Multipliers` here asks the questions, keeps what was solved, and bounds the step.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.crossings import seconds_of_all
from planner.strategy_search.decomposition.in_order import InOrder
from planner.strategy_search.decomposition.lines import pace
from planner.strategy_search.decomposition.pieces import NEITHER, Passes
from planner.strategy_search.decomposition.priced import Priced, States, of_all_blocks, picked
from planner.strategy_search.decomposition.questions import Questions, answers, average_weight
from planner.strategy_search.decomposition.rank_bounds import RankBounds
from planner.strategy_search.decomposition.setting import Setting

Array = NDArray[np.float64]

_HALVINGS = 24
"""Bisection steps in the search for a pace. The bound is at most a ten-millionth too low. Bounds that only decide what
is searched next use half as many steps."""

_ROUNDING = 1e-12
"""Relative difference between sums of the same numbers in different orders."""


class Multipliers:
    """The pieces of a chain, solved for any number of prices.

    Args:
        chain: the pieces.
        weight: how often a micro-batch counts (see `Setting.weight`).
        parts: the micro-batches to bound are this many times smaller than those of the chain.
        allowed: the candidates that some operators may choose.
        most: largest number of inner blocks on a rank for which the average interior of recomputed blocks stands for
            the largest one (see `Setting.most`).
        holds: largest number of inner blocks for which a rank has memory.
        columns: whether choices are needed, or bounds alone.
        single: whether everything is on one rank: gradient reductions then wait for its last backward pass.
        like: multipliers for the same chain, parts and candidates with another weight. They share whatever does not
            depend on the weight.
    """

    def __init__(
        self,
        chain: Chain,
        weight: float,
        parts: int = 1,
        allowed: Mapping[int, NDArray[np.bool_]] | None = None,
        *,
        most: int | None = None,
        holds: float = math.inf,
        columns: bool = True,
        single: bool = False,
        like: "Multipliers | None" = None,
    ) -> None:
        self.chain, self.weight, self.parts, self.like, self.single = chain, weight, parts, like, single
        self.halvings = _HALVINGS if columns else _HALVINGS // 2
        self.counts = chain.block_ranges.totals
        most = chain.block_ranges.blocks if most is None else most
        banned: Mapping[int, NDArray[np.bool_]] = {} if like is None else like.questions.banned
        if allowed and like is None:
            banned = {id(piece): piece.banned(allowed) for piece in (*chain.head, *chain.inner, *chain.tail)}
        self.priced: list[Priced] = []
        self.questions: Questions = Questions(chain, weight, parts, banned, most=most, columns=columns)
        self.rank_bounds = RankBounds(chain, self.priced, weight, parts, most=most, holds=holds)
        self._alone: Priced | None = None
        self._averaged: dict[int, Array] = {}  # by the number of virtual stages
        self._lone: dict[int, Array] = {}

    def solve(
        self,
        price: float,
        flights: float,
        under: Passes = NEITHER,
        cap: float = math.inf,
        *,
        at_tail: float = 0.0,
    ) -> None:
        """Solve the pieces for a price of memory, with `flights` micro-batches in flight. An infinite price asks for
        the least memory.

        `under` has the share from 0 to 1, for each pass, with which the excess of collectives over the computation that
        overlaps them counts, and `at_tail` that with which the transient bytes of the tail count
        (`planner.strategy_search.decomposition.questions`). With a `cap` on the transient bytes of an operator the
        result is a source of plans and proves no bound."""
        self.priced += answers([(self.questions, self.questions.at_price(price, flights, under, cap, at_tail))])

    def solve_all(
        self,
        prices: Sequence[tuple[float, float, Passes]],
        average: Setting | None = None,
        *,
        at_tail: float = 0.0,
        hosted: float = 0.0,
    ) -> None:
        """`solve` for several (price, flights, under) together, and for the average rank if a setting is given.
        `hosted` is a price of the host's memory in addition; an infinite one offloads nothing. With it the results are
        a source of plans and prove no bound."""
        asked = [self.questions.at_price(*one, at_tail=at_tail, hosted=hosted) for one in prices]
        if average is not None:
            asked.append(self.questions.of_average_rank(average))
        self.priced += answers([(self.questions, one) for one in asked])
        if average is not None:
            self._note_average(average)

    def knows(self, price: float, flights: float, under: Passes, at_tail: float = 0.0, hosted: float = 0.0) -> bool:
        """Whether the pieces were solved at this price without a cap."""
        asked = (price, flights, under, at_tail, hosted)
        return any(
            (one.price, one.flights, one.under, one.at_tail, one.hosted) == asked and (one.proves or hosted)
            for one in self.priced
        )

    def begin(self, setting: Setting) -> None:
        """Solve the pieces for free memory, if nothing was solved before, and for the average rank."""
        free = [] if self.priced else [(0.0, 0.0, NEITHER)]
        if free or setting.ranks > 1:
            self.solve_all(free, average=setting if setting.ranks > 1 else None)

    def alone(self) -> Priced:
        """The pieces solved for the least seconds of one micro-batch."""
        if self.like is not None:
            return self.like.alone()
        if self._alone is None:
            (self._alone,) = answers([(self.questions, self.questions.of_one_micro_batch())])
        return self._alone

    def value(self, priced: Priced, some: States | None = None) -> Array:
        """The value of the whole model at a price, for every state or for those of `some`."""
        head, inner, tail = (picked(values, some) for values in priced.values)
        whole: Array = head + of_all_blocks(self.counts, inner) + tail
        return whole

    def crossings(self, setting: Setting) -> Array:
        """Seconds of a micro-batch in transfers between all ranks, for every state."""
        return seconds_of_all(self.chain, setting, self.parts)

    def bounds(self, setting: Setting, some: States | None = None, limit: float = math.inf) -> Array:
        """Lower bounds on the step seconds for every state of the boundary, or for the states of `some`.

        `setting` has the micro-batches to bound, but counts flights in micro-batches of the chain. A bound that reaches
        `limit` may be lower than the best provable one.

        Rank s with n inner blocks is busy for at least a + n b, for every (a, b) that a price proves. So the slowest
        rank needs at least the time within which all ranks together can hold all blocks. They hold whole blocks, and
        blocks of several kinds in the order of the model.
        """
        possible = self._possible(setting, some)
        # the slowest rank is at least as slow as the average one; that bounds the part of the weight that the prices
        # leave out
        own_weight = 1 / setting.chunks + (setting.weight - self.weight) / setting.ranks
        lone = np.zeros(possible.shape)
        if setting.ranks > 1:
            lone = picked(self._sum_of_parts(setting), some) * own_weight
        within = None if limit == math.inf else limit - lone
        if len(self.counts) > 1 and setting.ranks > 1 and setting.chunks == 1:
            reaches = self.rank_bounds.reaches(setting, possible, some)
            slowest = InOrder(reaches, self.chain.block_ranges.along).pace(self.halvings, within)
            possible &= np.isfinite(slowest)
        else:
            slowest = self._in_units(setting, possible, some, within)
        if setting.ranks == 1:
            return np.where(possible, slowest, math.inf)
        averaged = self._averaged.get(setting.chunks)
        bound = slowest + lone if averaged is None else np.maximum(slowest + lone, picked(averaged, some))
        return np.where(possible, bound, math.inf)

    def _in_units(
        self,
        setting: Setting,
        possible: NDArray[np.bool_],
        some: States | None,
        within: Array | None,
    ) -> Array:
        """Least busy seconds of the slowest rank, with blocks measured in units, for the states of `some`. Clears
        `possible`, in place, for states in which the blocks do not fit."""
        slowest, last = np.zeros(possible.shape), setting.ranks - 1
        # if all ranks differ, the slowest is the first, the last, or close to the second
        among = sorted({0, min(1, last), last}) if setting.unlike(self.chain) else None
        for units in self.rank_bounds.units(possible, some):
            total = of_all_blocks(self.counts, units)
            lines = self.rank_bounds.lines(setting, possible, units, among, some)
            busy: Array = np.max([line.busy(1 / setting.ranks) for line in lines], axis=0)  # if all hold equally many
            if setting.shares_equally:
                possible &= np.min([line.room for line in lines], axis=0) >= total / setting.ranks * (1 - _ROUNDING)
            else:
                possible &= np.min([line.room for line in lines], axis=0) >= 0
                room = sum(np.maximum(line.room, 0.0) * line.ranks for line in lines)
                possible &= room >= total * (1 - _ROUNDING)
                busy = pace(lines, busy, total, self.halvings, within)
            slowest = np.maximum(slowest, busy)
        return slowest

    def averages(self, setting: Setting) -> bool:
        """Whether the value for the average rank is known, or there is only one rank."""
        return setting.ranks == 1 or setting.chunks in self._averaged

    def whatever_memory(self, known: Setting, setting: Setting) -> float:
        """A lower bound on the step seconds for free memory and ranks that are all as quick as the average one.

        `known` is the setting that was solved. `setting` is the same, or one with more virtual stages: a micro-batch
        then has a smaller weight. Without transfers it takes at least the known seconds in the ratio of the weights.
        The transfers between all its stages are added."""
        if setting.ranks == 1:
            return float(self.bounds(setting).min())
        seconds = self._averaged[known.chunks]
        if setting.chunks != known.chunks:
            weight, own = average_weight(known), average_weight(setting)
            seconds = (seconds - weight * self.crossings(known)) * (own / weight) + own * self.crossings(setting)
        return float(seconds.min())

    def where_free(self, setting: Setting) -> Array | None:
        """Lower bounds on the step seconds of every state for free memory; None if that was not solved."""
        if not self.priced or not self.averages(setting):
            return None
        return np.maximum(self._unpriced(setting), self._averaged.get(setting.chunks, 0.0))

    def _unpriced(self, setting: Setting) -> Array:
        """Least seconds of every state for a single rank with free memory; zeros for several ranks."""
        if setting.ranks == 1 and self.priced and self.priced[0].proves and not self.priced[0].price:
            return self.value(self.priced[0])
        return np.zeros(self.chain.shape)

    def _possible(self, setting: Setting, some: States | None) -> NDArray[np.bool_]:
        """States with any choice at all, however slow. The first price tells, if it allows every candidate."""
        if setting.ranks == 1 and self.priced and self.priced[0].proves:
            return np.isfinite(self.value(self.priced[0], some))
        return np.isfinite(picked(self._sum_of_parts(setting), some))

    def leanest(
        self, flights: Sequence[float], most: float, interiors: Sequence[tuple[float, float, float]]
    ) -> list[list[tuple[Array, Array, Array]]]:
        """Least bytes of head, inner blocks (kinds, *states) and tail for every state.

        One list per entry of `interiors`, with one result per number of micro-batches in `flights`. No operator may
        need more than `most` transient bytes, unless all of its candidates do. `interiors` has the shares of the
        interior of head, inner blocks and tail that count."""
        asked = [
            (self.questions, self.questions.leanest(number, most, shares))
            for shares, number in itertools.product(interiors, flights)
        ]
        found = iter(answers(asked))
        return [[next(found).values for _ in flights] for _ in interiors]

    def least_live(self) -> Array:
        """Least bytes that inner blocks (kinds, *states) keep of a micro-batch until its backward pass, however long
        they take."""
        (found,) = answers([(self.questions, self.questions.of_live_bytes())])
        return found.values[1]

    def least_bytes(self, setting: Setting) -> float:
        """Least bytes per rank, on average over the ranks, that any plan needs, as far as the least memory was asked
        for."""
        least = 0.0
        for known in self.priced:
            if (
                math.isinf(known.price)
                and not known.hosted
                and known.flights <= self.least_flights(setting) * (1 + 1e-12)
            ):
                least = max(least, float(self.value(known).min()) / setting.ranks)
        return least

    def least_flights(self, setting: Setting) -> float:
        """Micro-batches in flight on the last rank, which has the fewest. If the chunks of a rank run unlike each
        other: of the chunk with the fewest on any rank."""
        if setting.unlike(self.chain):
            return min(map(min, setting.in_flight))
        return setting.flights(setting.ranks - 1)

    def _sum_of_parts(self, setting: Setting) -> Array:
        """Least seconds of one micro-batch on all ranks together."""
        if setting.chunks not in self._lone:
            self._lone[setting.chunks] = self.value(self.alone()) + self.crossings(setting)
        return self._lone[setting.chunks]

    def _note_average(self, setting: Setting) -> None:
        """Store the last answer as that of the average rank."""
        seconds = self.value(self.priced[-1]) + average_weight(setting) * self.crossings(setting)
        self._averaged[setting.chunks] = seconds


def first_bounds(members: Sequence[tuple[Multipliers, Setting]]) -> None:
    """Solve the pieces of each member, all together: for the average rank if there are several ranks, else for free
    memory."""
    asked = []
    for multipliers, setting in members:
        questions = multipliers.questions
        first = questions.of_average_rank(setting) if setting.ranks > 1 else questions.at_price(0.0, 0.0)
        asked.append((questions, first))
    for (multipliers, setting), priced in zip(members, answers(asked), strict=True):
        multipliers.priced.append(priced)
        if setting.ranks > 1:
            multipliers._note_average(setting)
