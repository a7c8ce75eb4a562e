"""The coefficients of one piece: seconds and bytes of every candidate of its operators, edges and parameters.

    head, inner block or tail  ──  how often each price counts, and how long each byte is kept  ──>  Piece

`planner.strategy_search.decomposition.cutting` decides which pieces there are and what they share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costmodels import away_seconds, offloaded_bytes
from hardware_profiles import Home
from planner.graph.blocks import IDENTITY
from planner.limits import check
from planner.pricing.keeping import keeping, keeping_fault
from planner.pricing.parameter_price import gathered_at_once
from planner.sharding.rules import rule_of
from planner.sharding.update import AHEAD, EACH, GATHERS
from planner.strategy_search.decomposition.cells import Cells
from planner.strategy_search.decomposition.pieces import Piece
from planner.strategy_search.request.space import Running
from planner.strategy_search.request.template import Key, Share
from planner.strategy_search.solvers.elimination.order import EXACT, schedule
from planner.strategy_search.tables.cost_table import EdgeTable, ParameterTable, UseTable
from planner.strategy_search.tables.products import products_of
from planner.strategy_search.tables.under_products import Later

if TYPE_CHECKING:
    from planner.strategy_search.decomposition.cutting import Cutter

Array = NDArray[np.float64]

LEAST_WAITING = "least waiting"
"""A lower bound over all ways to gather weights with exposed all-gathers. Seconds are those of coalesced all-gathers of
the weights of a block. Memory is that of weights gathered one by one, without the transient memory of a weight next to
its operator, which a block that gathers all of its weights together does not add."""

_COLUMNS = (
    "part", "steady", "step", "fixed", "live", "replay", "k_part", "k_live", "k_replay", "k_work", "transient",
    "outside", "under", "under_again", "last", "first_there", "last_back", "work", "work_again", "reduction",
    "backward", "hosted", "hosted_live",
)  # fmt: skip


@dataclass(kw_only=True)
class PieceMaker:
    """Adds up the coefficients of one piece."""

    cutter: "Cutter"
    operators: tuple[int, ...]
    share: Share
    way: Running
    home: Home
    whole: bool

    def make(self) -> Piece:
        self.tables = self.cutter.tables
        self.template = self.tables.template
        self.repeated = range(self.template.start, self.template.stop)  # operators inside of blocks
        self.gathers = self.cutter.gathers
        update = replace(self.tables.update, gathers=self.gathers if self.gathers in GATHERS else EACH)
        self.at_once = gathered_at_once(self.cutter.cluster.software, update)
        self.travels = self.gathers == AHEAD and self.template.blocks.count > 1
        self.reduces = self.cutter.reduces
        self.alias = self.cutter.alias
        self.overlapped = self.cutter.cluster.device.overlapped
        self.modules = self.cutter.run_again if self.way == "selective" else None
        inside = set(self.operators)
        edges = [table for table in self.tables.edges if self._counts(table, inside)]
        uses = [(p, [use for use in p.uses if use.consumer in inside]) for p in self.tables.parameters]
        uses = [(p, found) for p, found in uses if found or self.cutter.counted(p.name, self.share, False)]
        keys = self._keys(edges, [parameter.name for parameter, _ in uses])
        self.place = {key: position for position, key in enumerate(keys)}
        sizes = tuple(self.cutter._size(key) for key in keys)
        ends = tuple(accumulate(sizes, initial=0))
        self.cells = tuple(slice(start, stop) for start, stop in pairwise(ends))  # the candidates of each variable
        self.columns: dict[str, Array] = {name: np.zeros(ends[-1]) for name in _COLUMNS}
        self.pairs: dict[tuple[int, int], dict[str, Array]] = {}
        self.begins = False
        self.always = set[int]()
        self.keepable = set[int]()  # operators that may keep their results, if the search decides
        for index in self.operators:
            check()
            if index not in self.cutter.free:
                self._operator(index)
            else:  # no choice has more computation to overlap collectives with
                prices, second = self.tables.operators[index].prices, self.tables.operators[index].prices_again
                once, key = np.full(prices.forward.size, prices.forward.max()), self._key(index)
                again = np.full_like(once, second.forward.max() * self._again(index) + prices.backward.max())
                self._add(key, work=once, work_again=again, backward=again)
        self._checkpoints(inside)
        priced = [table for table in edges if not self.cutter.free & {table.edge.producer, table.edge.consumer}]
        for table in priced:
            check()
            self._edge(table)
        for table in priced if self.way == "selective" else ():
            if table.later is not None and self._brings(table):
                self._comes_later(table, table.later)
        for parameter, found in uses:
            check()
            self._parameter(parameter, found)
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
        """The variables of the piece, with those of the boundary last."""
        alias = self.alias
        named: list[Key] = [alias.get(index, index) for index in self.operators]
        named += [alias.get(at, at) for at in [table.edge.producer for table in edges]]
        named += [alias.get(name, name) for name in parameters]
        used = dict.fromkeys(named)
        boundary = [key for key in self.cutter.boundary if key in used]
        return [key for key in used if key not in boundary] + boundary

    def _key(self, one: Key) -> Key:
        return self.alias.get(one, one)

    def _again(self, index: int) -> bool:
        return self.way != "none" and index in self.repeated

    def _held(self, index: int) -> str:
        """How long the bytes that an operator saves are kept: "live" until the backward pass of each micro-batch in
        flight, or "replay" for one backward pass at a time. What follows the blocks runs backward at once."""
        brief = self.share.last and not self.share.blocks and not self.whole and index >= self.template.stop
        passing = not self.template.alive.trains and index in self.repeated  # for one block at a time
        return "replay" if brief or passing or (self._again(index) and not self._apart(index)) else "live"

    def _apart(self, index: int) -> bool:
        """Whether an operator is in a recomputed block, but in no module that is recomputed."""
        return self.modules is not None and self._again(index) and index not in self.modules

    def _offloaded(self, index: int) -> bool:
        """Whether an operator is in a block that offloads its saved activations."""
        return self.way == "none" and self.home != "device" and index in self.repeated

    def _away(self, nbytes: Array) -> Array:
        """Seconds to offload these bytes and bring them back; they count as exposed."""
        cluster = self.cutter.cluster
        return sum(away_seconds(nbytes, cluster.store(self.home), cluster.device.launch_latency), np.zeros_like(nbytes))

    def _works(self, index: int) -> NDArray[np.bool_]:
        """A mask of the candidates with which an operator is recomputed."""
        joins = self.tables.operators[index].prices.joined > 0
        if self.modules is not None and self._again(index):
            return np.full(joins.shape, index in self.modules)
        found: NDArray[np.bool_] = self._again(index) & (
            self.template.works(index) | (self.template.moves(index) & joins)
        )
        return found

    def _moves(self, index: int) -> bool:
        """Whether the operands of an operator are redistributed again for recomputation."""
        if self.modules is not None and self._again(index):
            return index in self.modules
        return self._again(index) and self.template.moves(index)

    def _brings(self, table: EdgeTable) -> bool:
        """Whether the value of an edge is redistributed again: it enters or leaves recomputed operators, since a
        recomputed module runs to its end."""
        edge = table.edge
        if self.modules is None or edge.kind != "inside" or not self._again(edge.consumer):
            return self._moves(edge.consumer)
        return not self.modules.isdisjoint((edge.producer, edge.consumer))

    def _add(self, key: Key, /, **amounts: Array) -> None:
        cells = self.cells[self.place[key]]
        for name, values in amounts.items():
            self.columns[name][cells] += values

    def _most(self, key: Key, transient: Array) -> None:
        """Raise the transient bytes of the candidates to these, if they are larger: only the maximum counts."""
        known = self.columns["transient"][self.cells[self.place[key]]]
        np.maximum(known, transient, out=known)

    def _operator(self, index: int) -> None:
        table, key = self.tables.operators[index], self._key(index)
        prices, second = table.prices, table.prices_again
        again = self._again(index)
        works = self._works(index)
        forward = prices.forward + prices.inner_forward
        backward = (second.forward + second.inner_forward) * works + prices.backward + prices.inner_backward
        self._add(key, part=forward + backward, backward=backward)
        self._add(key, work=prices.forward, work_again=second.forward * works + prices.backward)
        if self.modules is None or not again:
            self._add(key, **{self._held(index): table.kept})
        else:
            longer = table.own if self._apart(index) else self._saved_apart(index)
            self._add(key, live=longer, replay=table.kept - longer)
        if self._offloaded(index):
            self._add(key, part=self._away(table.own), live=-table.own, replay=offloaded_bytes(table.own))
            self._add(key, hosted_live=table.own)
        beside = not self.at_once and self.gathers != LEAST_WAITING
        self._most(key, table.transient + table.weights if beside else table.transient)
        if self.modules is not None and index in (self.cutter.always_kept or ()):
            self.always.add(index)
        elif works.any() and self.way == "selective":
            graph = self.template.graph
            op = graph.operators[index]
            rule = rule_of(graph, op)
            if not self.template.never_keeps(index) and keeping_fault(rule) is None and prices.forward.any():
                results = [name for name in op.results if name is not None]
                alive = self.template.alive
                own = {place: alive.share(name) for place, name in enumerate(results) if name in alive.kept}
                change = keeping(second, works, own)
                decided = self.cutter.always_kept
                if decided is None:
                    self.keepable.add(index)
                    self._add(key, k_part=-change.seconds, k_live=change.kept, k_replay=-change.interior)
                    self._add(key, k_work=-second.forward * works)
                elif index in decided:
                    self.always.add(index)
                    self._add(key, part=-change.seconds, live=change.kept, replay=-change.interior)
                    self._add(key, work_again=-second.forward * works, backward=-change.seconds)
        if index in self.repeated:
            self._hand_on(index, again=again)

    def _hand_on(self, index: int, *, again: bool) -> None:
        """Bytes that are kept of the outputs of an operator, in addition to those kept inside its own block: as the
        next block keeps them; in a recomputed block also those that the operators behind the last block keep, if they
        keep more."""
        template = self.template
        for name in template.graph.operators[index].results:
            if name is None or name not in template.outliving:
                continue
            by_next, by_rest = (template.kept_of(name, by_rest=rest) for rest in (False, True))
            more = by_next if name in template.kept_for_next else 0.0
            more += max(by_rest - by_next, 0.0) if again and name in template.alive.kept else 0.0
            if more:
                self._add(self._key(index), **{"replay" if again else "live": more * self.tables.result_bytes[name]})

    def _saved_apart(self, index: int) -> Array:
        """Bytes of the outputs of an operator in a recomputed module that only operators outside of such modules, in
        the same block, read and save."""
        template, table = self.template, self.tables.operators[index]
        found, prices = np.zeros_like(table.own), table.prices
        if not table.own.any():  # for example operators whose results are kept in parts
            return found
        results = [name for name in template.graph.operators[index].results if name is not None]
        for place, name in enumerate(results):
            uses = [
                table.edge for table in self.tables.edges if table.edge.producer == index and table.edge.name == name
            ]
            apart = any(self._apart(e.consumer) and e.operand in template.alive.saved[e.consumer] for e in uses)
            if name in template.alive.kept and name not in template.outliving and apart:
                found = found + template.alive.share(name) * prices.results[place]
        return found

    def _entering(self) -> None:
        """The inputs of recomputed modules from the rest of their block are kept, unless they are kept anyway."""
        seen, template = set(), self.template
        for table in self.tables.edges:
            edge = table.edge
            if edge.kind != "inside" or edge.name in seen or edge.name in template.alive.kept:
                continue
            there = edge.producer in self.operators and self._again(edge.consumer) and self._apart(edge.producer)
            if there and not self._apart(edge.consumer) and edge.name in template.graph.differentiable:
                seen.add(edge.name)
                self._add(self._key(edge.producer), live=self.tables.result_bytes[edge.name])

    def _checkpoints(self, inside: set[int]) -> None:
        """A recomputed block keeps its inputs. If it offloads them, they are on the device during both transfers,
        together with those of a neighbouring block. The transfers count as exposed."""
        if self.way == "none" or not any(self.template.in_block(index) for index in inside):
            return
        held = bool(self.share.first and self.share.blocks)
        if self.modules is not None:
            self._entering()
        seen = set()
        everywhere = {table.edge.name for table in self.tables.edges if table.edge.kind == "every"}
        for table in self.tables.edges:
            edge = table.edge
            read = edge.kind == "every" and edge.consumer in inside  # blocks of another kind may not read it
            flows = read or edge.kind == ("enter" if held else "loop")
            if flows and edge.name not in seen and edge.name in self.template.graph.differentiable:
                seen.add(edge.name)
                nbytes, key = self.tables.result_bytes[edge.name], self._key(edge.producer)
                if self.home == "device" or edge.name in everywhere:
                    self._add(key, live=nbytes)
                else:
                    self._add(key, part=self._away(nbytes), hosted_live=nbytes, replay=offloaded_bytes(nbytes))

    def _edge(self, table: EdgeTable) -> None:
        edge = table.edge
        again = table.share_again * self._forward_again(table) if self._brings(table) else 0.0
        backward = table.backward + again + self._lost(table)
        part = table.forward + backward
        where = self._held(edge.consumer)
        keys = self._key(edge.producer), self._key(edge.consumer)
        if self._offloaded(edge.consumer):
            away = self._away(table.own)
            part, backward = part + away, backward + away
            self._join(*keys, hosted_live=table.own, replay=offloaded_bytes(table.own))
            self._join(*keys, part=part, backward=backward, **{where: table.kept - table.own})
        else:
            self._join(*keys, part=part, backward=backward, **{where: table.kept})

    def _forward_again(self, table: EdgeTable) -> Array:
        """The forward seconds of an edge during recomputation: without those by which the edge before an identity saves
        less, if that one does not run again."""
        if table.confined is None:
            return table.forward
        before = next(one for one in self.tables.edges if one.edge.consumer == table.edge.producer)
        return table.forward if self._brings(before) else table.forward - table.confined

    def _lost(self, table: EdgeTable) -> Array | float:
        """Seconds that an edge loses if the result of the product that makes its value is kept: the collective then no
        longer overlaps with that product. If keeping the result is a choice, the least loss over the layouts with a
        collective is charged to that choice, and subtracted again from layouts without one."""
        edge = table.edge
        if table.under is None or edge.producer not in self.always | self.keepable:
            return 0.0
        saved: Array = table.under[0] + (table.under[1] if self._brings(table) else 0.0)
        if edge.producer in self.always:
            return saved
        sends = saved > 0
        least = np.where(sends, saved, np.inf).min(axis=1)
        least = np.where(np.isfinite(least), least, 0.0)
        self._add(self._key(edge.producer), k_part=least)
        return np.where(sends, 0.0, -least[:, None])

    def _comes_later(self, table: EdgeTable, later: Later) -> None:
        """Credits the seconds saved if an operand is gathered again while the gradients of its rows are computed. This
        is so if a recomputed block keeps the results of all products that read the operand. Each product is credited
        with its share if it keeps its results, or if it reads something else. If only some of them keep their results,
        nothing is saved in fact. If several readers gather the operand separately, they are credited as if the results
        were kept; otherwise the credit would go to the readers that share a gathered operand."""
        edge = table.edge
        shared = self.template.graph.operators[edge.producer].op == IDENTITY
        one, other, most = self._key(edge.producer), self._key(edge.consumer), later.seconds.max(axis=0)
        for at, beside in zip(products_of(self.template, edge), later.products, strict=True):
            reads = beside.reads
            if at in self.always | self.cutter.free or (shared and reads is None):
                seconds = -beside.share * later.seconds
                self._join(one, other, part=seconds, backward=seconds)
                continue
            kept = most if reads is None else (reads * most[:, None]).max(axis=0)
            if at in self.keepable:
                self._add(self._key(at), k_part=-beside.share * kept)
            if reads is not None and (rest := ~reads * most[:, None]).any():
                seconds = -beside.share * rest
                self._join(other, self._key(at), part=seconds, backward=seconds)

    def _use(self, use: UseTable, name: str) -> None:
        """Prices the gathers of a weight and the reduction of its gradient for one operator. The weight is gathered
        again if the backward pass needs it, or if the block is recomputed. A recomputed block keeps its gathered
        weights until its backward pass is over. Collectives that overlap with the computation of other blocks go to
        `under` instead of `part`."""
        again = self._again(use.consumer) and not self._apart(use.consumer)
        twice = self._moves(use.consumer) if again else use.needed
        way = use if self.gathers == EACH or use.together is None else use.together
        seconds = way.gather * (2 if twice else 1) + way.reduce
        backward = way.gather * twice + way.reduce
        held = self.at_once or int(again and use.needed)
        kept = held * (way if self.at_once else use).gathered
        if self.gathers == LEAST_WAITING and use.together is not None:
            kept = np.minimum(kept, use.together.gathered)
        keys = (self._key(name), self._key(use.consumer))
        if self.travels and way.first_gather is not None and way.first_reduce is not None:
            first_gather, first_reduce = (self.overlapped * one for one in (way.first_gather, way.first_reduce))
            there, back = first_gather, first_gather * twice + first_reduce
            seconds, backward = seconds - there - back, backward - back  # collectives after the first are exposed
            self._join(*keys, under=there, under_again=back, last=first_reduce)
            if use.consumer < self.template.start:
                self.begins = True
                self._join(*keys, first_there=there, last_back=first_reduce)
        apart = self.at_once and self.share.blocks and not self.template.in_block(use.consumer)
        self._join(*keys, part=seconds, steady=seconds, backward=backward, **{"outside" if apart else "replay": kept})

    def _join(self, one: Key, other: Key, /, **amounts: Array) -> None:
        first, second = self.place[one], self.place[other]
        if not self.reduces:
            amounts.pop("backward", None)
        if first == second:  # the operator reads its own result from the previous block
            self._add(one, **{name: np.diagonal(values) for name, values in amounts.items()})
            return
        if first > second:
            first, second, amounts = second, first, {name: values.T for name, values in amounts.items()}
        known = self.pairs.setdefault((first, second), {})
        for name, values in amounts.items():
            known[name] = known[name] + values if name in known else values

    def _parameter(self, parameter: ParameterTable, uses: Sequence[UseTable]) -> None:
        if not self.cutter.counted(parameter.name, self.share, bool(uses)):
            return
        prices, part, among = parameter.prices, 1.0, self.cutter.divided.get(parameter.name)
        key = self._key(parameter.name)
        if among is not None:
            part = len(self.cutter.readers(uses)) / among
        self._add(
            key,
            part=part * (prices.accumulation + prices.fetches),
            steady=part * (prices.accumulation + prices.fetches),
            work_again=part * prices.accumulation,
            backward=part * (prices.accumulation + prices.fetches),
            step=part * (prices.synchronisation + prices.update + prices.gather + prices.offload + prices.weight_store)
            + self.cutter.tied(parameter),
            fixed=part * (prices.weight + prices.gradient + prices.state),
            hosted=part * prices.hosted,
            replay=prices.visiting,
        )
        if self._goes_early(parameter):
            self._add(key, reduction=part * self.overlapped * (prices.synchronisation - prices.copied))
        self._most(key, prices.transient)

    def _goes_early(self, parameter: ParameterTable) -> bool:
        """Whether the gradient of a parameter may be reduced under the last backward pass. A parameter that operators
        before the blocks use has its gradient last, so its reduction is exposed."""
        before = self.template.start if self.template.blocks.count else 0
        return self.reduces and all(use.consumer >= before for use in parameter.uses)

    def _assembled(self, keys: list[Key], sizes: tuple[int, ...]) -> Piece:
        boundary = tuple(key for key in self.cutter.boundary if key in self.place)
        count = len(keys)
        plan = schedule(sizes, tuple(self.pairs), tuple(range(count - len(boundary), count)), EXACT)
        order = [(pair, flip) for (pair, flip) in plan.edge_pairs]
        wanted = ["part", "steady", "live", "replay", "outside"]
        wanted += ["under", "under_again", "last"] if self.travels else []
        wanted += ["first_there", "last_back"] if self.begins else []
        wanted += ["backward"] if self.reduces else []
        wanted += ["hosted_live"] if self.home == "host" else []
        flat: dict[str, list[Array | int]] = {name: [self.columns[name]] for name in wanted}
        turned: list[tuple[int, dict[str, Array], bool]] = [
            (pair, tables, flip) for tables, (pair, flip) in zip(self.pairs.values(), order, strict=True)
        ]
        for _, tables, flip in sorted(turned, key=lambda item: item[0]):
            cells = next(iter(tables.values())).size
            for name, rows in flat.items():
                values = tables.get(name)
                rows.append(cells if values is None else values.T if flip else values)
        part = np.concatenate([np.zeros(one) if isinstance(one, int) else one.ravel() for one in flat.pop("part")])
        joined = {name: Cells.of(rows) for name, rows in flat.items()}
        nodes = self.columns
        return Piece(
            keys=tuple(keys),
            sizes=sizes,
            plan=plan,
            boundary=boundary,
            recompute=self.way != "none",
            home=self.home,
            part=part,
            steady=joined["steady"],
            step=nodes["step"],
            fixed=nodes["fixed"],
            live=joined["live"],
            replay=joined["replay"],
            hosted=nodes["hosted"] if nodes["hosted"].any() else None,
            hosted_live=joined.get("hosted_live"),
            outside=joined["outside"] if joined["outside"].any() else None,
            keeping_part=nodes["k_part"],
            keeping_live=nodes["k_live"],
            keeping_replay=nodes["k_replay"],
            keeping_work=nodes["k_work"] if self.travels else None,
            transient=tuple(nodes["transient"][cells] for cells in self.cells),
            under=(joined["under"], joined["under_again"]) if self.travels else None,
            last=joined.get("last"),
            covering=(nodes["work"], nodes["work_again"]) if self.travels else None,
            reduction=nodes["reduction"] if self.reduces else None,
            backward=joined["backward"] if self.reduces else None,
            uncovered=(joined["first_there"], joined["last_back"]) if self.begins else None,
            always=frozenset(self.always),
        )
