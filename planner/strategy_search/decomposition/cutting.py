"""The template cut into pieces; every price of the cost tables goes to one of them.

    head     operators before the blocks (and the first block, if its input is not that of the other blocks)
    inner    one block that stands for all of its kind
    tail     operators after the blocks (and the last block, if its output is not that of the other blocks)

Weights that blocks share are variables of the boundary. If there are more than `_SHARED` of them, or if they can be
stored in more than `_JOINT` ways together, as in a model whose layers share all weights (ALBERT), their cost is divided
among the blocks instead: each block stores them as suits it best, and bears its part of their cost. This is exact if
the blocks agree, so it is a lower bound for every choice. What most blocks choose is then tried for all
(`planner.strategy_search.engine.engine`), as `agreed` in this file.

Values that every block reads, as the encoder's output and the position bias of T5, are variables of the boundary, too.
If these make more than `most_states` states, the smallest of them are left out: every piece then chooses a layout of
such a value for itself, which is a lower bound again, and what most pieces choose is tried for all.

Only this file and its `PieceMaker` decide which operators and edges a piece has, how often they count, and whether
their bytes are kept for every micro-batch in flight or for one recomputed block. The prediction
(planner.plan.prediction.predict) computes the same independently, operator by operator.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import PYTORCH, Cluster, Home, Machine
from planner.limits import room
from planner.plan.layout.kept import Kept, block_words, kept_places, replayed_places
from planner.plan.prediction.walk.stage_cost import tied_seconds
from planner.pricing.parameter_price import summed
from planner.sharding.layout import local_share
from planner.strategy_search.decomposition.boundary_values import BoundaryValues, no_crossing
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.piece_maker import PieceMaker
from planner.strategy_search.decomposition.pieces import Piece
from planner.strategy_search.request.space import Running
from planner.strategy_search.request.template import Key, Share
from planner.strategy_search.tables.cost_table import CostTables, EdgeTable, ParameterTable, UseTable

Array = NDArray[np.float64]

_JOINT = 64
"""The largest number of joint ways to store the shared weights of blocks for which they become variables."""

_SHARED = 16
"""The largest number of shared weights that become axes of the boundary; numpy arrays have 32 axes."""

_STATE_TABLES = 16  # about as many numbers are kept for every state of the boundary


def cut(
    tables: CostTables,
    cluster: Cluster,
    *,
    recomputation: Collection[Running],
    stages: int,
    free: Collection[int] = (),
    activations: Sequence[Home] = ("device",),
    saved: Sequence[Home] = ("device",),
    gathers: str = "each",
    kept: Kept | None = None,
    machine: Machine | None = None,
    early: bool = True,
    like: Chain | None = None,
    agreed: Mapping[Key, int] = MappingProxyType({}),
    most_states: float = math.inf,
) -> Chain:
    """Cut a template into pieces.

    Args:
        tables: the prices.
        cluster: the devices; may be one group of a `machine`.
        recomputation: the ways in which blocks may be run.
        stages: pipeline ranks. A parameter of the first and the last stage is priced in both.
        free: operators that cost nothing, nor do their edges. The result is a lower bound for templates that differ
            only in these operators.
        activations: where the inputs of recomputed blocks may be stored.
        saved: where the saved activations of other blocks may be stored.
        gathers: how weights are gathered for use (`planner.sharding.update.GATHERS`), or `LEAST_WAITING`.
        kept: what recomputed blocks keep; None lets the weights of the search decide.
        early: whether gradients that are reduced once a step may be reduced under the last backward pass.
        like: a chain of the same tables, cluster and stages that was cut otherwise; what crosses between its pieces is
            reused.
        agreed: how weights that blocks share are stored, and the strategies of operators whose values every block
            reads, if that is decided. The tables of the result have no other ways.
        most_states: how many states of the boundary there may be before pieces choose the layouts of values that every
            block reads for themselves.
    """
    return Cutter(
        tables=tables.agreeing(agreed),
        cluster=cluster,
        machine=cluster if machine is None else machine,
        recomputation=recomputation,
        stages=stages,
        free=frozenset(free),
        activations=tuple(activations),
        saved=tuple(saved),
        gathers=gathers,
        kept=kept,
        early=early,
        like=like,
        most_states=most_states,
    ).cut()


@dataclass(kw_only=True)
class Cutter:
    """What all pieces of a chain share: aliases, the boundary, and the values that cross it."""

    tables: CostTables
    cluster: Cluster
    machine: Machine
    recomputation: Collection[Running]
    stages: int
    free: frozenset[int]
    activations: tuple[Home, ...]
    saved: tuple[Home, ...]
    gathers: str
    kept: Kept | None = None
    early: bool = True
    like: Chain | None = None
    most_states: float = math.inf

    def cut(self) -> Chain:
        template = self.tables.template
        blocks = template.blocks
        if not blocks.count:
            return self._whole()
        before, after = range(template.start), range(template.stop, len(self.tables.operators))
        makers = template.makers
        entering = self._aliases(makers)
        into_head = entering is None
        self.alias: dict[Key, Key] = {
            at: one for chosen in (template.twins, entering or {}) for at, one in chosen.items()
        }
        into_tail = any(
            e.kind == "leave" and self.alias.get(e.producer, e.producer) not in makers for e in template.edges
        )
        self.boundary, self.relaxed = self._agreeing(self._boundary(makers), makers)
        self.alias |= self._alike_outside()
        self.values = BoundaryValues(
            tables=self.tables,
            cluster=self.cluster,
            machine=self.machine,
            stages=self.stages,
            boundary=self.boundary,
            shape=tuple(self._size(key) for key in self.boundary),
            relaxed=self.relaxed,
        )
        states = math.prod(self.values.shape)
        room(_STATE_TABLES * states * 8, f"the states of the boundary between blocks{self._why_many()}")
        first = (*before, *template.held[blocks.kinds[0]]) if into_head else tuple(before)
        final = (*template.held[blocks.kinds[-1]], *after) if into_tail else tuple(after)
        ways = self._ways()  # ways to run blocks; head and tail may have no block
        of_head = Share(blocks=int(into_head), first=True, last=False)
        of_tail = Share(blocks=int(into_tail), first=False, last=True)
        head = [self._piece(first, of_head, *way) for way in (ways if into_head else ways[:1])]
        tail = [self._piece(final, of_tail, *way) for way in (ways if into_tail else ways[:1])]
        inner = [
            replace(self._piece(tuple(template.held[kind]), Share(blocks=1, first=False, last=False), *way), kind=kind)
            for kind in dict.fromkeys(blocks.kinds[int(into_head) : blocks.count - int(into_tail)])
            for way in ways
        ]
        return Chain(
            tables=self.tables,
            alias=self.alias,
            boundary=self.boundary,
            shape=self.values.shape,
            head=tuple(head),
            inner=tuple(inner),
            tail=tuple(tail),
            blocks_in_head=int(into_head),
            blocks_in_tail=int(into_tail),
            crossing=self.values.crossing() if self.like is None else self.like.crossing,
            handed=self.values.handed() if self.like is None else self.like.handed,
            ending=self.values.ending() if self.like is None else self.like.ending,
            tied=self._tied() if self.like is None else self.like.tied,
            relaxed=(*self.divided, *self.relaxed),
        )

    def _whole(self) -> Chain:
        self.alias = dict[Key, Key]()
        self.boundary = ()
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
            crossing=no_crossing(nothing),
            handed=nothing,
            ending=nothing,
            tied=(nothing, nothing),
        )

    def _ways(self) -> list[tuple[Running, Home]]:
        """The ways to run a block that need their own piece. Keeping nothing is a choice within a "selective" piece.
        The inputs of a recomputed block may be offloaded, and so may the saved activations of another one."""
        ways: list[tuple[Running, Home]] = []
        if "none" in self.recomputation:
            ways += [("none", home) for home in self.saved]
        homes: tuple[Home, ...] = self.activations if self._offloads() else ("device",)
        if "selective" in self.recomputation and (self.decided is not None or not self._recomputes_modules):
            ways += [("selective", home) for home in homes]
        elif "full" in self.recomputation:
            ways += [("full", home) for home in homes]
        return ways

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced in buckets during the last backward pass, as our runtime does."""
        update = self.tables.update
        ours = self.cluster.software.name == PYTORCH.name and not update.served
        return self.early and ours and update.bucketed

    @property
    def _recomputes_modules(self) -> bool:
        return self.cluster.software.modules

    @cached_property
    def decided(self) -> Kept | None:
        """What recomputed blocks keep, if that is decided. Software that recomputes whole modules does not choose
        operators: it recomputes what is never kept, or else core attention."""
        never = self.tables.template.never_kept
        if self.kept is not None or not self._recomputes_modules or "selective" not in self.recomputation:
            return self.kept
        alone = "none" not in self.recomputation
        return Kept(but=tuple(sorted(never))) if never else Kept(but=("attention",)) if alone else None

    @cached_property
    def _kept_of_kinds(self) -> tuple[frozenset[int], ...] | None:
        """For each kind of block, the places of the operators whose results it keeps; None if that is not decided."""
        if self.decided is None:
            return None
        graph, words = self.tables.template.graph, self.decided
        return tuple(frozenset(kept_places(block_words(graph, held), words)) for held in self.tables.template.held)

    @cached_property
    def always_kept(self) -> frozenset[int] | None:
        """The operators whose results a recomputed block keeps; None if that is not decided."""
        if self._kept_of_kinds is None:
            return None
        held = zip(self.tables.template.held, self._kept_of_kinds, strict=True)
        return frozenset(block[place] for block, places in held for place in places)

    @cached_property
    def run_again(self) -> frozenset[int] | None:
        """The operators that are recomputed by software that recomputes whole modules, in blocks that keep some
        results; None if that is not decided."""
        if self._kept_of_kinds is None or not self._recomputes_modules:
            return None
        graph, held = self.tables.template.graph, self.tables.template.held
        pairs = [(block, places) for block, places in zip(held, self._kept_of_kinds, strict=True) if places]
        again = {block[place] for block, places in pairs for place in replayed_places(graph, block, places)}
        full = {at for block, places in zip(held, self._kept_of_kinds, strict=True) if not places for at in block}
        return frozenset(again | full)

    def _offloads(self) -> bool:
        """Whether only blocks read the inputs of blocks, which `planner.plan.layout.activation_offload` requires."""
        entering = {table.edge.name for table in self.tables.edges if table.edge.kind == "enter"}
        return not any(table.edge.kind == "outside" and table.edge.name in entering for table in self.tables.edges)

    def _aliases(self, makers: Sequence[int]) -> dict[int, int] | None:
        """A map from operators before the blocks to the makers at the boundary whose choice they may share; None if the
        first block differs.

        They may share it if every block, the first included, pays the same for its inputs.
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

    def _alike_outside(self) -> dict[Key, Key]:
        """Equal blocks outside of the pipelined blocks share the choices of the first of them, if they have the same
        candidates. So an image tower costs the search no more than one of its blocks."""
        settled = {*self.boundary, *self.relaxed, *self.alias, *self.alias.values()}
        return {
            key: first
            for key, first in self.tables.template.repeated_outside.items()
            if settled.isdisjoint((key, first)) and self._options(key) == self._options(first)
        }

    def _options(self, key: Key) -> object:
        if isinstance(key, str):
            return self._parameter(key).stored
        candidates = self.tables.operators[key].candidates
        return (
            candidates.strategies,
            candidates.narrow,
            None if candidates.under is None else candidates.under.tobytes(),
        )

    def _boundary(self, makers: Sequence[int]) -> tuple[Key, ...]:
        """The operators and parameters that more than one piece reads."""
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
            if parameter.name not in self.divided and (len(places) > 1 or parameter in self._common):
                shared.append(parameter.name)
        return (*makers, *sorted(outside - set(makers)), *shared)

    def _agreeing(self, boundary: tuple[Key, ...], makers: Sequence[int]) -> tuple[tuple[Key, ...], tuple[int, ...]]:
        """The boundary without the smallest values that every block reads, if there are too many states; and the
        operators that make these."""
        every = [key for key in boundary if isinstance(key, int) and key not in makers and self._size(key) > 1]
        states, relaxed = math.prod(self._size(key) for key in boundary), list[int]()
        for key in sorted(every, key=self._largest):
            if states <= self.most_states:
                break
            states //= self._size(key)
            relaxed.append(key)
        return tuple(key for key in boundary if key not in relaxed), tuple(relaxed)

    def _largest(self, key: int) -> float:
        """Bytes of the results of an operator on a device, under the strategy for which they are most."""
        results = self.tables.template.graph.operators[key].results
        return sum(float(self.tables.result_bytes[name].max()) for name in results if name is not None)

    @cached_property
    def _common(self) -> list[ParameterTable]:
        """The weights that blocks share."""
        own, weights = self.tables.template.every_own_parameter, self.tables.parameters
        low, high = self.tables.template.start, self.tables.template.stop
        return [one for one in weights if one.name not in own and any(low <= use.consumer < high for use in one.uses)]

    @cached_property
    def divided(self) -> Mapping[str, int]:
        """Shared weights of a single stage whose cost is divided, since they can be stored in too many ways. The value
        is the number of parts: one for each block that reads the weight, one for the operators before the blocks, and
        one for those after them."""
        few = len(self._common) <= _SHARED and math.prod(len(one.stored) for one in self._common) <= _JOINT
        if self.stages > 1 or few:
            return {}
        kinds = self.tables.template.blocks.kinds
        readers = {one.name: self.readers(one.uses) for one in self._common}
        return {name: len(read - {*kinds}) + sum(kind in read for kind in kinds) for name, read in readers.items()}

    def readers(self, uses: Sequence[UseTable]) -> set[int]:
        """Where a weight is used: the kinds of blocks, -1 before the blocks, and -2 after them."""
        template = self.tables.template
        found = [(use.consumer, template.kind_of(use.consumer)) for use in uses]
        return {(-1 if at < template.start else -2) if kind is None else kind for at, kind in found}

    def _why_many(self) -> str:
        """Words for an error message: the shared weights whose storage options multiply, and what helps; empty if there
        are none."""
        many = [one for one in self._common if one.name not in self.divided]
        return f", which share {len(many)} weights (--zero decides how these are stored)," if len(many) > 1 else ""

    def _size(self, key: Key) -> int:
        if isinstance(key, int):
            return len(self.tables.operators[key].candidates.strategies)
        return len(self._parameter(key).stored)

    def _parameter(self, name: str) -> ParameterTable:
        return self._parameters[name]

    @cached_property
    def _parameters(self) -> dict[str, ParameterTable]:
        return {table.name: table for table in self.tables.parameters}

    def _piece(
        self, operators: tuple[int, ...], share: Share, way: Running, home: Home = "device", *, whole: bool = False
    ) -> Piece:
        maker = PieceMaker(cutter=self, operators=operators, share=share, way=way, home=home, whole=whole)
        return maker.make()

    def counted(self, name: str, share: Share, used: bool) -> bool:
        """Whether a piece includes the price of a parameter. If one stage holds the whole model, it counts once in
        all."""
        if name not in self.boundary:
            return used
        template = self.tables.template
        if self.stages == 1:
            return share.first
        low, high = template.start, template.stop
        uses = [use.consumer for use in self._parameter(name).uses]
        return (share.first and any(at < low for at in uses)) or (share.last and any(at >= high for at in uses))

    def tied(self, parameter: ParameterTable) -> Array:
        """Seconds to sum the gradient of a parameter that both the first and the last stage hold."""
        template = self.tables.template
        trainable = parameter.name in template.graph.differentiable
        local = self.tables.update.is_local(parameter.name)
        if self.stages < 2 or parameter.name not in self.boundary or not trainable or local:
            return np.zeros(len(parameter.stored))
        tensor = summed(template.graph.types[parameter.name], self.tables.update)
        links = self.values.links(0, self.stages - 1)
        sizes = self.tables.mesh.sizes
        nbytes = [tensor.nbytes * local_share(tensor.shape, stored.state, sizes) for stored in parameter.stored]
        return np.array([tied_seconds(n, links) for n in nbytes])

    def _tied(self) -> tuple[Array, Array]:
        """Seconds per micro-batch and per step that a rank with both head and tail saves: one of the two updates of
        each parameter that both have, and the sums of its gradient."""
        part = step = self.values.nothing()
        for name in [key for key in self.boundary if isinstance(key, str)] if self.stages > 1 else ():
            ends = (Share(blocks=0, first=first, last=not first) for first in (True, False))
            if all(self.counted(name, end, used=False) for end in ends):
                parameter = self._parameter(name)
                prices = parameter.prices
                part = part + self.values.along(name, prices.accumulation + prices.fetches)
                own = prices.synchronisation + prices.update + prices.gather + prices.offload + prices.weight_store
                step = step + self.values.along(name, own + 2 * self.tied(parameter))
        return self.values.of_states(part), self.values.of_states(step)


def _same_edge(one: EdgeTable, other: EdgeTable) -> bool:
    fields = ("forward", "backward", "kept", "own")
    return all(np.array_equal(getattr(one, field), getattr(other, field)) for field in fields)
