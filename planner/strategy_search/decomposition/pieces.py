"""Pieces: the graph cut where the repeated blocks meet, each piece a small problem of its own.

    head ──l──> inner ──l──> inner ──l──> ... ──l──> tail        l: the boundary, a layout that all blocks hand on

A piece has a variable for every operator and every parameter in it. What a choice costs is kept as coefficients, so
that one piece serves every pipeline stage, every number of micro-batches and every price of memory:

    seconds of a step = m part + step                 m micro-batches
    bytes             = fixed + in_flight live        and `replay` bytes of one recomputed block at a time

All blocks, of whatever kind, agree on the candidates at the boundary and are free in everything else. An inner block
can be run in three ways: what autograd needs is kept ("none"), or the block is recomputed, with some operators' results
kept all the same ("selective"), or with none kept ("full"). Which results to keep is decided operator by operator.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Home
from planner.limits import room
from planner.strategy_search.decomposition.block_ranges import BlockRanges, block_ranges_of
from planner.strategy_search.decomposition.cells import Cells
from planner.strategy_search.request.template import Key
from planner.strategy_search.solvers.elimination.improving import improved
from planner.strategy_search.solvers.elimination.messages import Traced, backtrack, eliminate_together, remainder
from planner.strategy_search.solvers.elimination.order import Schedule
from planner.strategy_search.tables.cost_table import CostTables

Array = NDArray[np.float64]
_KEPT = 2**26  # bytes of tables and messages up to which problems are solved together, and their tables kept

Passes: TypeAlias = tuple[float, float, float]
"""Of the forward and of the backward pass of a micro-batch, and of the last backward pass of a step."""

NEITHER: Passes = (0.0, 0.0, 0.0)

WAITED = -1.0
"""For the last backward pass: as if it covered nothing, of which nothing is proved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a second per micro-batch, a second per step and a byte of each kind cost.

    `steady` is a surcharge on seconds per micro-batch that do not depend on its size; `excess` and `under` price
    messages that travel under the work of the forward and of the backward pass (see `Amounts`), `uncovered` those with
    which the first pass of a step begins and the last one ends. What a second less of
    the backward pass saves is `backward`, and of reductions, which are in those per step, `reduction`.
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
    replay: float = 0.0
    transient: float = 0.0  # of the operator that needs most for a moment, whatever is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What a choice of a piece comes to: seconds per micro-batch and per step, bytes; `transient` is the largest. Of a
    micro-batch `under` travels while other blocks run, beside `part`: each `excess` has what it takes in a pass more
    than the work that may cover it, less than nothing where it is covered; `last` is the part of it that reduces
    gradients. What stands before the blocks has nothing before it in the first pass of a step, nor behind it in the
    last: so much of `under` is `uncovered` there. Of `step` so much `reduction` of gradients may travel under the last
    backward pass, whose seconds in `part` are `backward`."""

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One choice for a piece: a candidate for every variable, the operators whose results are kept, what it costs, and
    the kind of block where the piece is one. `home` is where recomputed blocks keep what flows into them."""

    recompute: bool
    candidates: Mapping[Key, int]
    kept: frozenset[int]
    amounts: Amounts
    kind: int = 0
    home: Home = "device"


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Variables and coefficients of a piece, all cells of all tables in a row: nodes first, then pairs of variables.

    `steady` is what of `part` does not depend on the size of the micro-batch. `step` and `fixed` end with the nodes.
    `keeping_*` is what changes at a node where an operator of a recomputed block keeps its results; zero where it may
    not. `under` and `uncovered` are those of `Amounts`, of both passes, and `last` is; None where nothing travels under
    work, as are the seconds of the nodes that may be `covering` it, beyond which there is `excess`, and `keeping_work`:
    what is not run again covers nothing in the backward pass. So are `reduction`, of the nodes, and `backward`; what
    keeping results changes at a node is all of the backward pass.
    `outside`: the interior of what stands before a block that is in it, or behind: bounds have that of the block alone.
    """

    keys: tuple[Key, ...]
    sizes: tuple[int, ...]
    plan: Schedule
    boundary: tuple[Key, ...]  # the last variables of `keys`, in the order of the axes of `solve`
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
    kind: int = 0  # of an inner block
    home: Home = "device"  # of what flows into its recomputed block
    outside: Cells | None = None
    under: tuple[Cells, Cells] | None = None
    last: Cells | None = None
    covering: tuple[Array, Array] | None = None
    keeping_work: Array | None = None
    reduction: Array | None = None
    backward: Cells | None = None
    uncovered: tuple[Cells, Cells] | None = None  # None, too, where nothing of it stands before the blocks
    always: frozenset[int] = frozenset()  # operators that keep their results, whatever is chosen

    @cached_property
    def _starts(self) -> list[int]:
        counts = [*self.sizes, *(self.sizes[a] * self.sizes[b] for a, b in self.plan.pairs)]
        return [0, *np.cumsum(counts).tolist()]

    @cached_property
    def _places(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Where each table begins; and of each pair the first variable, the second, and its candidates."""
        pairs = np.array(self.plan.pairs, dtype=np.intp).reshape(-1, 2)
        sizes, starts = np.array(self.sizes, dtype=np.intp), np.array(self._starts[:-1], dtype=np.intp)
        return starts, pairs[:, 0], pairs[:, 1], sizes[pairs[:, 1]]

    @cached_property
    def least_transient(self) -> float:
        """Bytes that some operator needs for a moment, whatever is chosen."""
        return max((float(values.min()) for values in self.transient), default=0.0)

    @cached_property
    def least_fixed(self) -> float:
        """Bytes of its parameters, whatever is chosen."""
        return math.fsum(float(self.fixed[self.node_cells(at)].min()) for at in range(len(self.sizes)))

    @property
    def nodes(self) -> int:
        """Cells of the nodes."""
        return self.step.size

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its coefficients take."""
        single = (self.part, self.steady, self.step, self.fixed, self.live, self.replay, self.keeping_part,
                  self.keeping_live, self.keeping_replay, self.outside, self.last, self.keeping_work, self.reduction,
                  self.backward)  # fmt: skip
        several = (self.transient, self.under or (), self.covering or (), self.uncovered or ())
        return sum(one.nbytes for one in single if one is not None) + sum(
            one.nbytes for each in several for one in each
        )

    def node_cells(self, position: int) -> slice:
        """Where the node of a variable is."""
        return slice(self._starts[position], self._starts[position + 1])

    def pair_cells(self, place: int) -> slice:
        """Where a pair of `plan.pairs` is."""
        start = len(self.sizes) + place
        return slice(self._starts[start], self._starts[start + 1])

    def weigh(self, weights: Weights) -> tuple[Array, NDArray[np.bool_]]:
        """The cost of every cell, and at which nodes keeping an operator's results is cheaper."""
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
        """The nodes that are ruled out where operators may choose only some of their candidates."""
        found = np.zeros(self.nodes, dtype=np.bool_)
        for position, key in enumerate(self.keys):
            if isinstance(key, int) and key in allowed:
                found[self.node_cells(position)] = ~allowed[key]
        return found

    def bulky(self, cap: float) -> NDArray[np.bool_]:
        """The nodes that need more than so many bytes for a moment; none of a variable that has no others."""
        return np.concatenate(
            [(values > cap) & (values > values.min()) for values in self.transient] or [np.zeros(0, dtype=np.bool_)]
        )

    def tables(self, costs: Array) -> list[Array]:
        """Costs of all cells, (problems, cells), as a table for every variable, then one for every pair."""
        starts, count = self._starts, len(self.sizes)
        tables = [costs[:, starts[i] : starts[i + 1]] for i in range(count)]
        for place, (first, second) in enumerate(self.plan.pairs):
            low, high = starts[count + place], starts[count + place + 1]
            tables.append(costs[:, low:high].reshape(len(costs), self.sizes[first], self.sizes[second]))
        return tables

    def chosen(self, candidates: Mapping[Key, int], kept: Collection[int]) -> Column:
        """A choice, made elsewhere, as a column."""
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
        """What a choice costs in which these operators keep their results."""
        keeps = np.zeros(self.nodes, dtype=np.bool_)
        for position, key in enumerate(self.keys):
            keeps[self.node_cells(position)] = key in kept
        return self.amounts([candidates[key] for key in self.keys], keeps)[0]

    def amounts(self, choice: Sequence[int], keeps: NDArray[np.bool_]) -> tuple[Amounts, frozenset[int]]:
        """What a choice costs, and the operators that keep their results."""
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
            transient=max((float(t[k]) for t, k in zip(self.transient, choice, strict=True)), default=0.0),
            under=sum(under),
            last=0.0 if self.last is None else self.last.sum_of(cells),
            uncovered_forward=there,
            uncovered_backward=back,
            excess_forward=under[0] - work[0],
            excess_backward=under[1] - work[1] - again,
            reduction=0.0 if self.reduction is None else float(self.reduction[nodes].sum()),
            backward=0.0 if self.backward is None else self.backward.sum_of(cells) + keeping_part,
        )
        return found, kept | self.always


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A piece to be solved for some weights, with some nodes banned."""

    piece: Piece
    weights: Weights
    banned: NDArray[np.bool_] | None = None

    def costs(self) -> tuple[Array, NDArray[np.bool_]]:
        """The cost of every cell, and the nodes that keep their results."""
        cost, keeps = self.piece.weigh(self.weights)
        if self.banned is not None:
            cost[: self.piece.nodes][self.banned] = np.inf
        return cost, keeps


@dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """A piece solved for one set of weights: `values` has the least cost for every state of its boundary, infinite
    where all is banned; no more than that where the schedule of the piece is relaxed. `tables` are those of several
    problems of its structure, of which it is number `place`; None where they are too large to be kept."""

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
        """The cheapest choice at one state of the boundary, as far as the schedule can tell."""
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
    """The cheapest choices for every state of the boundary; pieces of one structure are solved together, as many at a
    time as are small together."""
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
    """Tables and messages of problems of the structure of a piece."""
    room(16 * len(costs) * piece.part.size, "the cost tables of a piece")
    together = np.stack(costs) if len(costs) > 1 else costs[0][None]
    return eliminate_together(piece.plan, piece.tables(together), len(piece.boundary))


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """All pieces of a template on one mesh at one micro-batch size.

    `head` and `tail` may hold the first and the last block (`blocks_in_head`, `blocks_in_tail`): where what enters the
    first block, or leaves the last, does not come from the boundary. `head`, `inner` and `tail` have a piece for every
    way to run the blocks in them, `inner` for every kind of block that is left. Without repeated blocks all is in
    `head`, and `inner` and `tail` are empty.
    """

    tables: CostTables
    alias: Mapping[Key, Key]  # operators and parameters that choose as others do
    boundary: tuple[Key, ...]
    shape: tuple[int, ...]  # candidates of each variable of the boundary
    head: tuple[Piece, ...]
    inner: tuple[Piece, ...]
    tail: tuple[Piece, ...]
    blocks_in_head: int
    blocks_in_tail: int
    crossing: "Crossing"
    handed: Array  # bytes of what a block hands on that the next one keeps as it is, of each state
    ending: Array  # bytes that the last block keeps more, or less, than the others, of each state
    tied: tuple[Array, Array]  # seconds per micro-batch and per step that a rank with head and tail is spared
    divided: tuple[str, ...] = ()  # weights that blocks share, of which each block has its part (see `cutting`)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its pieces take."""
        return sum(piece.nbytes for piece in (*self.head, *self.inner, *self.tail))

    @cached_property
    def block_ranges(self) -> BlockRanges:
        """The inner blocks, and what of them a stage may hold."""
        blocks = self.tables.template.blocks
        kinds = blocks.kinds[self.blocks_in_head : blocks.count - self.blocks_in_tail] if self.inner else ()
        order = {kind: number for number, kind in enumerate(dict.fromkeys(piece.kind for piece in self.inner))}
        return block_ranges_of(tuple(order[kind] for kind in kinds))

    @property
    def blocks_at_ends(self) -> int:
        """Blocks in head and tail."""
        return self.blocks_in_head + self.blocks_in_tail

    @property
    def interior_in_head(self) -> bool:
        """Whether the interior of the head is that of a block, or of all there is."""
        return self.blocks_in_head > 0 or not self.inner

    @cached_property
    def least_fixed(self) -> float:
        """Bytes that an inner block keeps of its parameters, however it is run and whichever its kind; none without."""
        return min((piece.least_fixed for piece in self.inner), default=0.0)

    @cached_property
    def travels(self) -> bool:
        """Whether weights or their gradients may travel while other blocks run."""
        return any(cells.any() for piece in self.inner for cells in piece.under or ())

    @cached_property
    def begins(self) -> bool:
        """Whether weights of what stands before the blocks may go together."""
        return any(piece.uncovered is not None for piece in self.head)

    @cached_property
    def reduces(self) -> bool:
        """Whether gradients may be reduced while the last backward pass runs."""
        return any(piece.reduction is not None for piece in (*self.head, *self.inner, *self.tail))

    def shares(self, under: Passes, ranks: int) -> Passes:
        """Shares that count of what travels under work, where anything does. What is left of reductions beyond the last
        backward pass counts without a pipeline alone: there a step has no less than that pass for every micro-batch."""
        forward, backward, last = under
        travels = (forward, backward) if self.travels else (0.0, 0.0)
        return (*travels, max(last, 0.0) if self.reduces and ranks == 1 else 0.0)

    @cached_property
    def kinds(self) -> tuple[tuple[Piece, ...], ...]:
        """The inner pieces by kind, in the order of `block_ranges`."""
        order = dict.fromkeys(piece.kind for piece in self.inner)
        return tuple(tuple(piece for piece in self.inner if piece.kind == kind) for kind in order)


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossing:
    """What crosses from one pipeline stage to the next, of each state of the boundary.

    Bytes received, which a stage keeps: of what the block before hands on, of what is `passing`, as every block reads
    it, and of either what has no gradients, `staying`; seconds per micro-batch to receive them, and for their gradients
    to come back: from the next rank, or all `around`, between the last rank and the first. `between` has the seconds
    there and back from each rank to the next, where links differ from rank to rank; else it is empty.
    """

    nbytes: Array
    passing: Array
    staying: Array
    forward: Array
    backward: Array
    forward_around: Array
    backward_around: Array
    between: tuple[tuple[Array, Array], ...] = ()

    @cached_property
    def along_own_axes(self) -> tuple[Array, ...]:
        """Seconds forward and backward, to the next rank and around, without the axes along which they are the same."""
        return tuple(map(_own_axes, (self.forward, self.backward, self.forward_around, self.backward_around)))


def _own_axes(values: Array) -> Array:
    """Values of every state without the axes along which they are the same."""
    return values[tuple(slice(None) if stride else slice(1) for stride in values.strides)]
