"""The template cut into pieces: every price of the cost tables in its place.

    head     what stands before the blocks (and the first block, where what enters it does not come from the boundary)
    inner    one block that stands for all of its kind
    tail     what stands after them (and the last block, where what leaves it does not come from the boundary)

Which operators and edges a piece has, how often they count, and whether their bytes live for every micro-batch in
flight or for one recomputed block, is decided here and nowhere else; the judge (planner.plan.prediction.predict) says
the same in another way, operator by operator.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels import away_seconds, offloaded_bytes
from hardware_profiles import Cluster, Group, Home, Machine, MixedCluster, links_of_ranks
from planner.limits import check, room
from planner.plan.prediction.stage_cost import tied_seconds, transfer_seconds
from planner.pricing.keeping import keeping, keeping_fault
from planner.pricing.parameter_price import gathered_at_once, summed
from planner.sharding.layout import local_fraction
from planner.sharding.rules import rule_of
from planner.strategy_search.decomposition.pieces import Chain, Crossing, Key, Piece
from planner.strategy_search.request.space import Running
from planner.strategy_search.request.template import Share
from planner.strategy_search.solvers.elimination.order import EXACT, schedule
from planner.strategy_search.tables.cost_table import CostTables, EdgeTable, ParameterTable, UseTable

Array = NDArray[np.float64]

_STATE_TABLES = 16  # numbers that are kept for every state of the boundary, about


def cut(
    tables: CostTables,
    cluster: Cluster,
    *,
    recomputation: Collection[Running],
    stages: int,
    free: Collection[int] = (),
    activations: Sequence[Home] = ("device",),
    saved: Sequence[Home] = ("device",),
    machine: Machine | None = None,
) -> Chain:
    """Cut a template into pieces, with blocks run in the given ways, by the prices of a cluster, which may be one group
    of a `machine`.

    `stages` is the number of pipeline ranks: a parameter of the first and of the last is priced in both. Operators in
    `free` and their edges cost nothing: what comes out is a bound on templates in which only these differ.
    `activations` are homes of what flows into recomputed blocks, `saved` of what other blocks save.
    """
    return _Cutter(
        tables=tables,
        cluster=cluster,
        machine=cluster if machine is None else machine,
        recomputation=recomputation,
        stages=stages,
        free=frozenset(free),
        activations=tuple(activations),
        saved=tuple(saved),
    ).cut()


@dataclass(kw_only=True)
class _Cutter:
    tables: CostTables
    cluster: Cluster
    machine: Machine
    recomputation: Collection[Running]
    stages: int
    free: frozenset[int]
    activations: tuple[Home, ...]
    saved: tuple[Home, ...]

    def cut(self) -> Chain:
        template = self.tables.template
        blocks = template.blocks
        if not blocks.count:
            return self._whole()
        before, after = range(template.start), range(template.stop, len(self.tables.operators))
        makers = template.makers
        entering = self._aliases(makers)
        into_head = entering is None
        self.alias = {**template.twins, **(entering or {})}
        into_tail = any(
            e.kind == "leave" and self.alias.get(e.producer, e.producer) not in makers for e in template.edges
        )
        self.boundary = self._boundary(makers)
        states = math.prod(self._size(key) for key in self.boundary)
        room(_STATE_TABLES * states * 8, "the states of the boundary between blocks")
        first = (*before, *template.held[blocks.kinds[0]]) if into_head else tuple(before)
        final = (*template.held[blocks.kinds[-1]], *after) if into_tail else tuple(after)
        ways = self._ways()
        head = [self._piece(first, Share(blocks=int(into_head), first=True, last=False), *way) for way in ways]
        tail = [self._piece(final, Share(blocks=int(into_tail), first=False, last=True), *way) for way in ways]
        inner = [
            replace(self._piece(tuple(template.held[kind]), Share(blocks=1, first=False, last=False), *way), kind=kind)
            for kind in dict.fromkeys(blocks.kinds[int(into_head) : blocks.count - int(into_tail)])
            for way in ways
        ]
        return Chain(
            tables=self.tables,
            alias=self.alias,
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
        self.alias, self.boundary = {}, ()
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

    def _ways(self) -> list[tuple[Running, Home]]:
        """Ways to run a block that need a piece of their own: keeping nothing is a choice of a "selective" piece. What
        flows into a recomputed one may be offloaded, and what another one saves."""
        ways: list[tuple[Running, Home]] = []
        if "none" in self.recomputation:
            ways += [("none", home) for home in self.saved]
        homes: tuple[Home, ...] = self.activations if self._offloads() else ("device",)
        if "selective" in self.recomputation:
            ways += [("selective", home) for home in homes]
        elif "full" in self.recomputation:
            ways += [("full", home) for home in homes]
        return ways

    def _offloads(self) -> bool:
        """Whether nothing but blocks reads what flows into them, as `planner.plan.layout.activation_offload` wants
        it."""
        entering = {table.edge.name for table in self.tables.edges if table.edge.kind == "enter"}
        return not any(table.edge.kind == "outside" and table.edge.name in entering for table in self.tables.edges)

    def _aliases(self, makers: Sequence[int]) -> dict[int, int] | None:
        """Makers before the blocks that may stand for the makers at the boundary; None where the first block differs.

        They may where every block, the first too, pays the same for what it reads.
        """
        entering = {(t.edge.consumer, t.edge.operand): t for t in self.tables.edges if t.edge.kind == "enter"}
        first = self.tables.template.held[0]
        looping = {
            (t.edge.consumer, t.edge.operand): t
            for t in self.tables.edges
            if t.edge.kind == "loop" and t.edge.consumer in first
        }
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
        low, high = template.start, template.stop
        outside = {
            e.producer
            for e in template.edges
            if e.kind == "every" or (e.kind == "outside" and e.producer < low and e.consumer >= high)
        }
        shared = []
        for parameter in self.tables.parameters:
            places = {0 if use.consumer < low else 2 if use.consumer >= high else 1 for use in parameter.uses}
            common = 1 in places and parameter.name not in template.every_own_parameter
            if len(places) > 1 or common:
                shared.append(parameter.name)
        return (*makers, *sorted(outside - set(makers)), *shared)

    def _size(self, key: Key) -> int:
        if isinstance(key, int):
            return len(self.tables.operators[key].candidates.strategies)
        return len(self._parameter(key).stored)

    def _parameter(self, name: str) -> ParameterTable:
        return next(table for table in self.tables.parameters if table.name == name)

    def _piece(
        self, operators: tuple[int, ...], share: Share, way: Running, home: Home = "device", *, whole: bool = False
    ) -> Piece:
        maker = _PieceMaker(cutter=self, operators=operators, share=share, way=way, home=home, whole=whole)
        return maker.make()

    def counted(self, name: str, share: Share, used: bool) -> bool:
        """Whether a parameter is priced in a piece: once in all where one stage holds everything."""
        if name not in self.boundary:
            return used
        template = self.tables.template
        if self.stages == 1:
            return share.first
        low, high = template.start, template.stop
        uses = [use.consumer for use in self._parameter(name).uses]
        return (share.first and any(at < low for at in uses)) or (share.last and any(at >= high for at in uses))

    def tied(self, parameter: ParameterTable) -> Array:
        """Seconds to sum the gradient of a parameter that the first and the last stage both hold."""
        template = self.tables.template
        trainable = parameter.name in template.graph.differentiable
        local = self.tables.update.is_local(parameter.name)
        if self.stages < 2 or parameter.name not in self.boundary or not trainable or local:
            return np.zeros(len(parameter.stored))
        whole = summed(template.graph.types[parameter.name], self.tables.update).nbytes
        links = self._links(0, self.stages - 1)
        sizes = self.tables.mesh.sizes
        nbytes = [whole * local_fraction(stored.state, sizes) for stored in parameter.stored]
        return np.array([tied_seconds(n, links) for n in nbytes])

    def _links(self, one: int, other: int) -> tuple[Group, ...]:
        """The links between two pipeline ranks."""
        return links_of_ranks(self.machine, one, other, self.stages, self.tables.mesh.size)

    def _crossing(self) -> Crossing:
        template = self.tables.template
        nbytes = np.zeros([self._size(key) for key in self.boundary])
        if self.stages == 1:
            return Crossing(
                nbytes=nbytes, forward=nbytes, backward=nbytes, forward_around=nbytes, backward_around=nbytes
            )
        for name in (*template.carried, *template.passing):
            nbytes = nbytes + self._spread(template.graph.producer[name], self.tables.result_bytes[name])
        (forward, backward), (forward_around, backward_around) = (
            self._over(self._links(*ranks)) for ranks in ((0, 1), (0, self.stages - 1))
        )
        known: dict[tuple[Group, ...], tuple[Array, Array]] = {}
        between = []
        for rank in range(self.stages - 1) if isinstance(self.machine, MixedCluster) else ():
            links = self._links(rank, rank + 1)
            if links not in known:
                known[links] = self._over(links)
            between.append(known[links])
        return Crossing(
            nbytes=nbytes,
            forward=forward,
            backward=backward,
            forward_around=forward_around,
            backward_around=backward_around,
            between=tuple(between),
        )

    def _over(self, links: tuple[Group, ...]) -> tuple[Array, Array]:
        """Seconds in which what crosses passes over some links, and its gradients, of each state of the boundary."""
        graph, template = self.tables.template.graph, self.tables.template
        forward = backward = np.zeros([self._size(key) for key in self.boundary])
        for name in (*template.carried, *template.passing):
            sizes = self._spread(graph.producer[name], self.tables.result_bytes[name])
            known = {n: transfer_seconds(n, links) for n in np.unique(sizes).tolist()}
            one = np.vectorize(known.__getitem__, otypes=[float])(sizes)
            forward = forward + one
            backward = backward + (one if name in graph.differentiable else 0.0)
        return forward, backward

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
    fields = ("forward", "backward", "kept", "own")
    return all(np.array_equal(getattr(one, field), getattr(other, field)) for field in fields)


@dataclass(kw_only=True)
class _PieceMaker:
    """Adds up the coefficients of one piece."""

    cutter: _Cutter
    operators: tuple[int, ...]
    share: Share
    way: Running
    home: Home
    whole: bool

    def make(self) -> Piece:
        self.tables = self.cutter.tables
        self.template = self.tables.template
        self.alias = self.cutter.alias
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
            check()
            if index not in self.cutter.free:
                self._operator(index)
        self._checkpoints(inside)
        for table in edges:
            check()
            if not self.cutter.free & {table.edge.producer, table.edge.consumer}:
                self._edge(table)
        for parameter, found in uses:
            check()
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

    def _held(self, index: int) -> str:
        """For whom an operator keeps its bytes: every micro-batch in flight, or its own backward pass, which for what
        follows the blocks comes at once."""
        brief = self.share.last and not self.share.blocks and not self.whole and index >= self.template.stop
        return "replay" if brief or self._again(index) else "live"

    def _offloaded(self, index: int) -> bool:
        """Whether an operator stands in a block that offloads what it saves."""
        return self.way == "none" and self.home != "device" and self.template.in_block(index)

    def _away(self, nbytes: Array) -> Array:
        """Seconds to bring each of these out and back, which are charged in full."""
        cluster = self.cutter.cluster
        return sum(away_seconds(nbytes, cluster.store(self.home), cluster.device.launch_latency), np.zeros_like(nbytes))

    def _moves(self, index: int) -> bool:
        return self._again(index) and self.template.moves(index)

    def _add(self, key: Key, **amounts: Array) -> None:
        at = self.place[key]
        for name, values in amounts.items():
            self.columns[name][at] = self.columns[name][at] + values

    def _operator(self, index: int) -> None:
        table, key = self.tables.operators[index], self._key(index)
        prices = table.prices
        again = self._again(index)
        works = again and self.template.works(index)
        forward = prices.forward + prices.inner_forward
        self._add(key, part=forward * (2 if works else 1) + prices.backward + prices.inner_backward)
        self._add(key, **{self._held(index): table.kept})
        if self._offloaded(index):
            self._add(key, part=self._away(table.own), live=-table.own, replay=offloaded_bytes(table.own))
        at = self.place[key]
        self.columns["transient"][at] = np.maximum(self.columns["transient"][at], table.transient)
        if works and self.way == "selective":
            graph = self.template.graph
            op = graph.operators[index]
            rule = rule_of(graph, op)
            allowed = rule.op_class not in self.template.repeated
            if allowed and keeping_fault(rule) is None and prices.forward.any():
                results = [name for name in op.results if name is not None]
                own = [place for place, name in enumerate(results) if name in self.template.alive.kept]
                change = keeping(prices, works, own)
                self._add(key, k_part=-change.seconds, k_live=change.kept, k_replay=-change.interior)
        for name in self.template.graph.operators[index].results:
            if name is not None and name in self.template.kept_for_next and self.template.in_block(index):
                self._add(key, **{"replay" if again else "live": self.tables.result_bytes[name]})

    def _checkpoints(self, inside: set[int]) -> None:
        """A recomputed block keeps what flows into it; what it offloads is on the device while it leaves and comes
        back, beside that of a neighbour. The transfers are charged in full."""
        if self.way == "none" or not any(self.template.in_block(index) for index in inside):
            return
        held = bool(self.share.first and self.share.blocks)
        seen = set()
        everywhere = {table.edge.name for table in self.tables.edges if table.edge.kind == "every"}
        for table in self.tables.edges:
            edge = table.edge
            flows = edge.kind == "every" or edge.kind == ("enter" if held else "loop")
            if flows and edge.name not in seen and edge.name in self.template.graph.differentiable:
                seen.add(edge.name)
                nbytes, key = self.tables.result_bytes[edge.name], self._key(edge.producer)
                if self.home == "device" or edge.name in everywhere:
                    self._add(key, live=nbytes)
                else:
                    self._add(key, part=self._away(nbytes), replay=offloaded_bytes(nbytes))

    def _edge(self, table: EdgeTable) -> None:
        edge = table.edge
        part = table.forward * (2 if self._moves(edge.consumer) else 1) + table.backward
        where = self._held(edge.consumer)
        keys = self._key(edge.producer), self._key(edge.consumer)
        if self._offloaded(edge.consumer):
            part = part + self._away(table.own)
            self._join(*keys, np.zeros_like(part), "replay", offloaded_bytes(table.own))
            self._join(*keys, part, where, table.kept - table.own)
        else:
            self._join(*keys, part, where, table.kept)

    def _use(self, use: UseTable, name: str) -> None:
        """The weight is gathered once more where the backward pass needs it, or the block is recomputed; a recomputed
        block keeps what it has gathered until its backward pass is done."""
        again = self._again(use.consumer)
        twice = self._moves(use.consumer) if again else use.needed
        part = use.gather * (2 if twice else 1) + use.reduce
        ahead = gathered_at_once(self.cutter.cluster.software, self.tables.update)
        held = ahead or int(again and use.needed)
        kept = held * use.gathered
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
            part=prices.accumulation + prices.fetches,
            steady=prices.accumulation + prices.fetches,
            step=prices.synchronisation
            + prices.update
            + prices.gather
            + prices.offload
            + prices.weight_store
            + self.cutter.tied(parameter),
            fixed=prices.weight + prices.gradient + prices.state,
            replay=prices.visiting,
        )
        at = self.place[parameter.name]
        self.columns["transient"][at] = np.maximum(self.columns["transient"][at], prices.transient)

    def _assembled(self, keys: list[Key], sizes: tuple[int, ...]) -> Piece:
        boundary = tuple(key for key in self.cutter.boundary if key in self.place)
        count = len(keys)
        plan = schedule(sizes, tuple(self.pairs), tuple(range(count - len(boundary), count)), EXACT)
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
            home=self.home,
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
