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

The file follows this argument: prices, units, bounds.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.plan.prediction.bucket_overlap import SLOTS
from planner.strategy_search.decomposition.in_order import InOrder, Reach
from planner.strategy_search.decomposition.pieces import (
    NEITHER,
    WAITED,
    Asked,
    Chain,
    Column,
    Passes,
    Piece,
    Solved,
    Weights,
    solve,
)
from planner.strategy_search.decomposition.setting import Setting

Array = NDArray[np.float64]
State = tuple[int, ...]
States = tuple[NDArray[np.intp], ...]
"""Some states of the boundary: one array per axis, all of the same length."""

_Combination = tuple[tuple[int, float], ...]
"""Indices into `Multipliers.priced`, and the share with which the values of each count."""

_Alike = tuple[tuple[tuple[_Combination, _Combination], ...], bool, bool, tuple[int, ...]]

_HALVINGS = 24
"""Bisection steps in the search for a pace. The bound is at most a ten-millionth too low. Bounds that only decide what
is searched next use half as many steps."""

_SUGGESTING = 4
"""The number of prices that suggest units: the last ones, and the first one in addition."""

_ROUNDING = 1e-12
"""Relative difference between sums of the same numbers in different orders."""

NEVER = 1e15
"""A number of blocks that is larger than any model has."""

