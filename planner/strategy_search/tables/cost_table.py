"""Cost tables of a template on one mesh at one micro-batch size: all numbers that do not depend on the pipeline, on
recomputation, or on the number of micro-batches. `stage_problem` weighs them.

There is one variable per operator (its strategies) and one per parameter (its stored layouts). Seconds are per
micro-batch or per step, bytes per device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Bytes, Cluster
from planner.graph.blocks import IDENTITY
from planner.graph.fp8 import NO_FP8, Fp8, delayed_scales, history_bytes, without_fp8
from planner.graph.operator_graph import TensorType
from planner.limits import check, room
from planner.plan.layout.block_gathers import longest_gather
from planner.plan.layout.expert_overlap import OP_CLASS
from planner.pricing import (
    OperatorPrices,
    ParameterPrices,
    Paths,
    Pricers,
    RedistributionPricer,
    price_operator,
    price_parameter,
)
from planner.pricing.bucket_size import filled, sized
from planner.pricing.narrow_weights import cast_seconds, in_8_bits
from planner.pricing.operator_price import dominated_by_second, joined, transient_bytes
from planner.pricing.parameter_price import reduced
from planner.sharding.matrices import optimizer_of
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter, legal_stored, own_copies, with_homes
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.offload import NOTHING, Offload
from planner.strategy_search.request.restriction import Restriction
from planner.strategy_search.request.template import Template, ValueEdge
from planner.strategy_search.tables.candidates import CandidateLists, Candidates, DuplexColumn, Indices, LayoutColumn
from planner.strategy_search.tables.dominance import among as priced_among
from planner.strategy_search.tables.dominance import undominated
from planner.strategy_search.tables.launches import Shares, kernels_shares
from planner.strategy_search.tables.under_experts import beside_experts, saved_by_exchange, whole_exchange
from planner.strategy_search.tables.under_products import Later, UnderProducts, takes_result

Array = NDArray[np.float64]

_CELL_BYTES = 24  # per pair of candidates of an edge: seconds forward and backward, bytes; some are shared


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorTable:
    """One operator with K candidates.

    `kept` has the bytes kept for its backward pass; `own` is the part that nothing outside of its block reads.
    `transient` has the bytes that live while it runs, and `weights` those of its weights if each is gathered
    separately. `again` has the price of its forward pass during recomputation, if that counts differently."""

    candidates: Candidates
    prices: OperatorPrices
    kept: Array
    own: Array
    transient: Array
    weights: Array
    again: OperatorPrices | None = None

    @property
    def prices_again(self) -> OperatorPrices:
        """The price of the forward pass during recomputation."""
        return self.prices if self.again is None else self.again


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeTable:
    """One edge; arrays are (K_producer, K_consumer).

    `forward` and `backward` are seconds. `kept` has the bytes kept; `own` is the part that only the consumer's block
    reads. `under` has the seconds saved by overlap with the product whose result the edge takes: once, and again during
    recomputation; None without such a product. `beneath` has all seconds saved under products, forward and backward.
    `later` has the seconds saved if an operand is gathered again for products whose results are kept. Recomputation in
    the backward pass counts `share_again` of the forward seconds."""

    edge: ValueEdge
    forward: Array
    backward: Array
    kept: Array
    own: Array
    under: tuple[Array, Array] | None = None
    beneath: Array | None = None
    later: Later | None = None
    share_again: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class UseTable:
    """One use of a parameter; arrays are (K, K_consumer).

    `gather` and `reduce` are the seconds to gather the weight, and to reduce its gradient. `gathered` has the bytes of
    the weight where gathering needs memory of its own. `needed` says whether the backward pass reads the weight.
    `together` is the same use with a coalesced all-gather of the weights of a block; None if it was not asked for.
    There, `first_gather` and `first_reduce` are the seconds of the first collective in each direction, which may
    overlap with the computation of other blocks; None if the weight is gathered separately."""

    consumer: int
    needed: bool
    gather: Array
    reduce: Array
    gathered: Array
    together: "UseTable | None" = None
    first_gather: Array | None = None
    first_reduce: Array | None = None

    def only(self, stored: int) -> "UseTable":
        """The table of one stored layout."""
        row = slice(stored, stored + 1)
        return replace(
            self,
            gather=self.gather[row],
            reduce=self.reduce[row],
            gathered=self.gathered[row],
            together=None if self.together is None else self.together.only(stored),
            first_gather=None if self.first_gather is None else self.first_gather[row],
            first_reduce=None if self.first_reduce is None else self.first_reduce[row],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterTable:
    """One parameter: its stored layouts (K), prices per step, and uses."""

    name: str
    stored: tuple[StoredParameter, ...]
    prices: ParameterPrices
    uses: tuple[UseTable, ...]

    def only(self, stored: int) -> "ParameterTable":
        """The table with one of the stored layouts."""
        row = slice(stored, stored + 1)
        return replace(
            self,
            stored=self.stored[row],
            prices=ParameterPrices(**{one.name: getattr(self.prices, one.name)[row] for one in fields(self.prices)}),
            uses=tuple(use.only(stored) for use in self.uses),
        )


Launched: TypeAlias = tuple[tuple[OperatorTable, ...], tuple[EdgeTable, ...], tuple[ParameterTable, ...], Shares | None]
"""Tables in which kernels and collectives count with shares and launches for the rest; and the shares."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTables:
    """All tables of a template.

    `result_bytes` has the local bytes of each value under the candidates of its producer. `shares` has the shares of
    kernels if hosts launch ahead. `apart` has all tables with separate shares per pass and kind of block, if these
    differ: they give bounds for single micro-batches and pipelines only (`planner.strategy_search.tables.launches`).
    """

    template: Template
    mesh: Mesh
    operators: tuple[OperatorTable, ...]
    edges: tuple[EdgeTable, ...]
    parameters: tuple[ParameterTable, ...]
    result_bytes: Mapping[str, Array]
    update: Update = PLAIN
    shares: Shares | None = None
    apart: Launched | None = None

    @property
    def launched_apart(self) -> "CostTables":
        """The tables with separate shares per pass and kind of block."""
        if self.apart is None:
            return self
        operators, edges, parameters, shares = self.apart
        return replace(self, operators=operators, edges=edges, parameters=parameters, apart=None, shares=shares)

    def storing(self, stored: Mapping[str, int]) -> "CostTables":
        """The tables with some parameters fixed to one of their stored layouts, and a single share for all passes and
        blocks."""
        if not stored:
            return self
        parameters = tuple(one.only(stored[one.name]) if one.name in stored else one for one in self.parameters)
        return replace(self, parameters=parameters, apart=None)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tables of edges and of uses of parameters, which are most of all bytes."""
        uses = [use for parameter in self.parameters for use in parameter.uses]
        every = self.edges if self.apart is None else (*self.edges, *self.apart[1])
        edges = {id(edge.forward): edge.forward.nbytes for edge in every}  # several edges may share an array
        return 4 * sum(edges.values()) + sum(8 * use.gather.nbytes for use in uses)


@dataclass(kw_only=True)
class TableBuilder:
    """Builds the tables for one mesh. Whatever micro-batch sizes share is computed once.

    Attributes:
        together: also price coalesced all-gathers of the weights of a block.
        dominated: keep stored layouts that another one beats in everything.
        ahead: hosts launch ahead of the kernels. A block takes as long as its kernels and collectives, or as its
            launches; a weighted mean of both is counted.
        overlapped: collectives next to linear layers overlap with matrix products.
        exchanged: the exchange of experts overlaps with other work of the block.
        paired: passes of two micro-batches run together, so all of that exchange overlaps.
        fp8: the settings of fp8; layers with delayed scaling hold its histories of scales.
        alike: keep every candidate of layers that may be in fp8 or not, because tables for other groups of devices must
            have the same candidates.
        gradients: bytes of all gradients of the model. Collectives are priced as parts of a bucket that these fill at
            least half.
        paths: paths between layouts, shared by builders for meshes on which they are the same.
    """

    mesh: Mesh
    cluster: Cluster
    precision: str
    optimizer: str
    update: Update = PLAIN
    offload: Offload = NOTHING
    together: bool = False
    dominated: bool = False
    ahead: bool = False
    overlapped: bool = False
    exchanged: bool = False
    paired: bool = False
    fp8: Fp8 = NO_FP8
    alike: bool = False
    gradients: Bytes = math.inf
    paths: Paths = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lists = CandidateLists(mesh=self.mesh)
        self.update = sized(self.update, self.mesh, self.cluster, self.gradients)
        counted = replace(filled(self.update, self.gradients), gathers="each")
        self._pricers = Pricers.of(self.mesh, self.cluster, counted, paths=self.paths)
        self._together: dict[int, Pricers] = {}  # per run of the template
        self._under = UnderProducts(mesh=self.mesh, cluster=self.cluster, pricer=self._pricers.activations)
        self._prices: dict[tuple[int, tuple[bool, ...], int], tuple[Rule, Candidates, OperatorPrices]] = {}
        self._wishes: dict[int, tuple[tuple[StoredParameter, ...], int]] = {}  # by id
        self._numbers: dict[tuple[StoredParameter, ...], int] = {}
        self._parameters: dict[object, tuple[tuple[StoredParameter, ...], ParameterPrices, DuplexColumn]] = {}
        self._twofold: dict[tuple[int, bytes, bytes], tuple[Candidates, Candidates]] = {}
        self._uses: dict[tuple[str, int, int], tuple[DuplexColumn, DuplexColumn, Array, UseTable]] = {}
        self._edges: dict[object, tuple[object, EdgeTable]] = {}  # with the objects whose ids are in the key

    def build(
        self, template: Template, restriction: Restriction | None = None, like: CostTables | None = None
    ) -> CostTables:
        """The tables of a template whose graph has the batch of one micro-batch, for all candidates or those of a
        restriction. `like` are tables of the same template, mesh and cluster whose operators have the same candidates:
        operators and edges are reused from them."""
        graph = template.graph
        if like is not None:
            stored = tuple(self._parameter(template, p.name, like.operators, restriction) for p in graph.parameters)
            apart = like.apart
            if apart is not None:
                apart = (*apart[:2], _added_up(template, stored, apart[3]), apart[3])
            return replace(like, parameters=_added_up(template, stored, like.shares), update=self.update, apart=apart)
        self._prices.clear()
        self._under.clear()
        self._edges.clear()
        lists = self._candidates(template, restriction)
        operators = tuple(self._operator(template, index, lists[index]) for index in range(len(graph.operators)))
        sizes = [len(table.candidates.strategies) for table in operators]
        cells = sum(sizes[edge.producer] * sizes[edge.consumer] for edge in template.edges)
        room(_CELL_BYTES * cells, f"the cost tables of {len(template.edges)} edges between operators")
        edges = tuple(self._edge(template, edge, operators) for edge in template.edges)
        if self.exchanged:
            operators = tuple(self._exchanged(template, index, operators) for index in range(len(operators)))
        if self.overlapped:
            edges = tuple(self._overlapped(template, table, lists) for table in edges)
        apart, shares = None, None
        parameters = tuple(self._parameter(template, p.name, operators, restriction) for p in graph.parameters)
        if self.ahead:
            shares, differing = kernels_shares(template, operators, edges, parameters)
            if differing is not None:
                own = _added_up(template, parameters, differing)
                apart = (*_launched_ahead(template, operators, edges, differing), own, differing)
            operators, edges = _launched_ahead(template, operators, edges, shares)
        parameters = _added_up(template, parameters, shares)
        result_bytes = {
            name: table.prices.results[place]
            for op, table in zip(graph.operators, operators, strict=True)
            for place, name in enumerate(r for r in op.results if r is not None)
        }
        return CostTables(
            template=template,
            mesh=self.mesh,
            operators=operators,
            edges=edges,
            parameters=parameters,
            result_bytes=result_bytes,
            update=self.update,
            shares=shares,
            apart=apart,
        )

    def alone(
        self, template: Template, index: int, restriction: Restriction | None, *, parameters: bool
    ) -> tuple[OperatorTable, tuple[ParameterTable, ...]]:
        """The table of one operator and, if asked for, those of the parameters that no other operator reads."""
        self._prices.clear()
        table = self._operator(template, index, self._own(template, index, restriction))
        graph = template.graph
        operands = graph.operators[index].operands if parameters else ()
        names = dict.fromkeys(name for name in operands if name in graph.parameter_names)
        own = (name for name in names if set(graph.consumers[name]) == {index})
        return table, tuple(self._parameter(template, name, {index: table}, restriction) for name in own)

    def _candidates(self, template: Template, restriction: Restriction | None) -> list[Candidates]:
        """The candidates of every operator. Operators of several kinds of blocks that make the same lane have only the
        candidates that all of them have."""
        found = [self._own(template, index, restriction) for index in range(len(template.graph.operators))]
        for first in dict.fromkeys(template.twins.values()):
            twins = [first, *(index for index, other in template.twins.items() if other == first)]
            others = [frozenset(found[twin].ways) for twin in twins[1:]]
            common = tuple(way for way in found[first].ways if all(way in other for other in others))
            if not common:
                names = " and ".join(f"'{template.graph.operators[twin].name}'" for twin in twins)
                raise NothingAgreesError(
                    f"{names} hand on the same values, and what is decided leaves them no strategy in common; decide"
                    " the same for them"
                )
            for twin in twins:
                if common != found[twin].ways:
                    found[twin] = self._among(template, twin, common)
        return found

    def _among(self, template: Template, index: int, ways: Sequence[tuple[Strategy, bool]]) -> Candidates:
        """Some ways of an operator as its candidates."""
        base = self._lists.among(
            rule_of(template.graph, template.graph.operators[index]), tuple(strategy for strategy, _ in ways)
        )
        if index not in template.either:
            return base
        narrow = np.array([narrow for _, narrow in ways])
        return self._ways(base, np.flatnonzero(narrow), np.flatnonzero(~narrow))

    def _own(self, template: Template, index: int, restriction: Restriction | None) -> Candidates:
        """The candidates of one operator on its own."""
        check()
        graph = template.graph
        op = graph.operators[index]
        rule = rule_of(graph, op)
        results = [name for name in op.results if name is not None]
        if not any(name in graph.data_dependent for name in results):  # the same in every step: all compute it
            candidates = self._lists.among(rule, ((None,) * len(self.mesh.axes),))
        elif restriction is None:
            candidates = self._lists.of(rule)
        else:
            candidates = self._lists.among(rule, restriction.strategies(index, rule, self.mesh))
        uses = sum(len(graph.consumers.get(name, ())) for name in results)
        shared = uses > 1 or index in template.shared
        graded = any(name in graph.differentiable for name in results) if graph.trains else op.op == IDENTITY
        if shared and not graded:
            candidates = self._lists.among(rule, _by_samples(rule, candidates.strategies))
        return self._either(template, index, candidates) if index in template.either else candidates

    def _either(self, template: Template, index: int, candidates: Candidates) -> Candidates:
        """Candidates of a linear layer in fp8 and without it. Those in fp8 are kept only if they are better at
        something, or if tables for other groups of devices must have the same candidates."""
        every = np.arange(len(candidates.strategies))
        both = self._ways(candidates, every, every)
        if self.alike:
            return both
        needed = ~dominated_by_second(self._priced(template, index, both))
        return self._ways(candidates, np.flatnonzero(needed), every)

    def _ways(self, candidates: Candidates, narrow: Indices, wide: Indices) -> Candidates:
        """`Candidates.either`, cached."""
        key = (id(candidates), narrow.tobytes(), wide.tobytes())
        if key not in self._twofold:
            self._twofold[key] = (candidates, candidates.either(narrow, wide))
        return self._twofold[key][1]

    def _priced(self, template: Template, index: int, candidates: Candidates) -> OperatorPrices:
        """The price of an operator under its candidates."""
        graph = template.graph
        op = graph.operators[index]
        rule = rule_of(graph, op)
        results = [name for name in op.results if name is not None]
        graded = tuple(name in graph.differentiable for name in op.operands)
        key = (id(rule), graded, id(candidates))
        if key not in self._prices:
            types = ([graph.types[name] for name in op.operands], [graph.types[name] for name in results])

            def priced(rule: Rule, strategies: Sequence[Strategy]) -> OperatorPrices:
                return price_operator(rule, strategies, *types, graded, self.mesh, self.cluster, self.optimizer)

            some = candidates.narrow
            if some is None:
                prices = priced(rule, candidates.strategies)
            else:
                plain = priced(rule_of(graph, without_fp8(op)), candidates.strategies[some:])
                prices = joined(priced(rule, candidates.strategies[:some]), plain) if some else plain
            self._prices[key] = (rule, candidates, prices)  # the first two are held so that their ids stay valid
        return self._prices[key][2]

    def _operator(self, template: Template, index: int, candidates: Candidates) -> OperatorTable:
        check()
        graph, alive = template.graph, template.alive
        op = graph.operators[index]
        rule = rule_of(graph, op)
        results = [name for name in op.results if name is not None]
        prices = self._priced(template, index, candidates)
        made = [place for place, name in enumerate(results) if name in alive.kept]
        if self._kept_in_pieces(template, index):
            made = []
        kept = np.zeros_like(prices.saved_extra) if index in alive.piecewise else prices.saved_extra
        others = [place for place in made if results[place] in template.outliving]
        gathered = [prices.operands[place] for place, name in enumerate(op.operands) if name in graph.parameter_names]
        held = {place: alive.share(results[place]) * prices.results[place] for place in made}
        return OperatorTable(
            candidates=candidates,
            prices=prices,
            kept=sum(held.values(), kept),
            own=sum((nbytes for place, nbytes in held.items() if place not in others), kept),
            transient=transient_bytes(alive, graph, index, rule, prices),
            weights=sum(gathered, np.zeros(len(candidates.strategies))),
        )

    def _edge(self, template: Template, edge: ValueEdge, operators: Sequence[OperatorTable]) -> EdgeTable:
        """The table of an edge. Edges between equal ends share its arrays, for example those of repeated blocks before
        the folded ones."""
        check()
        graph, alive = template.graph, template.alive
        ends = (operators[edge.producer], operators[edge.consumer])
        pieces = graph.operators[edge.consumer].results[0] if self._kept_in_pieces(template, edge.consumer) else None
        key = (
            tuple((id(one.candidates), id(one.prices)) for one in ends),
            _place_of(template, edge),
            edge.operand,
            graph.types[edge.name],
            edge.name in graph.differentiable,
            alive.copied(edge.consumer) if edge.operand in alive.saved[edge.consumer] else None,
            any(edge.name in kept for kept in (alive.kept, template.kept_for_next, template.kept_for_rest)),
            None if pieces is None else alive.share(pieces),
            edge.kind == "inside",
        )
        if key not in self._edges:
            self._edges[key] = (ends, self._between(template, edge, operators))
        return replace(self._edges[key][1], edge=edge)

    def _between(self, template: Template, edge: ValueEdge, operators: Sequence[OperatorTable]) -> EdgeTable:
        graph, alive = template.graph, template.alive
        place = _place_of(template, edge)
        made = operators[edge.producer].candidates.results[place]
        wanted = operators[edge.consumer].candidates.operands[edge.operand]
        tensor = graph.types[edge.name]
        pricer = self._pricers.activations
        forward = _spread(pricer, tensor, made.forward, wanted.forward)
        if edge.name in graph.differentiable:
            backward = _spread(pricer, tensor, wanted.gradient, made.gradient).T
        else:
            backward = np.zeros_like(forward)
        bytes_kept, own, shared = np.zeros_like(forward), np.zeros_like(forward), False
        if edge.operand in alive.saved[edge.consumer]:
            share = alive.copied(edge.consumer)
            bytes_kept = bytes_kept + share * operators[edge.consumer].prices.operands[edge.operand][None, :]
            if any(edge.name in kept for kept in (alive.kept, template.kept_for_next, template.kept_for_rest)):
                bytes_kept = np.where(_same(made.forward, wanted.forward), 0.0, bytes_kept)
                shared = True
            own = np.where(_same(made.forward, wanted.forward), 0.0, bytes_kept)  # a copy
            if self.cluster.software.regathers:  # see walk._kept_copy
                pieces = operators[edge.producer].prices.results[place][:, None]
                whole = operators[edge.consumer].prices.operands[edge.operand][None, :]
                bytes_kept = np.where(pieces < whole, 0.0 if shared else share * pieces, bytes_kept)
                own = np.where(pieces < whole, 0.0, own)
        if self._kept_in_pieces(template, edge.consumer):
            made_bytes = operators[edge.producer].prices.results[place][:, None]
            kept_pieces = np.minimum(made_bytes, operators[edge.consumer].prices.operands[0][None, :])
            bytes_kept = bytes_kept + alive.share(graph.operators[edge.consumer].results[0] or "") * kept_pieces
        own = bytes_kept if edge.kind == "inside" else own
        return EdgeTable(edge=edge, forward=forward, backward=backward, kept=bytes_kept, own=own)

    def _exchanged(self, template: Template, index: int, operators: Sequence[OperatorTable]) -> OperatorTable:
        """An operator with the overlap of its exchange of experts subtracted."""
        table, op = operators[index], template.graph.operators[index]
        if rule_of(template.graph, op).op_class != OP_CLASS or not table.prices.inner_forward.any():
            return table
        if self.paired:
            saved = whole_exchange(template, index, table.candidates, self.mesh, self.cluster)
        else:
            beside = [operators[at].prices for at in beside_experts(template, index)]
            saved = saved_by_exchange(template, index, table.candidates, table.prices, beside, self.mesh, self.cluster)
        prices = replace(
            table.prices,
            inner_forward=table.prices.inner_forward - saved.forward,
            inner_backward=table.prices.inner_backward - saved.backward,
        )
        return replace(table, prices=prices)

    def _overlapped(self, template: Template, table: EdgeTable, lists: Sequence[Candidates]) -> EdgeTable:
        """An edge with the overlap of its collective under products subtracted."""
        made = lists[table.edge.producer].results[_place_of(template, table.edge)]
        saved = self._under.saved(template, table.edge, made, lists)
        if saved is None:
            return table
        takes = takes_result(template, table.edge)
        key = (id(table.forward), id(table.backward), id(table.kept), id(table.own), id(saved), takes)
        if key not in self._edges:
            beneath = saved.forward + saved.backward
            travelling = replace(
                table,
                forward=table.forward - saved.forward,
                backward=table.backward - saved.backward,
                under=(beneath, saved.forward) if takes else None,
                beneath=beneath,
                later=saved.later,
            )
            self._edges[key] = ((table, saved), travelling)
        return replace(self._edges[key][1], edge=table.edge)

    def _kept_in_pieces(self, template: Template, index: int) -> bool:
        """Whether a shared value of the block, which nothing else keeps, is kept in the layout in which it arrives, and
        gathered again for the backward pass."""
        op = template.graph.operators[index]
        if op.op != IDENTITY or not template.in_block(index) or not self.cluster.software.regathers:
            return False
        if not template.alive.trains:
            return False
        saved, edges = template.alive.saved, template.leaving.get(index, ())
        kinds = {edge.kind for edge in edges if edge.operand in saved[edge.consumer]}
        return op.results[0] in template.alive.kept and kinds == {"inside"}

    def _parameter(
        self,
        template: Template,
        name: str,
        operators: Sequence[OperatorTable] | Mapping[int, OperatorTable],
        restriction: Restriction | None,
    ) -> ParameterTable:
        check()
        graph = template.graph
        trainable = name in graph.differentiable
        tensor = graph.types[name]
        among = None if restriction is None else restriction.stored(name, tensor, trainable, self.mesh)
        local = trainable and self.update.is_local(name)
        if local:
            among = (own_copies(len(self.mesh.axes)),)
        states = self.offload.optimizer if trainable else NOTHING.optimizer
        weights = self.offload.weights if name in template.every_own_parameter else NOTHING.weights
        decided = (at for at in graph.consumers.get(name, ()) if at not in template.either)
        readers = (graph.operators[at] for at in decided)
        scales = delayed_scales(readers, graph.types).get(name) if self.fp8.delayed else None
        optimizer = optimizer_of(graph, self.optimizer, name)
        key = (tensor, trainable, None if among is None else self._one_of(among), local, weights, scales, optimizer)
        if key not in self._parameters:
            stored = legal_stored(tensor.shape, self.mesh.sizes, trainable) if among is None else among
            if states != NOTHING.optimizer or weights != NOTHING.weights:
                stored = with_homes(stored, states, weights)
            prices = price_parameter(
                tensor, trainable, stored, self.precision, optimizer, self._pricers, self.update, local
            )
            if scales is not None:
                prices = replace(prices, state=prices.state + history_bytes(self.fp8, scales))
            if not self.dominated:
                kept = undominated(stored, prices)
                stored, prices = tuple(stored[place] for place in kept), priced_among(prices, kept)
            column = DuplexColumn(
                forward=LayoutColumn.of([s.weight for s in stored]),
                gradient=LayoutColumn.of([s.gradient for s in stored]),
            )
            self._parameters[key] = (stored, prices, column)
        stored, prices, made = self._parameters[key]
        uses = []
        for at in sorted(set(graph.consumers.get(name, ()))):
            for operand, used in enumerate(graph.operators[at].operands):
                if used == name:
                    wanted = operators[at].candidates.operands[operand]
                    nbytes = operators[at].prices.operands[operand]
                    known = self._uses.get((name, at, operand))  # usually the same for every micro-batch size
                    if known is None or known[:2] != (made, wanted) or not np.array_equal(known[2], nbytes):
                        moving = (
                            tensor,
                            made,
                            wanted,
                            nbytes,
                            _narrow(template, at, operand, operators[at].candidates),
                        )
                        use = self._both_ways(template, name, at, operand, moving, reduces=trainable and not local)
                        known = self._uses[name, at, operand] = (made, wanted, nbytes, use)
                    uses.append(known[3])
        return ParameterTable(name=name, stored=stored, prices=prices, uses=tuple(uses))

    def _one_of(self, among: tuple[StoredParameter, ...]) -> int:
        """A number for a tuple of stored layouts, the same for equal tuples. Long tuples that are asked for again are
        found by id."""
        known = self._wishes.get(id(among))
        if known is None:
            known = self._wishes[id(among)] = (among, self._numbers.setdefault(among, len(self._numbers)))
        return known[1]

    def _both_ways(
        self,
        template: Template,
        name: str,
        at: int,
        operand: int,
        moving: tuple[TensorType, DuplexColumn, DuplexColumn, Array, NDArray[np.bool_]],
        *,
        reduces: bool,
    ) -> UseTable:
        """One use of a parameter gathered separately, and if asked for also in a coalesced all-gather of its block."""
        needed = operand in template.alive.weights[at]
        use = self._use(self._pricers, at, *moving, needed=needed, reduces=reduces)
        if not self.together:
            return use
        goes = _goes_along(template, name, at) and not _goes_alone(template, name, at)
        other = self._use(self._prices_together(template, at), at, *moving, needed=needed, reduces=reduces, goes=goes)
        return replace(use, together=other)

    def _prices_together(self, template: Template, at: int) -> Pricers:
        """Prices for a coalesced all-gather, for the run of the template that an operator is in."""
        runs = (range(template.start), *template.held, range(template.stop, len(template.graph.operators)))
        run = next(number for number, run in enumerate(runs) if at in run)
        if run not in self._together:  # weights do not depend on the batch
            longest = longest_gather(template.graph, runs[run], self.update)
            update = replace(self.update, gathers="block")
            self._together[run] = Pricers.of(self.mesh, self.cluster, update, longest, self.paths)
        return self._together[run]

    def _use(
        self,
        pricers: Pricers,
        at: int,
        tensor: TensorType,
        made: DuplexColumn,
        wanted: DuplexColumn,
        nbytes: Array,
        narrow: NDArray[np.bool_],
        *,
        needed: bool,
        reduces: bool,
        goes: bool | None = None,
    ) -> UseTable:
        """One use at these prices. `narrow` marks the candidates of the reader that get the weight in 8 bits. With
        coalesced all-gathers, `goes` says whether this weight may take part: its gradient then waits for the others and
        needs memory."""
        every = (made.forward.index[:, None], wanted.forward.index[None, :])
        there = pricers.parameters.matrix(tensor, made.forward.distinct, wanted.forward.distinct)
        sends, gather, firsts = there.sends[every], there.seconds[every], [there.first[every]]
        if narrow.any():  # cast before the gather, on the devices that store them
            other = pricers.parameters.matrix(in_8_bits(tensor), made.forward.distinct, wanted.forward.distinct)
            cast = cast_seconds(tensor, made.forward.distinct, self.mesh.sizes, self.cluster)[made.forward.index]
            gather = np.where(narrow[None, :], other.seconds[every] + cast[:, None], gather)
            firsts = [np.where(narrow[None, :], other.first[every], firsts[0])]
            sends = sends | narrow[None, :]
        back = np.zeros_like(firsts[0])
        if reduces:
            every = (wanted.gradient.index[:, None], made.gradient.index[None, :])
            moved = reduced(tensor, self.update)
            found = pricers.gradients.matrix(moved, wanted.gradient.distinct, made.gradient.distinct)
            back = found.seconds[every].T
            firsts.append(found.first[every].T)
            if goes is not None:
                sends = sends | found.sends[every].T
        return UseTable(
            consumer=at,
            needed=needed,
            gather=gather,
            reduce=back,
            gathered=np.where(sends, nbytes[None, :], 0.0),
            first_gather=firsts[0] if goes else None,
            first_reduce=(firsts[1] if reduces else np.zeros_like(back)) if goes else None,
        )


def _launched_ahead(
    template: Template, operators: Sequence[OperatorTable], edges: Sequence[EdgeTable], shares: Shares
) -> tuple[tuple[OperatorTable, ...], tuple[EdgeTable, ...]]:
    """Operators and edges whose kernels and collectives count with shares; launches count for the rest."""
    kinds = [template.kind_of(at) for at in range(len(operators))]
    counted = tuple(_counted(table, shares[kind]) for kind, table in zip(kinds, operators, strict=True))
    return counted, tuple(_scaled(table, shares[kinds[table.edge.consumer]]) for table in edges)


def _added_up(
    template: Template, parameters: Sequence[ParameterTable], shares: Shares | None
) -> tuple[ParameterTable, ...]:
    """Parameters with the price of gradient accumulation: its kernels count with the share of the backward pass of
    their readers, its launches for the rest. Without shares, kernels wait for their launches. A parameter that several
    kinds of blocks share may be accumulated in any of them, so the least price counts."""

    def seconds(table: ParameterTable) -> Array:
        prices = table.prices
        if shares is None:
            return prices.accumulation + prices.late
        backs = sorted({shares[template.kind_of(use.consumer)][1] for use in table.uses})
        ways = [share * prices.accumulation + (1 - share) * prices.launches for share in backs]
        return np.minimum.reduce(ways) if ways else prices.accumulation

    return tuple(
        replace(table, prices=replace(table.prices, accumulation=seconds(table)))
        if table.prices.launches.any()
        else table
        for table in parameters
    )


def _counted(table: OperatorTable, shares: tuple[float, float]) -> OperatorTable:
    """An operator whose kernels count with a share in each pass; its launches count for the rest."""
    prices = table.prices
    (late, back), (first, second) = prices.late, prices.host
    second = second if prices.backward.any() else np.zeros_like(second)

    def forward(share: float) -> OperatorPrices:
        seconds = share * (prices.forward - late) + (1 - share) * first
        return replace(prices, forward=seconds, inner_forward=share * prices.inner_forward)

    there, again = shares
    counted = replace(
        forward(there),
        backward=again * (prices.backward - back) + (1 - again) * second,
        inner_backward=again * prices.inner_backward,
    )
    return replace(table, prices=counted, again=None if there == again else forward(again))


def _scaled(table: EdgeTable, shares: tuple[float, float]) -> EdgeTable:
    """An edge whose collectives count with a share in each pass."""
    there, back = shares
    if there == back == 1:
        return table
    beneath = None if table.beneath is None else min(shares) * table.beneath
    under = None if table.under is None else (min(shares) * table.under[0], back * table.under[1])
    later = None if table.later is None else replace(table.later, seconds=back * table.later.seconds)
    return replace(
        table,
        forward=there * table.forward,
        backward=back * table.backward,
        under=under,
        beneath=beneath,
        later=later,
        share_again=back / there,
    )


def _spread(pricer: RedistributionPricer, tensor: TensorType, source: LayoutColumn, target: LayoutColumn) -> Array:
    """Redistribution seconds for every pair of candidates."""
    matrix = pricer.matrix(tensor, source.distinct, target.distinct)
    seconds: Array = matrix.seconds[source.index[:, None], target.index[None, :]]
    return seconds


def _place_of(template: Template, edge: ValueEdge) -> int:
    """Which of the named results of its producer an edge carries."""
    results = template.graph.operators[edge.producer].results
    return [name for name in results if name is not None].index(edge.name)


def _same(made: LayoutColumn, wanted: LayoutColumn) -> NDArray[np.bool_]:
    """Whether two candidates have equal layouts, (K_made, K_wanted)."""
    place = {layout: i for i, layout in enumerate(made.distinct)}
    wanted_in_made = np.array([place.get(layout, -1) for layout in wanted.distinct])
    same: NDArray[np.bool_] = made.index[:, None] == wanted_in_made[wanted.index][None, :]
    return same


def _narrow(template: Template, at: int, operand: int, candidates: Candidates) -> NDArray[np.bool_]:
    """Which candidates of an operator read an operand in 8 bits, (K,)."""
    rule, count = rule_of(template.graph, template.graph.operators[at]), len(candidates.strategies)
    among = count if candidates.narrow is None else candidates.narrow
    return np.arange(count) < (among if operand in rule.narrow else 0)


def _goes_along(template: Template, name: str, at: int) -> bool:
    """Whether a weight that an operator reads may be part of a coalesced all-gather
    (`planner.plan.layout.block_gathers`)."""
    graph = template.graph
    op = graph.operators[at]
    alone = tuple(graph.consumers.get(name, ())) == (at,) and op.operands.count(name) == 1
    goes = name in graph.differentiable or not graph.trains
    return alone and goes and rule_of(graph, op).op_class not in ("view", "copy")


def _goes_alone(template: Template, name: str, at: int) -> bool:
    """Whether a weight is the only one before the blocks that could be part of a coalesced all-gather: it is then
    gathered when it is used (`planner.plan.layout.block_gathers`)."""
    graph, before = template.graph, template.start if template.blocks.count else len(template.graph.operators)
    if at >= before:
        return False
    uses = ((other, reader) for reader in range(before) for other in graph.operators[reader].operands if other != name)
    return not any(other in graph.parameter_names and _goes_along(template, other, reader) for other, reader in uses)


def _by_samples(rule: Rule, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """The strategies that cut the results along their first dim or not at all; all strategies if there are none.

    Meant for values that several operators read and that have no gradient, such as masks. A reader takes its part of a
    full copy without a collective. Finer cuts would save little work, once, and each layout would be another state of
    the boundary between blocks, multiplying the number of states.
    """
    first = {factor for dims in rule.results for factor in (dims[0] if dims else ())}
    found = tuple(strategy for strategy in strategies if all(choice is None or choice in first for choice in strategy))
    return found or strategies
