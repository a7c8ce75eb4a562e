"""Pieces: the graph cut between its repeated blocks; each piece is a small problem of its own.

    head ──l──> inner ──l──> inner ──l──> ... ──l──> tail        l: the boundary, the layouts that every block hands on

A piece has a variable for every operator and every parameter in it. Costs are kept as coefficients, so that one piece
serves every pipeline stage, every number of micro-batches and every price of memory:

    seconds of a step = m part + step                 m micro-batches
    bytes             = fixed + in_flight live        and `replay` bytes of one recomputed block at a time

Blocks of all kinds agree on the candidates at the boundary and choose freely otherwise. An inner block can be run in
three ways: it keeps what autograd needs ("none"); it is recomputed and keeps the results of some operators
("selective"); or it is recomputed and keeps none ("full"). Each operator decides by itself whether to keep its results.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Home
from planner.limits import room
from planner.strategy_search.decomposition.cells import Cells
from planner.strategy_search.request.template import Key
from planner.strategy_search.solvers.elimination.improving import improved
from planner.strategy_search.solvers.elimination.messages import Traced, backtrack, eliminate_together, remainder
from planner.strategy_search.solvers.elimination.order import Schedule

Array = NDArray[np.float64]
_KEPT = 2**26  # bytes of tables and messages up to which problems are solved together, and their tables kept

Passes: TypeAlias = tuple[float, float, float]
"""One number each for the forward and backward pass of a micro-batch, and for the last backward pass of a step."""

NEITHER: Passes = (0.0, 0.0, 0.0)

WAITED = -1.0
"""For the last backward pass: reductions count as exposed. That is a way to find plans; it proves no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The cost of a second per micro-batch, a second per step, and a byte of each kind.

    `steady` is a surcharge on the seconds per micro-batch that do not depend on its size. `excess` and `under` price
    collectives that overlap with the computation of the forward and the backward pass (see `Amounts`). `uncovered`
    prices those at the beginning of the first pass of a step and at the end of the last one. `backward` is what is
    credited for a second of the backward pass, and `reduction` for a second of gradient reductions; reductions are part
    of `step`.
    """

    part: float
    steady: float = 0.0
    excess: tuple[float, float] = (0.0, 0.0)
    under: tuple[float, float] = (0.0, 0.0)
    uncovered: tuple[float, float] = (0.0, 0.0)
    step: float = 0.0
    backward: float = 0.0
    reduction: float = 0.0
    fixed: float = 0.0
    live: float = 0.0
    hosted: float = 0.0
    hosted_live: float = 0.0
    replay: float = 0.0
    transient: float = 0.0  # of the operator with the largest least transient memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What a choice of a piece costs: seconds per micro-batch, seconds per step, and bytes. `transient` is a maximum.

    Per micro-batch, `under` seconds of collectives overlap with the computation of other blocks; they are not in
    `part`. `excess_forward` and `excess_backward` are their seconds minus those of the computation that can overlap
    them, negative where they are covered. `last` is the part of `under` that reduces gradients. Collectives of the head
    have no computation before them in the first forward pass of a step, and none behind them in the last backward pass:
    these seconds are `uncovered_forward` and `uncovered_backward`. `reduction` is the part of `step` that can overlap
    with the last backward pass, and `backward` has the seconds of a backward pass within `part`.
    `hosted` and `hosted_live` are bytes in the memory of the host, kept as `fixed` and `live` are on the device."""

    part: float = 0.0
    step: float = 0.0
    fixed: float = 0.0
    live: float = 0.0
    replay: float = 0.0
    transient: float = 0.0
    under: float = 0.0
    last: float = 0.0
    uncovered_forward: float = 0.0
    uncovered_backward: float = 0.0
    excess_forward: float = 0.0
    excess_backward: float = 0.0
    reduction: float = 0.0
    backward: float = 0.0
    hosted: float = 0.0
    hosted_live: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One choice for a piece: a candidate for every variable, the operators whose results are kept, and the cost; for a
    block also its kind. `home` is where a recomputed block stores its inputs."""

    recompute: bool
    candidates: Mapping[Key, int]
    kept: frozenset[int]
    amounts: Amounts
    kind: int = 0
    home: Home = "device"


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Variables and coefficients of a piece. All cells of all tables stand in one array: first those of the variables
    (nodes), then those of the pairs of variables.

    Attributes:
        boundary: the last variables of `keys`, in the order of the axes of `solve`.
        steady: the part of `part` that does not depend on the size of the micro-batch.
        step, fixed: nodes only, as they have no pairs.
        keeping_part, keeping_live, keeping_replay: the change at a node if an operator of a recomputed block keeps its
            results; zero where it may not.
        under, uncovered, last: as in `Amounts`, the first two per pass. None where no collective overlaps with
            computation.
        covering: seconds of the nodes, per pass, that overlap collectives; `under` beyond them is excess.
        keeping_work: seconds that no longer overlap collectives if results are kept, since they are not recomputed.
        reduction, backward: as in `Amounts`. Whatever keeping results changes at a node is part of the backward pass.
        hosted, hosted_live: as in `Amounts`; None where nothing goes to the host.
        outside: the interior outside of a block in the same piece, before or behind it. Bounds use that of the block
            alone.
    """

    keys: tuple[Key, ...]
    sizes: tuple[int, ...]
    plan: Schedule
    boundary: tuple[Key, ...]
    recompute: bool
    part: Array
    steady: Cells
    step: Array
    fixed: Array
    live: Cells
    replay: Cells
    keeping_part: Array
    keeping_live: Array
    keeping_replay: Array
    transient: tuple[Array, ...]
    kind: int = 0  # for an inner block
    home: Home = "device"  # of the input of a recomputed block
    hosted: Array | None = None
    hosted_live: Cells | None = None
    outside: Cells | None = None
    under: tuple[Cells, Cells] | None = None
    last: Cells | None = None
    covering: tuple[Array, Array] | None = None
    keeping_work: Array | None = None
    reduction: Array | None = None
    backward: Cells | None = None
    uncovered: tuple[Cells, Cells] | None = None  # also None where no operator of the piece stands before the blocks
    always: frozenset[int] = frozenset()  # operators that keep their results under every choice

    @cached_property
    def _starts(self) -> list[int]:
        counts = [*self.sizes, *(self.sizes[a] * self.sizes[b] for a, b in self.plan.pairs)]
        return [0, *np.cumsum(counts).tolist()]

    @cached_property
    def _places(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """The start of each table; for each pair its first variable, its second one, and the candidates of the
        second."""
        pairs = np.array(self.plan.pairs, dtype=np.intp).reshape(-1, 2)
        sizes, starts = np.array(self.sizes, dtype=np.intp), np.array(self._starts[:-1], dtype=np.intp)
        return starts, pairs[:, 0], pairs[:, 1], sizes[pairs[:, 1]]

    @cached_property
    def _transient_of_nodes(self) -> Array:
        """Transient bytes of every node."""
        return np.concatenate(self.transient)

    @cached_property
    def least_transient(self) -> float:
        """Transient bytes that some operator needs under every choice."""
        return max((float(values.min()) for values in self.transient), default=0.0)

    @cached_property
    def least_fixed(self) -> float:
        """Bytes of the parameters that are needed under every choice."""
        return math.fsum(float(self.fixed[self.node_cells(at)].min()) for at in range(len(self.sizes)))

    def on_host(self, flights: float) -> Array:
        """Bytes on the host of every cell, with this many micro-batches in flight."""
        found = np.zeros(self._starts[-1])
        if self.hosted is not None:
            found[: self.nodes] += self.hosted
        if self.hosted_live is not None:
            self.hosted_live.add_to(found, flights)
        return found

    def most_hosted(self, flights: float) -> float:
        """Bytes on the host, at most, if everything is offloaded that may be."""
        cells, pairs = self.on_host(flights), len(self.plan.pairs)
        parts = [*map(self.node_cells, range(len(self.sizes))), *map(self.pair_cells, range(pairs))]
        return math.fsum(float(cells[one].max()) for one in parts)

    @property
    def nodes(self) -> int:
        """The number of cells of nodes."""
        return self.step.size

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the coefficients take."""
        single = (self.part, self.steady, self.step, self.fixed, self.live, self.replay, self.keeping_part,
                  self.keeping_live, self.keeping_replay, self.outside, self.last, self.keeping_work, self.reduction,
                  self.backward, self.hosted, self.hosted_live)  # fmt: skip
        several = (self.transient, self.under or (), self.covering or (), self.uncovered or ())
        return sum(one.nbytes for one in single if one is not None) + sum(
            one.nbytes for each in several for one in each
        )

    def node_cells(self, position: int) -> slice:
        """The cells of a variable."""
        return slice(self._starts[position], self._starts[position + 1])

    def pair_cells(self, place: int) -> slice:
        """The cells of a pair of `plan.pairs`."""
        start = len(self.sizes) + place
        return slice(self._starts[start], self._starts[start + 1])

    def weigh(self, weights: Weights) -> tuple[Array, NDArray[np.bool_]]:
        """The cost of every cell, and the nodes at which keeping an operator's results is cheaper."""
        cost, nodes = weights.part * self.part, self.nodes
        for weight, cells in (
            (weights.steady, self.steady),
            *zip(map(sum, zip(weights.excess, weights.under, strict=True)), self.under or (), strict=False),
            *zip(weights.uncovered, self.uncovered or (), strict=False),
            (weights.live, self.live),
            (weights.replay, self.replay),
        ):
            if weight:
                cells.add_to(cost, weight)
        for weight, work in zip(weights.excess, self.covering or (), strict=False):
            if weight:
                cost[:nodes] -= weight * work
        cost[:nodes] += weights.step * self.step + weights.fixed * self.fixed
        if weights.hosted and self.hosted is not None:
            cost[:nodes] += weights.hosted * self.hosted
        if weights.hosted_live and self.hosted_live is not None:
            self.hosted_live.add_to(cost, weights.hosted_live)
        again = weights.part
        if weights.reduction and self.reduction is not None:
            cost[:nodes] -= weights.reduction * self.reduction
        if weights.backward and self.backward is not None:
            self.backward.add_to(cost, -weights.backward)
            again -= weights.backward
        change = again * self.keeping_part + weights.live * self.keeping_live + weights.replay * self.keeping_replay
        if weights.excess[1] and self.keeping_work is not None:
            change -= weights.excess[1] * self.keeping_work
        keeps = change < 0
        cost[:nodes] += np.minimum(change, 0.0)
        if weights.transient and self.transient:
            position = max(range(len(self.transient)), key=lambda at: float(self.transient[at].min()))
            cost[self.node_cells(position)] += weights.transient * self.transient[position]
        return cost, keeps

    def banned(self, allowed: Mapping[int, NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """A mask of the nodes that are excluded where operators may choose only the `allowed` candidates."""
        found = np.zeros(self.nodes, dtype=np.bool_)
        for key, (start, stop) in zip(self.keys, pairwise(self._starts), strict=False):
            if isinstance(key, int) and key in allowed:
                found[start:stop] = ~allowed[key]
        return found

    def bulky(self, cap: float) -> NDArray[np.bool_]:
        """A mask of the nodes that need more than `cap` transient bytes, but for the least one of each variable."""
        return np.concatenate(
            [(values > cap) & (values > values.min()) for values in self.transient] or [np.zeros(0, dtype=np.bool_)]
        )

    def tables(self, costs: Array) -> list[Array]:
        """The costs of all cells, (problems, cells), as one table per variable, then one per pair."""
        starts, count = self._starts, len(self.sizes)
        tables = [costs[:, starts[i] : starts[i + 1]] for i in range(count)]
        for place, (first, second) in enumerate(self.plan.pairs):
            low, high = starts[count + place], starts[count + place + 1]
            tables.append(costs[:, low:high].reshape(len(costs), self.sizes[first], self.sizes[second]))
        return tables

    def chosen(self, candidates: Mapping[Key, int], kept: Collection[int]) -> Column:
        """A choice that was made elsewhere, as a column."""
        own = {key: candidates[key] for key in self.keys}
        amounts = self.amounts_of(own, kept)
        return Column(
            recompute=self.recompute,
            candidates=own,
            kept=frozenset(kept) | self.always,
            amounts=amounts,
            kind=self.kind,
            home=self.home,
        )

    def amounts_of(self, candidates: Mapping[Key, int], kept: Collection[int]) -> Amounts:
        """The cost of a choice in which the operators of `kept` keep their results."""
        keeps = np.zeros(self.nodes, dtype=np.bool_)
        for position, key in enumerate(self.keys):
            keeps[self.node_cells(position)] = key in kept
        return self.amounts([candidates[key] for key in self.keys], keeps)[0]

    def amounts(self, choice: Sequence[int], keeps: NDArray[np.bool_]) -> tuple[Amounts, frozenset[int]]:
        """The cost of a choice, and the operators that keep their results."""
        starts, rows, columns, width = self._places
        chosen, count = np.array(choice, dtype=np.intp), len(self.sizes)
        nodes = starts[:count] + chosen
        cells = np.concatenate([nodes, starts[count:] + chosen[rows] * width + chosen[columns]])
        keeping = keeps[nodes]
        keeping_at = nodes[keeping]
        kept = frozenset(key for at in np.flatnonzero(keeping).tolist() if isinstance(key := self.keys[at], int))
        under = (0.0, 0.0) if self.under is None else tuple(one.sum_of(cells) for one in self.under)
        work = (0.0, 0.0) if self.covering is None else tuple(float(one[nodes].sum()) for one in self.covering)
        again = 0.0 if self.keeping_work is None else float(self.keeping_work[keeping_at].sum())
        there, back = (0.0, 0.0) if self.uncovered is None else (one.sum_of(cells) for one in self.uncovered)
        keeping_part = float(self.keeping_part[keeping_at].sum())
        found = Amounts(
            part=float(self.part[cells].sum()) + keeping_part,
            step=float(self.step[nodes].sum()),
            fixed=float(self.fixed[nodes].sum()),
            live=self.live.sum_of(cells) + float(self.keeping_live[keeping_at].sum()),
            replay=max(
                self.replay.sum_of(cells) + float(self.keeping_replay[keeping_at].sum()),
                0.0 if self.outside is None else self.outside.sum_of(cells),
            ),
            transient=float(self._transient_of_nodes[nodes].max()) if count else 0.0,
            under=sum(under),
            last=0.0 if self.last is None else self.last.sum_of(cells),
            uncovered_forward=there,
            uncovered_backward=back,
            excess_forward=under[0] - work[0],
            excess_backward=under[1] - work[1] - again,
            reduction=0.0 if self.reduction is None else float(self.reduction[nodes].sum()),
            backward=0.0 if self.backward is None else self.backward.sum_of(cells) + keeping_part,
            hosted=0.0 if self.hosted is None else float(self.hosted[nodes].sum()),
            hosted_live=0.0 if self.hosted_live is None else self.hosted_live.sum_of(cells),
        )
        return found, kept | self.always


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A piece to solve for some weights, with some nodes banned."""

    piece: Piece
    weights: Weights
    banned: NDArray[np.bool_] | None = None

    def costs(self) -> tuple[Array, NDArray[np.bool_]]:
        """The cost of every cell, and the nodes at which results are kept."""
        cost, keeps = self.piece.weigh(self.weights)
        if self.banned is not None:
            cost[: self.piece.nodes][self.banned] = np.inf
        return cost, keeps


@dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """A piece solved for one set of weights.

    `values` has the least cost for every state of the boundary, infinite where everything is banned; a lower bound if
    the schedule of the piece is relaxed. `tables` belong to several problems of the same structure, this one at number
    `place`; None if they are too large to keep."""

    asked: Asked
    tables: list[Array] | None
    place: int
    keeps: NDArray[np.bool_]
    values: Array
    traced: Traced = field(default_factory=dict)

    @property
    def piece(self) -> Piece:
        return self.asked.piece

    def column(self, state: Sequence[int]) -> Column:
        """The cheapest choice at one state of the boundary; a good one if the schedule is relaxed."""
        piece, tables, place = self.piece, self.tables, self.place
        if tables is None:
            tables, place = _eliminated([self.asked.costs()[0]], piece), 0
        choice = backtrack(piece.plan, tables, state, place=place, traced=self.traced)
        if not piece.plan.exact:
            choice = improved(piece.plan, tables, choice, len(state), place=place)
        amounts, kept = piece.amounts(choice, self.keeps)
        return Column(
            recompute=piece.recompute,
            candidates=dict(zip(piece.keys, choice, strict=True)),
            kept=kept,
            amounts=amounts,
            kind=piece.kind,
            home=piece.home,
        )


def solve(asked: Sequence[Asked]) -> list[Solved]:
    """The least costs for every state of the boundary. Pieces of one structure are solved together, up to a limit of
    memory."""
    alike: dict[tuple[int, int], list[int]] = {}
    for at, each in enumerate(asked):
        alike.setdefault((id(each.piece.plan), len(each.piece.boundary)), []).append(at)
    found: dict[int, Solved] = {}
    for members in alike.values():
        first = asked[members[0]].piece
        nbytes = 8 * (first.part.size + first.plan.message_cells)
        together = max(1, int(_KEPT // nbytes)) if nbytes else len(members)
        for start in range(0, len(members), together):
            part = members[start : start + together]
            weighed = [asked[at].costs() for at in part]
            tables = _eliminated([cost for cost, _ in weighed], first)
            rest = len(first.boundary)
            values = remainder(first.plan, tables, rest) if rest else tables[-1]
            kept = tables if nbytes * len(part) <= _KEPT else None
            for place, (at, (_, keeps)) in enumerate(zip(part, weighed, strict=True)):
                found[at] = Solved(asked=asked[at], tables=kept, place=place, keeps=keeps, values=values[place])
    return [found[at] for at in range(len(asked))]


def _eliminated(costs: Sequence[Array], piece: Piece) -> list[Array]:
    """Tables and messages of several problems with the structure of a piece."""
    room(16 * len(costs) * piece.part.size, "the cost tables of a piece")
    together = np.stack(costs) if len(costs) > 1 else costs[0][None]
    return eliminate_together(piece.plan, piece.tables(together), len(piece.boundary))
