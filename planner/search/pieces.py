"""Pieces: the graph cut where the repeated blocks meet, each piece a small problem of its own.

    head ──l──> inner ──l──> inner ──l──> ... ──l──> tail        l: the boundary, a layout that all blocks hand on

A piece has a variable for every operator and every parameter in it. What a choice costs is kept as coefficients, so
that one piece serves every pipeline stage, every number of micro-batches and every price of memory:

    seconds of a step = m part + step                 m micro-batches
    bytes             = fixed + in_flight live        and `replay` bytes of one recomputed block at a time

All blocks agree on the candidates at the boundary and are free in everything else. An inner block can be run in three
ways: what autograd needs is kept ("none"), or the block is recomputed, with some operators' results kept all the same
("selective"), or with none kept ("full"). Which results to keep is decided operator by operator.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Cluster
from planner.plan.predict import tied_seconds, transfer_seconds
from planner.pricing.keeping import keeping, keeping_fault
from planner.search.cost_table import CostTables, EdgeTable, ParameterTable, UseTable
from planner.search.solvers.elimination.messages import backtrack, eliminate, remainder
from planner.search.solvers.elimination.order import Schedule, schedule
from planner.search.space import Running
from planner.search.template import Share
from planner.sharding.layout import local_fraction
from planner.sharding.rules import rule_of

Array = NDArray[np.float64]
Key = int | str  # position of an operator in the template, or name of a parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a second per micro-batch, a second per step and a byte of each kind cost.

    `steady` is a surcharge on seconds per micro-batch that do not depend on its size.
    """

    part: float
    steady: float = 0.0
    step: float = 0.0
    fixed: float = 0.0
    live: float = 0.0
    replay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What a choice of a piece comes to: seconds per micro-batch and per step, bytes; `transient` is the largest."""

    part: float = 0.0
    step: float = 0.0
    fixed: float = 0.0
    live: float = 0.0
    replay: float = 0.0
    transient: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One choice for a piece: a candidate for every variable, the operators whose results are kept, what it costs."""

    recompute: bool
    candidates: Mapping[Key, int]
    kept: frozenset[int]
    amounts: Amounts


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Variables and coefficients of a piece, all cells of all tables in a row: nodes first, then pairs of variables.

    `steady` is what of `part` does not depend on the size of the micro-batch. `step` and `fixed` end with the nodes.
    `keeping_*` is what changes at a node where an operator of a recomputed block keeps its results; zero where it may
    not.
    """

    keys: tuple[Key, ...]
    sizes: tuple[int, ...]
    plan: Schedule
    boundary: tuple[Key, ...]  # the last variables of `keys`, in the order of the axes of `solve`
    recompute: bool
    part: Array
    steady: Array
    step: Array
    fixed: Array
    live: Array
    replay: Array
    keeping_part: Array
    keeping_live: Array
    keeping_replay: Array
    transient: tuple[Array, ...]

    @cached_property
    def _starts(self) -> list[int]:
        counts = [*self.sizes, *(self.sizes[a] * self.sizes[b] for a, b in self.plan.pairs)]
        return [0, *np.cumsum(counts).tolist()]

    @cached_property
    def least_transient(self) -> float:
        """Bytes that some operator needs for a moment, whatever is chosen."""
        return max((float(values.min()) for values in self.transient), default=0.0)

    @property
    def nodes(self) -> int:
        """Cells of the nodes."""
        return self.step.size

    def node_cells(self, position: int) -> slice:
        """Where the node of a variable is."""
        return slice(self._starts[position], self._starts[position + 1])

    def pair_cells(self, place: int) -> slice:
        """Where a pair of `plan.pairs` is."""
        start = len(self.sizes) + place
        return slice(self._starts[start], self._starts[start + 1])

    def weigh(self, weights: Weights) -> tuple[Array, NDArray[np.bool_]]:
        """The cost of every cell, and at which nodes keeping an operator's results is cheaper."""
        cost = weights.part * self.part
        if weights.steady:
            cost += weights.steady * self.steady
        if weights.live:
            cost += weights.live * self.live
        if weights.replay:
            cost += weights.replay * self.replay
        nodes = self.nodes
        cost[:nodes] += weights.step * self.step + weights.fixed * self.fixed
        change = (
            weights.part * self.keeping_part + weights.live * self.keeping_live + weights.replay * self.keeping_replay
        )
        keeps = change < 0
        cost[:nodes] += np.minimum(change, 0.0)
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

    def solve(self, weights: Weights, banned: NDArray[np.bool_] | None = None) -> "Solved":
        """The cheapest choice for every state of the boundary, infinite where all are banned."""
        cost, keeps = self.weigh(weights)
        if banned is not None:
            cost[: self.nodes][banned] = np.inf
        starts, count = self._starts, len(self.sizes)
        tables = [cost[starts[i] : starts[i + 1]] for i in range(count)]
        for place, (first, second) in enumerate(self.plan.pairs):
            low, high = starts[count + place], starts[count + place + 1]
            tables.append(cost[low:high].reshape(self.sizes[first], self.sizes[second]))
        rest = len(self.boundary)
        tables = eliminate(self.plan, tables, rest)
        values = remainder(self.plan, tables, rest) if rest else np.asarray(tables[-1])
        return Solved(piece=self, tables=tables, keeps=keeps, values=values)

    def chosen(self, candidates: Mapping[Key, int], kept: Collection[int]) -> Column:
        """A choice, made elsewhere, as a column."""
        own = {key: candidates[key] for key in self.keys}
        amounts = self.amounts_of(own, kept)
        return Column(recompute=self.recompute, candidates=own, kept=frozenset(kept), amounts=amounts)

    def amounts_of(self, candidates: Mapping[Key, int], kept: Collection[int]) -> Amounts:
        """What a choice costs in which these operators keep their results."""
        keeps = np.zeros(self.nodes, dtype=np.bool_)
        for position, key in enumerate(self.keys):
            keeps[self.node_cells(position)] = key in kept
        return self.amounts([candidates[key] for key in self.keys], keeps)[0]

    def amounts(self, choice: Sequence[int], keeps: NDArray[np.bool_]) -> tuple[Amounts, frozenset[int]]:
        """What a choice costs, and the operators that keep their results."""
        starts, count = self._starts, len(self.sizes)
        nodes = np.array([starts[i] + k for i, k in enumerate(choice)], dtype=np.intp)
        pairs = np.array(
            [
                starts[count + place] + choice[a] * self.sizes[b] + choice[b]
                for place, (a, b) in enumerate(self.plan.pairs)
            ],
            dtype=np.intp,
        )
        cells = np.concatenate([nodes, pairs])
        keeping_at = nodes[keeps[nodes]]
        keeping = zip(self.keys, keeps[nodes].tolist(), strict=True)
        kept = frozenset(key for key, keep in keeping if keep and isinstance(key, int))
        found = Amounts(
            part=float(self.part[cells].sum() + self.keeping_part[keeping_at].sum()),
            step=float(self.step[nodes].sum()),
            fixed=float(self.fixed[nodes].sum()),
            live=float(self.live[cells].sum() + self.keeping_live[keeping_at].sum()),
            replay=float(self.replay[cells].sum() + self.keeping_replay[keeping_at].sum()),
            transient=max((float(t[k]) for t, k in zip(self.transient, choice, strict=True)), default=0.0),
        )
        return found, kept


@dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """A piece solved for one set of weights: `values` has the least cost for every state of its boundary."""

    piece: Piece
    tables: list[Array]
    keeps: NDArray[np.bool_]
    values: Array

    def column(self, state: Sequence[int]) -> Column:
        """The cheapest choice at one state of the boundary."""
        piece = self.piece
        choice = backtrack(piece.plan, self.tables, state)
        amounts, kept = piece.amounts(choice, self.keeps)
        return Column(
            recompute=piece.recompute,
            candidates=dict(zip(piece.keys, choice, strict=True)),
            kept=kept,
            amounts=amounts,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """All pieces of a template on one mesh at one micro-batch size.

    `head` and `tail` may hold the first and the last block (`blocks_in_head`, `blocks_in_tail`): where what enters the
    first block, or leaves the last, does not come from the boundary. `head`, `inner` and `tail` have a piece for every
    way to run the blocks in them. Without repeated blocks all is in `head`, and `inner` and `tail` are empty.
    """

    tables: CostTables
    alias: Mapping[int, int]  # operators before the blocks that choose as one at the boundary does
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossing:
    """What crosses from one pipeline stage to the next, of each state of the boundary.

    Bytes received, which a stage keeps; seconds per micro-batch to receive them, and for their gradients to come back:
    from the next rank, or all `around`, between the last rank and the first.
    """

    nbytes: Array
    forward: Array
    backward: Array
    forward_around: Array
    backward_around: Array


def cut(
    tables: CostTables,
    cluster: Cluster,
    *,
    recomputation: Collection[Running],
    stages: int,
    free: Collection[int] = (),
) -> Chain:
    """Cut a template into pieces, with blocks run in the given ways.

    `stages` is the number of pipeline ranks: a parameter of the first and of the last is priced in both. Operators in
    `free` and their edges cost nothing: what comes out is a bound on templates in which only these differ.
    """
    return _Cutter(
        tables=tables, cluster=cluster, recomputation=recomputation, stages=stages, free=frozenset(free)
    ).cut()


@dataclass(kw_only=True)
class _Cutter:
    tables: CostTables
    cluster: Cluster
    recomputation: Collection[Running]
    stages: int
    free: frozenset[int]

    def cut(self) -> Chain:
        template = self.tables.template
        blocks = template.blocks
        if not blocks.count:
            return self._whole()
        low, high = blocks.start, blocks.start + blocks.period
        before, block, after = range(low), range(low, high), range(high, len(self.tables.operators))
        makers = sorted({edge.producer for edge in template.edges if edge.kind == "loop"})
        self.alias = self._aliases(makers)
        into_head = self.alias is None
        into_tail = any(edge.kind == "leave" and edge.producer not in makers for edge in template.edges)
        self.boundary = self._boundary(makers)
        first = (*before, *block) if into_head else tuple(before)
        final = (*block, *after) if into_tail else tuple(after)
        ways = self._ways()
        head = [self._piece(first, Share(blocks=int(into_head), first=True, last=False), way) for way in ways]
        inner = [self._piece(tuple(block), Share(blocks=1, first=False, last=False), way) for way in ways]
        tail = [self._piece(final, Share(blocks=int(into_tail), first=False, last=True), way) for way in ways]
        return Chain(
            tables=self.tables,
            alias=self.alias or {},
            boundary=self.boundary,
            shape=tuple(self._size(key) for key in self.boundary),
            head=tuple(head if into_head else head[:1]),
            inner=tuple(inner),
            tail=tuple(tail if into_tail else tail[:1]),
            blocks_in_head=int(into_head),
            blocks_in_tail=int(into_tail),
            crossing=self._crossing(),
            handed=self._handed(),
            ending=self._ending(),
        )

    def _whole(self) -> Chain:
        self.alias, self.boundary = None, ()
        everything = self._piece(
            tuple(range(len(self.tables.operators))), Share(blocks=0, first=True, last=True), "none", whole=True
        )
        nothing = np.zeros(())
        return Chain(
            tables=self.tables,
            alias={},
            boundary=(),
            shape=(),
            head=(everything,),
            inner=(),
            tail=(),
            blocks_in_head=0,
            blocks_in_tail=0,
            crossing=Crossing(
                nbytes=nothing, forward=nothing, backward=nothing, forward_around=nothing, backward_around=nothing
            ),
            handed=nothing,
            ending=nothing,
        )

    def _ways(self) -> list[Running]:
        """Ways to run a block that need a piece of their own: keeping nothing is a choice of a "selective" piece."""
        ways: list[Running] = ["none"] if "none" in self.recomputation else []
        if "selective" in self.recomputation:
            ways.append("selective")
        elif "full" in self.recomputation:
            ways.append("full")
        return ways

    def _aliases(self, makers: Sequence[int]) -> dict[int, int] | None:
        """Makers before the blocks that may stand for the makers at the boundary; None where the first block differs.

        They may where every block, the first too, pays the same for what it reads.
        """
        entering = {(t.edge.consumer, t.edge.operand): t for t in self.tables.edges if t.edge.kind == "enter"}
        looping = {(t.edge.consumer, t.edge.operand): t for t in self.tables.edges if t.edge.kind == "loop"}
        every = {t.edge.producer for t in self.tables.edges if t.edge.kind == "every"}
        alias: dict[int, int] = {}
        if entering.keys() != looping.keys():
            return None
        for place, enter in entering.items():
            loop = looping[place]
            twin = alias.setdefault(enter.edge.producer, loop.edge.producer)
            one, other = (self.tables.result_bytes[table.edge.name] for table in (enter, loop))
            equal = twin == loop.edge.producer and np.array_equal(one, other) and _same_edge(enter, loop)
            if not equal or enter.edge.producer in every:
                return None
        return alias if len(set(alias.values())) == len(alias) and set(alias.values()) == set(makers) else None

    def _boundary(self, makers: Sequence[int]) -> tuple[Key, ...]:
        """Operators and parameters that more than one piece reads."""
        template = self.tables.template
        low, high = template.blocks.start, template.blocks.start + template.blocks.period
        outside = {
            e.producer
            for e in template.edges
            if e.kind == "every" or (e.kind == "outside" and e.producer < low and e.consumer >= high)
        }
        shared = []
        for parameter in self.tables.parameters:
            places = {0 if use.consumer < low else 2 if use.consumer >= high else 1 for use in parameter.uses}
            common = 1 in places and parameter.name not in template.own_parameters
            if len(places) > 1 or common:
                shared.append(parameter.name)
        return (*makers, *sorted(outside - set(makers)), *shared)

    def _size(self, key: Key) -> int:
        if isinstance(key, int):
            return len(self.tables.operators[key].candidates.strategies)
        return len(self._parameter(key).stored)

    def _parameter(self, name: str) -> ParameterTable:
        return next(table for table in self.tables.parameters if table.name == name)

    def _piece(self, operators: tuple[int, ...], share: Share, way: Running, *, whole: bool = False) -> Piece:
        maker = _PieceMaker(cutter=self, operators=operators, share=share, way=way, whole=whole)
        return maker.make()

    def counted(self, name: str, share: Share, used: bool) -> bool:
        """Whether a parameter is priced in a piece: once in all where one stage holds everything."""
        if name not in self.boundary:
            return used
        template = self.tables.template
        if self.stages == 1:
            return share.first
        low, high = template.blocks.start, template.blocks.start + template.blocks.period
        uses = [use.consumer for use in self._parameter(name).uses]
        return (share.first and any(at < low for at in uses)) or (share.last and any(at >= high for at in uses))

    def tied(self, parameter: ParameterTable) -> Array:
        """Seconds to sum the gradient of a parameter that the first and the last stage both hold."""
        template = self.tables.template
        trainable = parameter.name in template.graph.differentiable
        if self.stages < 2 or parameter.name not in self.boundary or not trainable:
            return np.zeros(len(parameter.stored))
        numel = template.graph.types[parameter.name].numel
        mesh, distance = self.tables.mesh, self.stages - 1
        nbytes = [4.0 * numel * local_fraction(stored.state, mesh.sizes) for stored in parameter.stored]
        return np.array([tied_seconds(n, distance, mesh.size, self.cluster) for n in nbytes])

    def _crossing(self) -> Crossing:
        graph = self.tables.template.graph
        nbytes, *seconds = (np.zeros([self._size(key) for key in self.boundary]) for _ in range(5))
        for name in self.tables.template.carried if self.stages > 1 else ():
            sizes = self._spread(graph.producer[name], self.tables.result_bytes[name])
            nbytes = nbytes + sizes
            for place, distance in enumerate((1, self.stages - 1)):
                stride = distance * self.tables.mesh.size
                known = {n: transfer_seconds(n, stride, self.cluster) for n in np.unique(sizes).tolist()}
                one = np.vectorize(known.__getitem__, otypes=[float])(sizes)
                seconds[place] = seconds[place] + one
                seconds[2 + place] = seconds[2 + place] + (one if name in graph.differentiable else 0.0)
        forward, forward_around, backward, backward_around = seconds
        return Crossing(
            nbytes=nbytes,
            forward=forward,
            backward=backward,
            forward_around=forward_around,
            backward_around=backward_around,
        )

    def _handed(self) -> Array:
        template = self.tables.template
        found = np.zeros([self._size(key) for key in self.boundary])
        for name in template.carried:
            if name in template.alive.kept or name in template.kept_for_next:
                found = found + self._spread(template.graph.producer[name], self.tables.result_bytes[name])
        return found

    def _ending(self) -> Array:
        template = self.tables.template
        found = np.zeros([self._size(key) for key in self.boundary])
        for name in template.carried:
            sign = int(name in template.kept_for_rest) - int(name in template.kept_for_next)
            if sign:
                found = found + sign * self._spread(template.graph.producer[name], self.tables.result_bytes[name])
        return found

    def _spread(self, maker: int, values: Array) -> Array:
        """Values of a maker's candidates over the axes of the boundary."""
        shape = [1] * len(self.boundary)
        shape[self.boundary.index(maker)] = values.size
        return np.broadcast_to(values.reshape(shape), [self._size(key) for key in self.boundary])


def _same_edge(one: EdgeTable, other: EdgeTable) -> bool:
    return all(np.array_equal(getattr(one, field), getattr(other, field)) for field in ("forward", "backward", "kept"))


@dataclass(kw_only=True)
class _PieceMaker:
    """Adds up the coefficients of one piece."""

    cutter: _Cutter
    operators: tuple[int, ...]
    share: Share
    way: Running
    whole: bool

    def make(self) -> Piece:
        self.tables = self.cutter.tables
        self.template = self.tables.template
        self.alias = self.cutter.alias or {}
        inside = set(self.operators)
        edges = [table for table in self.tables.edges if self._counts(table, inside)]
        uses = [(p, [use for use in p.uses if use.consumer in inside]) for p in self.tables.parameters]
        uses = [(p, found) for p, found in uses if found or self.cutter.counted(p.name, self.share, False)]
        keys = self._keys(edges, [parameter.name for parameter, _ in uses])
        self.place = {key: position for position, key in enumerate(keys)}
        sizes = tuple(self.cutter._size(key) for key in keys)
        self.columns: dict[str, list[Array]] = {
            name: [np.zeros(size) for size in sizes]
            for name in (
                "part",
                "steady",
                "step",
                "fixed",
                "live",
                "replay",
                "k_part",
                "k_live",
                "k_replay",
                "transient",
            )
        }
        self.pairs: dict[tuple[int, int], dict[str, Array]] = {}
        for index in self.operators:
            if index not in self.cutter.free:
                self._operator(index)
        self._checkpoints(inside)
        for table in edges:
            if not self.cutter.free & {table.edge.producer, table.edge.consumer}:
                self._edge(table)
        for parameter, found in uses:
            self._parameter(parameter, bool(found))
            for use in found:
                if use.consumer not in self.cutter.free:
                    self._use(use, parameter.name)
        return self._assembled(keys, sizes)

    def _counts(self, table: EdgeTable, inside: set[int]) -> bool:
        kind, edge = table.edge.kind, table.edge
        if edge.consumer not in inside:
            return False
        if self.whole or kind in ("outside", "inside", "every", "leave"):
            return True
        held = self.share.first and self.share.blocks
        return bool(held) if kind == "enter" else not held

    def _keys(self, edges: Sequence[EdgeTable], parameters: Sequence[str]) -> list[Key]:
        """Variables of the piece, those of the boundary last."""
        named: list[Key] = [self._key(index) for index in self.operators]
        named += [self._key(table.edge.producer) for table in edges]
        named += parameters
        used = dict.fromkeys(named)
        boundary = [key for key in self.cutter.boundary if key in used]
        return [key for key in used if key not in boundary] + boundary

    def _key(self, index: int) -> int:
        return self.alias.get(index, index)

    def _again(self, index: int) -> bool:
        return self.way != "none" and self.template.in_block(index)

    def _moves(self, index: int) -> bool:
        return self._again(index) and index - self.template.blocks.start < self.template.replay.moves

    def _add(self, key: Key, **amounts: Array) -> None:
        at = self.place[key]
        for name, values in amounts.items():
            self.columns[name][at] = self.columns[name][at] + values

    def _operator(self, index: int) -> None:
        table, key = self.tables.operators[index], self._key(index)
        prices = table.prices
        again = self._again(index)
        works = again and index - self.template.blocks.start < self.template.replay.works
        forward = prices.forward + prices.inner_forward
        self._add(key, part=forward * (2 if works else 1) + prices.backward + prices.inner_backward)
        self._add(key, **{"replay" if again else "live": table.kept})
        at = self.place[key]
        self.columns["transient"][at] = np.maximum(self.columns["transient"][at], table.transient)
        if works and self.way == "selective":
            graph = self.template.graph
            op = graph.operators[index]
            if keeping_fault(rule_of(graph, op)) is None and prices.forward.any():
                results = [name for name in op.results if name is not None]
                own = [place for place, name in enumerate(results) if name in self.template.alive.kept]
                change = keeping(prices, works, own)
                self._add(key, k_part=-change.seconds, k_live=change.kept, k_replay=-change.interior)
        for name in self.template.graph.operators[index].results:
            if name is not None and name in self.template.kept_for_next and self.template.in_block(index):
                self._add(key, **{"replay" if again else "live": self.tables.result_bytes[name]})

    def _checkpoints(self, inside: set[int]) -> None:
        """A recomputed block keeps what flows into it."""
        if self.way == "none" or not any(self.template.in_block(index) for index in inside):
            return
        held = bool(self.share.first and self.share.blocks)
        seen = set()
        for table in self.tables.edges:
            edge = table.edge
            flows = edge.kind == "every" or edge.kind == ("enter" if held else "loop")
            if flows and edge.name not in seen and edge.name in self.template.graph.differentiable:
                seen.add(edge.name)
                self._add(self._key(edge.producer), live=self.tables.result_bytes[edge.name])

    def _edge(self, table: EdgeTable) -> None:
        edge = table.edge
        part = table.forward * (2 if self._moves(edge.consumer) else 1) + table.backward
        where = "replay" if self._again(edge.consumer) else "live"
        self._join(self._key(edge.producer), self._key(edge.consumer), part, where, table.kept)

    def _use(self, use: UseTable, name: str) -> None:
        """The weight is gathered once more where the backward pass needs it, or the block is recomputed; a recomputed
        block keeps what it has gathered until its backward pass is done."""
        again = self._again(use.consumer)
        twice = self._moves(use.consumer) if again else use.needed
        part = use.gather * (2 if twice else 1) + use.reduce
        kept = use.gathered if again and use.needed else np.zeros_like(part)
        self._join(name, self._key(use.consumer), part, "replay", kept, steady=True)

    def _join(self, one: Key, other: Key, part: Array, where: str, kept: Array, *, steady: bool = False) -> None:
        first, second = self.place[one], self.place[other]
        if first == second:  # reads its own result of the block before
            self._add(one, part=np.diagonal(part), **{where: np.diagonal(kept)})
            return
        if first > second:
            first, second, part, kept = second, first, part.T, kept.T
        known = self.pairs.setdefault((first, second), {})
        for name, values in (("part", part), (where, kept), *((("steady", part),) if steady else ())):
            known[name] = known[name] + values if name in known else values

    def _parameter(self, parameter: ParameterTable, used: bool) -> None:
        if not self.cutter.counted(parameter.name, self.share, used):
            return
        prices = parameter.prices
        self._add(
            parameter.name,
            part=prices.accumulation,
            steady=prices.accumulation,
            step=prices.synchronisation + prices.update + prices.gather + self.cutter.tied(parameter),
            fixed=prices.weight + prices.gradient + prices.state,
        )

    def _assembled(self, keys: list[Key], sizes: tuple[int, ...]) -> Piece:
        boundary = tuple(key for key in self.cutter.boundary if key in self.place)
        count = len(keys)
        plan = schedule(sizes, tuple(self.pairs), tuple(range(count - len(boundary), count)))
        order = [(pair, flip) for (pair, flip) in plan.edge_pairs]
        flat: dict[str, list[Array]] = {name: list(self.columns[name]) for name in ("part", "steady", "live", "replay")}
        turned: list[tuple[int, dict[str, Array], bool]] = [
            (pair, tables, flip) for tables, (pair, flip) in zip(self.pairs.values(), order, strict=True)
        ]
        for _, tables, flip in sorted(turned, key=lambda item: item[0]):
            shape = tables["part"].shape
            for name, rows in flat.items():
                values = tables.get(name)
                if values is None:
                    rows.append(np.zeros(shape[0] * shape[1]))
                else:
                    rows.append((values.T if flip else values).ravel())
        joined = {name: np.concatenate(rows) if rows else np.zeros(0) for name, rows in flat.items()}
        nodes = {
            name: np.concatenate(self.columns[name]) if sizes else np.zeros(0)
            for name in ("step", "fixed", "k_part", "k_live", "k_replay")
        }
        return Piece(
            keys=tuple(keys),
            sizes=sizes,
            plan=plan,
            boundary=boundary,
            recompute=self.way != "none",
            part=joined["part"],
            steady=joined["steady"],
            step=nodes["step"],
            fixed=nodes["fixed"],
            live=joined["live"],
            replay=joined["replay"],
            keeping_part=nodes["k_part"],
            keeping_live=nodes["k_live"],
            keeping_replay=nodes["k_replay"],
            transient=tuple(self.columns["transient"]),
        )