_LEAN = 1e-6
"""Value of a second in bytes when the least memory is asked for. It only breaks ties."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """The pieces solved for one price of memory, and their values over all states of the boundary."""

    price: float
    flights: float
    under: Passes
    proves: bool  # whether the values bound the busy time of a rank
    at_tail: float  # share of transient bytes that is counted at the tail
    head: tuple[Solved, ...]
    inner: tuple[tuple[Solved, ...], ...]  # for each kind of block
    tail: tuple[Solved, ...]
    values: tuple[Array, Array, Array]  # head, inner (kinds, *states) and tail
    known: dict[tuple[int, State], Column] = field(default_factory=dict)

    def columns(self, pieces: Sequence[Solved], state: State, chain: Chain) -> list[Column]:
        """The chosen columns of some pieces at a state, one for each way to run the blocks."""
        return [self._column(solved, state, chain) for solved in pieces]

    def best_column(self, pieces: Sequence[Solved], state: State, chain: Chain) -> Column | None:
        """The column of the piece that costs least at this price and state; None without pieces."""
        costs = [float(over(chain, solved)[state]) for solved in pieces]
        return self._column(pieces[costs.index(min(costs))], state, chain) if pieces else None

    def _column(self, solved: Solved, state: State, chain: Chain) -> Column:
        inside = tuple([state[axis] for axis in _axes(chain, solved)])
        key = (id(solved), inside)
        if key not in self.known:
            self.known[key] = solved.column(inside)
        return self.known[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines:
    """Bounds for `ranks` equal ranks. Arrays are per state of the boundary.

    A rank with n units of inner blocks is busy for at least a + n b, for every pair (a, b) of `ends` and `slopes`
    (prices, states). Each pair holds up to n = `most` units. A rank cannot hold more than `room` units. `wholes`
    (prices, states) is the value of all inner blocks of the model together."""

    ends: Array
    slopes: Array
    wholes: Array
    most: Array
    room: Array
    ranks: int

    def within(self, time: Array) -> Array:
        """The number of units that a rank can hold within a time, by all prices: (states), or (times, states) for times
        of shape (times, 1, states). `NEVER` where the number exceeds what the price holds for."""
        units = (time - self.ends) / self.slopes
        least: Array = np.where(units >= self.most, NEVER, units).min(axis=-1 - self.room.ndim)
        return least

    def among(self, some: NDArray[np.bool_]) -> "Lines":
        """The same bounds for a subset of the states."""
        picked = {name: getattr(self, name)[..., some] for name in ("ends", "slopes", "wholes", "most", "room")}
        return replace(self, **picked)

    def busy(self, share: float) -> Array:
        """Least busy seconds of a rank that holds this share of the blocks of every kind."""
        best: Array = (self.ends + share * self.wholes).max(axis=0)
        return best


@dataclass(frozen=True, kw_only=True, eq=False)
class _Question:
    """Pieces to solve for one price of memory.

    `under` has the shares with which excess counts: the seconds by which collectives exceed the computation that
    overlaps them. `asked` holds the pieces of head, tail and every kind of block one after the other; `numbers` says
    how many pieces belong to each."""

    price: float
    flights: float
    under: Passes
    proves: bool
    at_tail: float
    asked: list[Asked]
    numbers: list[int]


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
        self.chain, self.weight, self.parts, self.columns, self.like = chain, weight, parts, columns, like
        self.banned: dict[int, NDArray[np.bool_]] = {} if like is None else like.banned
        if allowed and like is None:
            self.banned = {id(piece): piece.banned(allowed) for piece in (*chain.head, *chain.inner, *chain.tail)}
        self.blocks = chain.block_ranges.blocks
        self.counts = chain.block_ranges.totals
        self.most, self.holds = self.blocks if most is None else most, holds
        number = chain.tables.template.blocks.count
        self.covers = (
            1 - 1 / (SLOTS * (1 + number)) if number else 1.0
        )  # of the last backward pass, behind its first slot
        self.single = single
        self.priced: list[Priced] = []
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

        `under` has a share s from 0 to 1 for each pass. Collectives that overlap with computation cost max(0, excess),
        where excess is their seconds minus those of the computation. Since max(0, excess) >= s excess, every s gives a
        lower bound. The same holds for gradient reductions R under the last backward pass B. None of them can start
        before the first slot of that pass is over (`planner.plan.prediction.bucket_overlap`), so their excess is

            R - (1 - 1 / slots) B

        With a `cap` on the transient bytes of an operator the result is a source of plans and proves no bound.

        The largest interior of a recomputed block is at least the average interior, and at least the interior in the
        tail. The largest transient memory of an operator is at least the least one, and at least that of an operator in
        the tail. Both maxima count as a weighted mean of these two bounds; the bound from the tail has the share
        `at_tail`."""
        self._add([self._priced(price, flights, under, cap, at_tail)])

    def solve_all(
        self,
        prices: Sequence[tuple[float, float, Passes]],
        average: Setting | None = None,
        *,
        at_tail: float = 0.0,
    ) -> None:
        """`solve` for several (price, flights, under) together, and the question of `_average` if a setting is
        given."""
        questions = [self._priced(price, flights, under, at_tail=at_tail) for price, flights, under in prices]
        self._add([*questions, self._average(average)] if average is not None else questions)
        if average is not None:
            self._note_average(average)

    def knows(self, price: float, flights: float, under: Passes, at_tail: float = 0.0) -> bool:
        """Whether the pieces were solved at this price without a cap."""
        asked = (price, flights, under, at_tail)
        return any((one.price, one.flights, one.under, one.at_tail) == asked and one.proves for one in self.priced)

    def begin(self, setting: Setting) -> None:
        """Solve the pieces for free memory, if nothing was solved before, and for the average rank."""
        free = [] if self.priced else [(0.0, 0.0, NEITHER)]
        if free or setting.ranks > 1:
            self.solve_all(free, average=setting if setting.ranks > 1 else None)

    def _priced(
        self, price: float, flights: float, under: Passes = NEITHER, cap: float = math.inf, at_tail: float = 0.0
    ) -> "_Question":
        weights = self._weights(price, flights, under)
        if at_tail:
            weights = replace(weights, replay=weights.replay * (1 - at_tail))
        proves = cap == math.inf and under[2] != WAITED
        question = self._question(weights, price, flights, under=under, proves=proves, cap=cap)
        if not at_tail:
            return question
        own = slice(question.numbers[0], question.numbers[0] + question.numbers[1])
        there = price * at_tail / self.parts
        counted = [
            replace(one, weights=replace(one.weights, replay=one.weights.replay + there, transient=there))
            for one in question.asked[own]
        ]
        asked = [*question.asked[: own.start], *counted, *question.asked[own.stop :]]
        return replace(question, asked=asked, at_tail=at_tail)

    def _weights(self, price: float, flights: float, under: Passes) -> Weights:
        waited = under[2] == WAITED
        last = under[2] if self.chain.reduces and not waited else 0.0
        covering = last * self.covers
        rest = (self.weight - covering) * (1 - 1 / self.parts)
        if math.isinf(price):
            return Weights(
                part=self.weight * _LEAN,
                step=_LEAN,
                fixed=1.0,
                live=flights,
                replay=self._of_interior(self.blocks) / self.parts,
            )
        return Weights(
            part=self.weight / self.parts,
            steady=rest,
            excess=(under[0] * self.weight / self.parts, under[1] * (self.weight - covering) / self.parts),
            under=(under[0] * rest, under[1] * rest),
            uncovered=self._uncovered(under, covering),
            step=1.0,
            backward=covering / self.parts,
            reduction=0.0 if waited else 1.0 - last,
            fixed=price,
            live=price * flights,
            replay=price * self._of_interior(self.most) / self.parts,
        )

    def _of_interior(self, most: int) -> float:
        """The share of the interior of each block that counts if a rank holds up to `most` inner blocks."""
        return 1 / max(1, most + self.chain.blocks_at_ends)

    @property
    def interior(self) -> float:
        """The share of the interior of each block that counts when memory has a price."""
        return self._of_interior(self.most)

    def _uncovered(self, under: Passes, covering: float) -> tuple[float, float]:
        """Shares of the seconds U that are uncovered once a step, in the forward and in the backward pass.

        A pass with computation W and collectives H takes max(W, H), and once a step max(W + U, H). For a share s of the
        excess this is at least s H + (1 - s) (W + U). The last backward pass already counts `covering` of the
        reductions, so less of U counts there."""
        return (1 - under[0]) * min(1.0, self.weight), (1 - under[1]) * min(1.0, self.weight - covering)

    def _add(self, questions: Sequence["_Question"]) -> None:
        self.priced += _answers([(self, question) for question in questions])

    def _question(
        self,
        weights: Weights,
        price: float,
        flights: float,
        *,
        proves: bool,
        under: Passes = NEITHER,
        cap: float = math.inf,
    ) -> "_Question":
        def banned(piece: Piece) -> NDArray[np.bool_] | None:
            return self.banned.get(id(piece)) if cap == math.inf else piece.bulky(cap)

        ending, single, chain = weights, 1 / self.parts, self.chain
        if flights > single:  # behind the blocks one micro-batch at a time is in flight
            ending = replace(weights, live=weights.live / flights * single)
        beginning = weights if chain.interior_in_head else replace(weights, replay=0.0)
        ending = ending if chain.blocks_in_tail else replace(ending, replay=0.0)
        groups = [(chain.head, beginning), (chain.tail, ending), *((pieces, weights) for pieces in chain.kinds)]
        worth = [(_worth(pieces, price), own) for pieces, own in groups]
        return _Question(
            price=price,
            flights=flights,
            under=under,
            proves=proves,
            at_tail=0.0,
            asked=[Asked(piece=one, weights=own, banned=banned(one)) for pieces, own in worth for one in pieces],
            numbers=[len(pieces) for pieces, _ in worth],
        )

    def _answer(self, question: "_Question", solved: Sequence[Solved]) -> Priced:
        left = iter(solved)
        head, tail, *inner = (tuple(itertools.islice(left, number)) for number in question.numbers)
        return Priced(
            price=question.price,
            flights=question.flights,
            under=question.under,
            proves=question.proves,
            at_tail=question.at_tail,
            head=head if self.columns else (),
            inner=tuple(inner) if self.columns else (),
            tail=tail if self.columns else (),
            values=(self._least_value(head), self._least_values(inner), self._least_value(tail)),
        )

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
            lone = _picked(self._sum_of_parts(setting), some) * own_weight
        within = None if limit == math.inf else limit - lone
        if len(self.counts) > 1 and setting.ranks > 1 and setting.chunks == 1:
            slowest = InOrder(self.reaches(setting, possible, some), self.chain.block_ranges.along).pace(
                self._halvings, within
            )
            possible &= np.isfinite(slowest)
        else:
            slowest = self._in_units(setting, possible, some, within)
        if setting.ranks == 1:
            return np.where(possible, slowest, math.inf)
        averaged = self._averaged.get(setting.chunks)
        bound = slowest + lone if averaged is None else np.maximum(slowest + lone, _picked(averaged, some))
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
        for units in self.units(possible, some):
            total = self.whole(units)
            lines = self.lines(setting, possible, units, among, some)
            busy: Array = np.max([line.busy(1 / setting.ranks) for line in lines], axis=0)  # if all hold equally many
            if setting.shares_equally:
                possible &= np.min([line.room for line in lines], axis=0) >= total / setting.ranks * (1 - _ROUNDING)
            else:
                possible &= np.min([line.room for line in lines], axis=0) >= 0
                room = sum(np.maximum(line.room, 0.0) * line.ranks for line in lines)
                possible &= room >= total * (1 - _ROUNDING)
                busy = self.pace(lines, busy, total, within)
            slowest = np.maximum(slowest, busy)
        return slowest

    @property
    def _halvings(self) -> int:
        return _HALVINGS if self.columns else _HALVINGS // 2

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
            weight, own = self._average_weight(known), self._average_weight(setting)
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
        return np.isfinite(_picked(self._sum_of_parts(setting), some))

    def leanest(
        self, flights: Sequence[float], most: float, interiors: Sequence[tuple[float, float, float]]
    ) -> list[list[tuple[Array, Array, Array]]]:
        """Least bytes of head, inner blocks (kinds, *states) and tail for every state.

        One list per entry of `interiors`, with one result per number of micro-batches in `flights`. No operator may
        need more than `most` transient bytes, unless all of its candidates do. `interiors` has the shares of the
        interior of head, inner blocks and tail that count."""
        sides = (len(self.chain.head), len(self.chain.tail), sum(map(len, self.chain.kinds)))
        asked = []
        for (head, inner, tail), number in itertools.product(interiors, flights):
            question = self._priced(math.inf, number, cap=most)
            parts = (*(head,) * sides[0], *(tail,) * sides[1], *(inner,) * sides[2])
            counted = [
                replace(one, weights=replace(one.weights, replay=part))
                for one, part in zip(question.asked, parts, strict=True)
            ]
            asked.append((self, replace(question, asked=counted)))
        found = iter(_answers(asked))
        return [[next(found).values for _ in flights] for _ in interiors]

    def least_live(self) -> Array:
        """Least bytes that inner blocks (kinds, *states) keep of a micro-batch until its backward pass, however long
        they take."""
        question = self._question(Weights(part=0.0, step=0.0, live=1.0), math.inf, 1.0, proves=False)
        (found,) = _answers([(self, question)])
        return found.values[1]

    def least_bytes(self, setting: Setting) -> float:
        """Least bytes per rank, on average over the ranks, that any plan needs, as far as the least memory was asked
        for."""
        least = 0.0
        for known in self.priced:
            if math.isinf(known.price) and known.flights <= self.least_flights(setting) * (1 + 1e-12):
                least = max(least, float(self.value(known).min()) / setting.ranks)
        return least

    def least_flights(self, setting: Setting) -> float:
        """Micro-batches in flight on the last rank, which has the fewest. If the chunks of a rank run unlike each
        other: of the chunk with the fewest on any rank."""
        if setting.unlike(self.chain):
            return min(map(min, setting.in_flight))
        return setting.flights(setting.ranks - 1)

    def value(self, priced: Priced, some: States | None = None) -> Array:
        """The value of the whole model at a price, for every state or for those of `some`."""
        head, inner, tail = (_picked(values, some) for values in priced.values)
        whole: Array = head + self.whole(inner) + tail
        return whole

    def whole(self, inner: Array) -> Array:
        """The values of all inner blocks together, from the value of one block of each kind."""
        return sum(
            (count * values for count, values in zip(self.counts, inner, strict=True)), np.zeros(inner.shape[1:])
        )

    def units(self, possible: NDArray[np.bool_], some: States | None = None) -> list[Array]:
        """Units to measure blocks in, each (kinds, *states): ones for a single kind; for several kinds the values of
        the blocks at each suggesting price."""
        shape = (len(self.counts), *possible.shape)
        if len(self.counts) < 2:
            return [np.ones(shape)]
        known = self.priced[:1] + self.priced[1:][-_SUGGESTING:]
        found = []
        for priced in known:
            values = np.where(possible, np.maximum(_picked(priced.values[1], some), 1e-30), 1.0)
            found.append(values * (self.blocks / self.whole(values)))
        return found

    def lines(
        self,
        setting: Setting,
        possible: NDArray[np.bool_],
        units: Array,
        among: Sequence[int] | None = None,
        some: States | None = None,
    ) -> list["Lines"]:
        """Bounds for the ranks, or for those in `among`, for all states or those of `some`. Ranks with the same bounds
        share one entry."""
        every = range(setting.ranks) if among is None else among
        alike: dict[_Alike, list[int]] = {}
        for rank in every:
            alike.setdefault(self._alike(setting, rank), []).append(rank)
        return [
            self._line(self._reach(setting, possible, usable, ranks, some), setting, possible, units)
            for (usable, *_), ranks in alike.items()
        ]

    def reaches(self, setting: Setting, possible: NDArray[np.bool_], some: States | None = None) -> list[Reach]:
        """Bounds for the ranks in their order, for all states or those of `some`. Neighbours with the same bounds share
        one entry."""
        return [
            self._reach(setting, possible, usable, list(ranks), some)
            for (usable, *_), ranks in itertools.groupby(
                range(setting.ranks), key=lambda rank: self._alike(setting, rank)
            )
        ]

    def _alike(self, setting: Setting, rank: int) -> _Alike:
        """A key of the bounds of a rank: its usable prices, whether it is first or last, and its links. Ranks with
        equal keys have equal bounds."""
        usable = self.combinations(setting, rank)
        between = tuple(map(id, self.chain.crossing.between[max(0, rank - 1) : rank + 1]))
        return usable, rank == 0, rank == setting.ranks - 1, between

    def combinations(self, setting: Setting, rank: int) -> tuple[tuple[_Combination, _Combination], ...]:
        """The prices that bound a rank: pairs of a combination for its inner blocks and one for the head on the first
        rank. A price is usable if it was solved with no more micro-batches in flight than the rank has.

        Chunks that run unlike each other have own flights n_c. The value g of a block at a price is a minimum of sums
        that are linear in n. So g is concave, and between two solved numbers it is at least the chord:

            1/v sum_c g(n_c) >= 1/v sum_c (chord of g at n_c)

        With no micro-batch in flight, g is at least the value for free memory, and at least zero bytes."""
        if not setting.unlike(self.chain):
            flights = setting.flights(rank) * (1 + 1e-12)
            return tuple(
                (((at, 1.0),), ((at, 1.0),))
                for at, known in enumerate(self.priced)
                if known.proves and (not known.price or known.flights <= flights)
            )
        groups: dict[tuple[float, Passes, float], list[int]] = {}
        for at, known in enumerate(self.priced):
            if known.proves:
                groups.setdefault((known.price, known.under, known.at_tail), []).append(at)
        found = []
        for (price, under, _), own in groups.items():
            points = sorted((self.priced[at].flights if price else math.inf, at) for at in own)
            if price and points[0][0] > 0:  # the point with none in flight
                free = None if math.isinf(price) else groups.get((0.0, under, 0.0))
                if free is None and price < math.inf:
                    continue
                points = [(0.0, -1 if free is None else free[0]), *points]
            chunks = [_on_chords(points, number) for number in setting.in_flight[rank]]
            inside: dict[int, float] = {}
            for at, share in itertools.chain.from_iterable(chunks):
                inside[at] = inside.get(at, 0.0) + share / setting.chunks
            inside.setdefault(points[-1][1], 0.0)
            last = inside.pop(points[-1][1])
            found.append(((*inside.items(), (points[-1][1], last)), chunks[0]))
        return tuple(found)

    def _combined(self, combination: _Combination, place: int, some: States | None) -> Array:
        """A combination of `Priced.values[place]`. The index -1 stands for zeros."""
        known = [(share, _picked(self.priced[at].values[place], some)) for at, share in combination if at >= 0]
        if len(known) == 1 and known[0][0] == 1.0:
            return known[0][1]
        with np.errstate(invalid="ignore"):  # an impossible state stays infinite, however small its share
            counted = [np.where(np.isinf(values), values, share * values) for share, values in known]
        return functools.reduce(np.add, counted, np.zeros(()))

    def _reach(
        self,
        setting: Setting,
        possible: NDArray[np.bool_],
        usable: Sequence[tuple[_Combination, _Combination]],
        ranks: Sequence[int],
        some: States | None,
    ) -> Reach:
        """The bounds that the `usable` prices prove for equal ranks."""
        rank = ranks[0]
        first, last = rank == 0, rank == setting.ranks - 1
        crossing = _picked(self.crossing_seconds(setting, rank), some) * (self.weight / self.parts)
        at_once = self.least_transient(first, last)
        own = last and self.blocks and not self.chain.blocks_in_tail  # the last block is an inner one and may hold less
        ending = np.minimum(_picked(self.chain.ending, some), 0.0)
        less = ending * setting.in_flight[-1][-1] if own else np.zeros(possible.shape)
        ends, inner, left, leanest = list[Array](), list[Array](), list[Array](), list[Array]()
        for inside, begun in usable:
            priced = self.priced[inside[-1][0]]
            capacity = setting.capacity - at_once * (1 - priced.at_tail if last else 1.0)
            blocks = self._combined(inside, 1, some)
            value = (self._combined(begun, 0, some) if first else 0.0) + (
                _picked(priced.values[2], some) if last else 0.0
            )
            value = value + less * (1.0 if math.isinf(priced.price) else priced.price)
            blocks = np.where(possible, np.maximum(blocks, 1e-30), 1.0)
            if math.isinf(priced.price):
                left.append(np.where(possible, capacity + 1e-9 * setting.capacity - value, 0.0))
                leanest.append(blocks)
            else:
                value = crossing + value - (priced.price * capacity if priced.price else 0.0)
                ends.append(np.where(possible, value, 0.0))
                inner.append(blocks)
        kinds = (len(self.counts), *possible.shape)
        return Reach(
            ends=np.array(ends),
            inner=np.array(inner).reshape(len(inner), *kinds),
            most=self.most,
            left=np.array(left).reshape(len(left), *possible.shape),
            leanest=np.array(leanest).reshape(len(leanest), *kinds),
            ranks=len(ranks),
        )

    def _line(self, reach: Reach, setting: Setting, possible: NDArray[np.bool_], units: Array) -> "Lines":
        """The bounds of a `Reach` with blocks measured in units."""

        def slope(blocks: Array) -> Array:
            found: Array = (blocks / units).min(axis=0) if len(blocks) else np.full(possible.shape, 1.0)
            return found

        room = np.full(possible.shape, self.holds if len(self.counts) < 2 else math.inf)
        for left, blocks in zip(reach.left, reach.leanest, strict=True):
            room = np.minimum(room, np.where(left < 0, -math.inf, self.whole_blocks(left / slope(blocks) + 1e-6)))
        return Lines(
            ends=reach.ends,
            slopes=np.array([slope(blocks) for blocks in reach.inner]),
            wholes=np.array([self.whole(blocks) for blocks in reach.inner]),
            most=self.units_of_most(units) if len(units) else np.full(possible.shape, math.inf),
            room=room,
            ranks=reach.ranks,
        )

    def units_of_most(self, units: Array) -> Array:
        """The least units of `most` inner blocks, for every state: the smallest blocks of the model are counted
        first."""
        by_size = np.argsort(units, axis=0)
        counts = np.asarray(self.counts)[by_size]
        before = np.cumsum(counts, axis=0) - counts
        found: Array = (np.clip(self.most - before, 0, counts) * np.take_along_axis(units, by_size, axis=0)).sum(axis=0)
        return found

    def whole_blocks(self, units: Array) -> Array:
        """Rounds down to whole blocks if every block is one unit; with several kinds units stay as they are."""
        return np.floor(units) if len(self.counts) < 2 else units

    def least_transient(self, first: bool, last: bool) -> float:
        """Transient bytes that a rank needs under every choice."""
        sides = ((self.chain.head, first), (self.chain.inner, self.blocks > 0), (self.chain.tail, last))
        held = [pieces for pieces, here in sides if here and pieces]
        return max((min(piece.least_transient for piece in pieces) for pieces in held), default=0.0) / self.parts

    def pace(self, lines: Sequence["Lines"], high: Array, total: Array, limit: Array | None = None) -> Array:
        """The least time, for every state, within which the ranks can hold all units; `limit` where that time is too
        short. Found by bisection from below.

        `high` is the time of the slowest rank if all hold equally many.
        """
        if limit is not None:
            found: Array = np.maximum(limit, 0.0)
            less = self._room(lines, found) >= total
            if less.any():
                found[less] = self.pace([line.among(less) for line in lines], high[less], total[less])
            return found
        low = np.zeros(high.shape)
        high = (high + np.max([line.slopes.max(axis=0) for line in lines], axis=0)) * 2
        for _ in range(self._halvings):
            middle = (low + high) / 2
            enough = self._room(lines, middle) >= total
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return low

    def _room(self, lines: Sequence["Lines"], time: Array) -> Array:
        """Units that all ranks together can hold within a time, for every state; minus infinity if the time is too
        short for the ends of some rank."""
        room = np.zeros(time.shape)
        for line in lines:
            most = line.within(time)
            room += np.where(most < 0, -math.inf, np.minimum(self.whole_blocks(most + 1e-9), line.room) * line.ranks)
        return room

    def crossing_seconds(self, setting: Setting, rank: int) -> Array:
        """Seconds in which a rank receives a micro-batch of the chain and sends back its gradients, for every state."""
        between, last = self.chain.crossing.between, setting.ranks - 1
        if not between:
            return np.broadcast_to(self._crossing_seconds(setting, rank == 0, rank == last), self.chain.shape)
        found = np.zeros(self.chain.shape)
        found = found if rank == 0 else found + between[rank - 1][0]
        return found if rank == last else found + between[rank][1]

    def _crossing_seconds(self, setting: Setting, first: bool, last: bool) -> Array:
        """The same for equal links, with axes of length one where an axis makes no difference."""
        if setting.ranks == 1:
            return np.zeros(self.chain.shape)
        chunks, (forward, backward, around, around_back) = setting.chunks, self.chain.crossing.along_own_axes
        seconds = (chunks - 1) * around if first else chunks * forward
        return seconds + ((chunks - 1) * around_back if last else chunks * backward)

    def alone(self) -> Priced:
        """The pieces solved for the least seconds of one micro-batch."""
        if self.like is not None:
            return self.like.alone()
        if self._alone is None:
            weights = Weights(part=1 / self.parts, steady=1 - 1 / self.parts)
            (self._alone,) = _answers([(self, self._question(weights, 0.0, 0.0, proves=False))])
        return self._alone

    def _sum_of_parts(self, setting: Setting) -> Array:
        """Least seconds of one micro-batch on all ranks together."""
        if setting.chunks not in self._lone:
            self._lone[setting.chunks] = self.value(self.alone()) + self.crossings(setting)
        return self._lone[setting.chunks]

    def _average(self, setting: Setting) -> "_Question":
        """The question for ranks that are all as quick as the average one. It bounds best with few micro-batches."""
        weight = self._average_weight(setting)
        weights = Weights(
            part=weight / self.parts,
            steady=weight * (1 - 1 / self.parts),
            uncovered=(min(1.0, self.weight) / setting.ranks,) * 2,
            step=1 / setting.ranks,
            reduction=1 / setting.ranks,
        )
        return self._question(weights, 0.0, 0.0, proves=False)

    def _note_average(self, setting: Setting) -> None:
        """Store the last answer as that of the average rank."""
        seconds = self.value(self.priced[-1]) + self._average_weight(setting) * self.crossings(setting)
        self._averaged[setting.chunks] = seconds

    def busy_in_a_v(self, setting: Setting) -> float:
        """Least busy seconds per step of the slowest rank, with two stages on each rank in a V. Leaves out transfers
        between stages and everything that may overlap with computation. Infinite if there are too few blocks.

        The slowest rank is at least as slow as the average rank, and as the first one, which has both head and tail and
        holds the weights that they share only once. Every stage has at least one block. With N blocks of one kind, n of
        them on the first rank, some other rank has at least (N - n) / (ranks - 1) of them, rounded up."""
        weight, others = float(setting.micro_batches), setting.ranks - 1
        if 2 * setting.ranks > self.blocks + self.chain.blocks_at_ends:
            return math.inf
        weights = Weights(part=weight / self.parts, steady=weight * (1 - 1 / self.parts), step=1.0, reduction=1.0)
        (found,) = _answers([(self, self._question(weights, 0.0, 0.0, proves=False))])
        head, inner, tail = found.values
        part, step = self.chain.tied
        ends = head + tail - weight * part - step
        fewest = max(0, 1 - self.chain.blocks_in_head) + max(0, 1 - self.chain.blocks_in_tail)
        slowest = (ends + self.whole(inner)) / setting.ranks
        if len(inner) == 1:
            most_of_others = range(-(-(self.blocks - fewest) // others), 1, -1)
            first = (max(fewest, self.blocks - most * others) for most in most_of_others)
            ways = (np.maximum(ends + n * inner[0], m * inner[0]) for n, m in zip(first, most_of_others, strict=True))
            slowest = np.maximum(slowest, functools.reduce(np.minimum, ways))
        elif len(inner):
            slowest = np.maximum(slowest, ends + fewest * inner.min(axis=0))
        return float(slowest.min())

    def _average_weight(self, setting: Setting) -> float:
        return 1 / setting.chunks + setting.weight / setting.ranks

    def crossings(self, setting: Setting) -> Array:
        """Seconds of a micro-batch in transfers between all ranks."""
        if setting.ranks == 1:
            return np.zeros(self.chain.shape)
        if self.chain.crossing.between:
            alone = [self.crossing_seconds(setting, rank) for rank in range(setting.ranks)]
            return sum(alone, np.zeros(self.chain.shape)) / self.parts
        ends = self._crossing_seconds(setting, True, False) + self._crossing_seconds(setting, False, True)
        between = (setting.ranks - 2) * self._crossing_seconds(setting, False, False)
        return np.broadcast_to((ends + between) / self.parts, self.chain.shape)

    def _least_values(self, kinds: Sequence[tuple[Solved, ...]]) -> Array:
        least = [self._own_least(solved) for solved in kinds]
        together = np.stack(np.broadcast_arrays(*least)) if least else np.zeros((0, *self.chain.shape))
        return np.broadcast_to(together, (len(kinds), *self.chain.shape))

    def _least_value(self, solved: tuple[Solved, ...]) -> Array:
        return np.broadcast_to(self._own_least(solved), self.chain.shape)

    def _own_least(self, solved: tuple[Solved, ...]) -> Array:
        """The least values of some pieces, with axes of length one for variables that are not on their boundary. A
        piece may know only few of the many states of a chain."""
        own = [_own(self.chain, one) for one in solved] or [np.zeros((1,) * len(self.chain.shape))]
        return functools.reduce(np.minimum, own)


def first_bounds(members: Sequence[tuple[Multipliers, Setting]]) -> None:
    """Solve the pieces of each member, all together: for the average rank if there are several ranks, else for free
    memory."""
    asked = [
        (multipliers, multipliers._average(setting) if setting.ranks > 1 else multipliers._priced(0.0, 0.0))
        for multipliers, setting in members
    ]
    for (multipliers, setting), priced in zip(members, _answers(asked), strict=True):
        multipliers.priced.append(priced)
        if setting.ranks > 1:
            multipliers._note_average(setting)


def _answers(asked: Sequence[tuple[Multipliers, _Question]]) -> list[Priced]:
    """Solves all questions together."""
    solved = iter(solve([one for _, question in asked for one in question.asked]))
    return [
        multipliers._answer(question, list(itertools.islice(solved, len(question.asked))))
        for multipliers, question in asked
    ]


def _worth(pieces: Sequence[Piece], price: float) -> Sequence[Piece]:
    """The pieces worth solving: where memory is free, recomputation and offload never pay."""
    if price == 0.0 and pieces and not pieces[0].recompute and pieces[0].home == "device":
        return pieces[:1]
    return pieces


def _on_chords(points: Sequence[tuple[float, int]], number: float) -> _Combination:
    """Shares of two neighbouring points, sorted by flights, whose chord meets `number`; the last point alone beyond
    them."""
    behind = next((place for place, (flights, _) in enumerate(points) if flights >= number), len(points) - 1)
    (high, at) = points[behind]
    if not behind or number >= high:
        return ((at, 1.0),)
    low, before = points[behind - 1]
    share = (number - low) / (high - low)
    return ((before, 1 - share), (at, share))


def over(chain: Chain, solved: Solved) -> Array:
    """Values of a piece over all states of the chain's boundary."""
    return np.broadcast_to(_own(chain, solved), chain.shape)


def _picked(values: Array, some: States | None) -> Array:
    """The values of `some` states, or of all if None. Axes in front of those of the boundary stay."""
    return values if some is None else values[(..., *some)]  # type: ignore[arg-type]  # numpy's stubs


def _axes(chain: Chain, solved: Solved) -> list[int]:
    """The axes of the chain's boundary that the boundary of a piece has."""
    return [chain.boundary.index(name) for name in solved.piece.boundary]


def _own(chain: Chain, solved: Solved) -> Array:
    """Values of a piece, with axes of length one for variables that are not on its boundary."""
    shape = [1] * len(chain.boundary)
    for axis, size in zip(_axes(chain, solved), solved.values.shape, strict=True):
        shape[axis] = size
    return solved.values.reshape(shape)
