"""Cost tables of a template on one mesh and one micro-batch size: every number that does not depend on the pipeline, on
recomputation or on how many micro-batches there are. `stage_problem` weighs them.

One variable per operator (its strategies) and per parameter (its stored layouts). Seconds are per micro-batch or once a
step, bytes per device.
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

_CELL_BYTES = 24  # of an edge for each pair of candidates: seconds forward and backward, bytes; some are shared


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorTable:
    """One operator: candidates (K), prices, bytes kept for its backward pass, of those the ones that nothing outside of
    its block reads (`own`), bytes that live while it runs, and the bytes of its `weights` where each is gathered by
    itself. `again` has its forward pass where that runs in the backward pass, if it counts otherwise there."""

    candidates: Candidates
    prices: OperatorPrices
    kept: Array
    own: Array
    transient: Array
    weights: Array
    again: OperatorPrices | None = None

    @property
    def prices_again(self) -> OperatorPrices:
        """What its forward pass takes in the backward pass."""
        return self.prices if self.again is None else self.again


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeTable:
    """One edge: seconds forward and backward, bytes kept, and those of them that nobody but the consumer's block reads
    (`own`), (K_producer, K_consumer) each. `under` has seconds that are saved at once, and again, while the product
    runs whose result the edge takes; None where there is none. `beneath` has all that is saved, forward and backward,
    while any product runs. `later` has those that are saved where an operand comes again for products whose results are
    kept. In the backward pass the forward seconds count with `share_again` of what they are."""

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
    """One use of a parameter, (K, K_consumer) each: seconds to gather the weight and to bring its gradient back, and
    the bytes of the weight where gathering gives it memory of its own. `needed` says whether the backward pass reads
    the weight. `together` is the same use where the weights of a block go together, None where that is not asked for;
    in it `first_*` are the seconds of the first message of each way, which may travel while other blocks run: None
    where the weight goes by itself."""

    consumer: int
    needed: bool
    gather: Array
    reduce: Array
    gathered: Array
    together: "UseTable | None" = None
    first_gather: Array | None = None
    first_reduce: Array | None = None

    def only(self, stored: int) -> "UseTable":
        """The same of one stored layout alone."""
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
    """One parameter: stored layouts (K), prices once a step, and its uses."""

    name: str
    stored: tuple[StoredParameter, ...]
    prices: ParameterPrices
    uses: tuple[UseTable, ...]

    def only(self, stored: int) -> "ParameterTable":
        """The same with one of its stored layouts."""
        row = slice(stored, stored + 1)
        return replace(
            self,
            stored=self.stored[row],
            prices=ParameterPrices(**{one.name: getattr(self.prices, one.name)[row] for one in fields(self.prices)}),
            uses=tuple(use.only(stored) for use in self.uses),
        )


Launched: TypeAlias = tuple[tuple[OperatorTable, ...], tuple[EdgeTable, ...], tuple[ParameterTable, ...], Shares | None]
"""Tables in which kernels and messages count for shares, and launches for the rest; and the shares."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTables:
    """All tables of a template.

    `carried_bytes` has the local bytes of each carried value under its producer's candidates. `shares` is how much
    kernels count beside launches, where they do. `apart` has all tables with launches counted by pass and kind of
    block, where these differ: that proves something of single micro-batches and of pipelines only
    (`planner.strategy_search.tables.launches`).
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
        """The same with launches counted by pass and kind of block."""
        if self.apart is None:
            return self
        operators, edges, parameters, shares = self.apart
        return replace(self, operators=operators, edges=edges, parameters=parameters, apart=None, shares=shares)

    def storing(self, stored: Mapping[str, int]) -> "CostTables":
        """The same, with some parameters in one of their stored layouts, and launches counted in one way."""
        if not stored:
            return self
        parameters = tuple(one.only(stored[one.name]) if one.name in stored else one for one in self.parameters)
        return replace(self, parameters=parameters, apart=None)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tables of edges and of uses of parameters, which are most of them."""
        uses = [use for parameter in self.parameters for use in parameter.uses]
        every = self.edges if self.apart is None else (*self.edges, *self.apart[1])
        edges = {id(edge.forward): edge.forward.nbytes for edge in every}  # which several may share
        return 4 * sum(edges.values()) + sum(8 * use.gather.nbytes for use in uses)


@dataclass(kw_only=True)
class TableBuilder:
    """Builds the tables for one mesh; what they share between micro-batch sizes is made once. `together` asks for what
    weights take that a block gathers together, beside what each takes by itself; `dominated` keeps stored layouts that
    another beats in everything. With `ahead` hosts launch ahead of the kernels, so that a block takes as long as its
    kernels and messages, or as its launches: counted is a weighted mean of both. `paths` between layouts are shared by
    builders of meshes on which they are the same. With `overlapped` collectives beside linear layers travel under their
    products, with `exchanged` the rows of experts under other work of their block, and where passes are `paired` all of
    them under another micro-batch's. Layers whose scales are delayed have the histories that `fp8` says. `alike` keeps
    every candidate of layers that may be in fp8 or not, as tables of other groups of devices are to have the same.
    Messages count as parts of a bucket that all `gradients` of a model, so many bytes, fill half.
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
        self._together: dict[int, Pricers] = {}  # by run of the template
        self._under = UnderProducts(mesh=self.mesh, cluster=self.cluster, pricer=self._pricers.activations)
        self._prices: dict[tuple[int, tuple[bool, ...], int], tuple[Rule, Candidates, OperatorPrices]] = {}
        self._wishes: dict[int, tuple[tuple[StoredParameter, ...], int]] = {}  # by identity
        self._numbers: dict[tuple[StoredParameter, ...], int] = {}
        self._parameters: dict[object, tuple[tuple[StoredParameter, ...], ParameterPrices, DuplexColumn]] = {}
        self._twofold: dict[tuple[int, bytes, bytes], tuple[Candidates, Candidates]] = {}
        self._uses: dict[tuple[str, int, int], tuple[DuplexColumn, DuplexColumn, Array, UseTable]] = {}
        self._edges: dict[object, tuple[object, EdgeTable]] = {}  # with what keeps its identity

    def build(
        self, template: Template, restriction: Restriction | None = None, like: CostTables | None = None
    ) -> CostTables:
        """Tables of a template whose graph has the batch of one micro-batch, of all candidates or of those that a
        restriction leaves. `like` are tables of this template, mesh and cluster whose restriction leaves operators the
        same candidates: what is known of operators and edges is taken from there."""
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
        """The table of one operator and, if asked for, those of the parameters that nothing else reads."""
        self._prices.clear()
        table = self._operator(template, index, self._own(template, index, restriction))
        graph = template.graph
        operands = graph.operators[index].operands if parameters else ()
        names = dict.fromkeys(name for name in operands if name in graph.parameter_names)
        own = (name for name in names if set(graph.consumers[name]) == {index})
        return table, tuple(self._parameter(template, name, {index: table}, restriction) for name in own)

    def _candidates(self, template: Template, restriction: Restriction | None) -> list[Candidates]:
        """The candidates of every operator. Where a kind of block makes a lane, those that all other kinds have too."""
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
        """The candidates of an operator by itself."""
        check()
        graph = template.graph
        op = graph.operators[index]
        rule = rule_of(graph, op)
        results = [name for name in op.results if name is not None]
        if not any(name in graph.data_dependent for name in results):  # the same in every step: computed everywhere
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
        """Candidates of a linear layer in fp8 and without it; in fp8 only where that is better at anything, unless
        other groups of devices are to have the same."""
        every = np.arange(len(candidates.strategies))
        both = self._ways(candidates, every, every)
        if self.alike:
            return both
        needed = ~dominated_by_second(self._priced(template, index, both))
        return self._ways(candidates, np.flatnonzero(needed), every)

    def _ways(self, candidates: Candidates, narrow: Indices, wide: Indices) -> Candidates:
        """`Candidates.either`, once for the same."""
        key = (id(candidates), narrow.tobytes(), wide.tobytes())
        if key not in self._twofold:
            self._twofold[key] = (candidates, candidates.either(narrow, wide))
        return self._twofold[key][1]

    def _priced(self, template: Template, index: int, candidates: Candidates) -> OperatorPrices:
        """What an operator takes under its candidates."""
        graph = template.graph
        op = graph.operators[index]
        rule = rule_of(graph, op)
        results = [name for name in op.results if name is not None]
        graded = tuple(name in graph.differentiable for name in op.operands)
        key = (id(rule), graded, id(candidates))
        if key not in self._prices:
            types = ([graph.types[name] for name in op.operands], [graph.types[name] for name in results])

            def priced(rule: Rule, strategies: Sequence[Strategy]) -> OperatorPrices:
                return price_operator(rule, strategies, *types, graded, self.mesh, self.cluster)

            some = candidates.narrow
            if some is None:
                prices = priced(rule, candidates.strategies)
            else:
                plain = priced(rule_of(graph, without_fp8(op)), candidates.strategies[some:])
                prices = joined(priced(rule, candidates.strategies[:some]), plain) if some else plain
            self._prices[key] = (rule, candidates, prices)  # the first two keep their identities
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
        """The table of an edge, whose numbers those share that join the same: of blocks that repeat before the ones
        that are folded, say."""
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
        """An operator with what the exchange of its experts travels under other work."""
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
        """An edge with what its collective travels under products."""
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
        """Whether a shared value of the block, which nobody else keeps, is kept as it comes, and gathered again for the
        backward pass."""
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
                    known = self._uses.get((name, at, operand))  # the same for every micro-batch, as a rule
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
        """A number of some stored layouts, the same for equal ones: of many, which are asked for again, found by their
        identity."""
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
        """One use of a parameter by itself and, where that is asked for, together with the others of its block."""
        needed = operand in template.alive.weights[at]
        use = self._use(self._pricers, at, *moving, needed=needed, reduces=reduces)
        if not self.together:
            return use
        goes = _goes_along(template, name, at) and not _goes_alone(template, name, at)
        other = self._use(self._prices_together(template, at), at, *moving, needed=needed, reduces=reduces, goes=goes)
        return replace(use, together=other)

    def _prices_together(self, template: Template, at: int) -> Pricers:
        """Of weights that go together in the run of a template that an operator is in."""
        runs = (range(template.start), *template.held, range(template.stop, len(template.graph.operators)))
        run = next(number for number, run in enumerate(runs) if at in run)
        if run not in self._together:  # whatever the batch, weights are as large
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
        """One use by these prices, of candidates of its reader of which some get it `narrow`, in 8 bits. Where weights
        of a block go together, `goes` says whether this one may: its gradient waits for others then, and takes memory,
        too."""
        every = (made.forward.index[:, None], wanted.forward.index[None, :])
        there = pricers.parameters.matrix(tensor, made.forward.distinct, wanted.forward.distinct)
        sends, gather, firsts = there.sends[every], there.seconds[every], [there.first[every]]
        if narrow.any():  # cast where they are stored
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
    """Operators whose kernels, and edges whose messages, count for shares, and launches for the rest."""
    kinds = [template.kind_of(at) for at in range(len(operators))]
    counted = tuple(_counted(table, shares[kind]) for kind, table in zip(kinds, operators, strict=True))
    return counted, tuple(_scaled(table, shares[kinds[table.edge.consumer]]) for table in edges)


def _added_up(
    template: Template, parameters: Sequence[ParameterTable], shares: Shares | None
) -> tuple[ParameterTable, ...]:
    """Parameters whose gradients are added up by kernels that count for shares of the backward pass of their readers,
    and their launches for the rest; without shares kernels that wait for their launches. What kinds of blocks share may
    be added up in any of them."""

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
    """An operator whose kernels count for a share in each pass, and its launches for the rest."""
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
    """An edge whose messages count for a share in each pass."""
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
    """Which of the results that its producer names an edge brings."""
    results = template.graph.operators[edge.producer].results
    return [name for name in results if name is not None].index(edge.name)


def _same(made: LayoutColumn, wanted: LayoutColumn) -> NDArray[np.bool_]:
    """Whether two candidates have equal layouts, (K_made, K_wanted)."""
    place = {layout: i for i, layout in enumerate(made.distinct)}
    wanted_in_made = np.array([place.get(layout, -1) for layout in wanted.distinct])
    same: NDArray[np.bool_] = made.index[:, None] == wanted_in_made[wanted.index][None, :]
    return same


def _narrow(template: Template, at: int, operand: int, candidates: Candidates) -> NDArray[np.bool_]:
    """Which candidates of an operator get an operand in 8 bits, (K,)."""
    rule, count = rule_of(template.graph, template.graph.operators[at]), len(candidates.strategies)
    among = count if candidates.narrow is None else candidates.narrow
    return np.arange(count) < (among if operand in rule.narrow else 0)


def _goes_along(template: Template, name: str, at: int) -> bool:
    """Whether a weight that an operator reads may go together with others (`planner.plan.layout.block_gathers`)."""
    graph = template.graph
    op = graph.operators[at]
    alone = tuple(graph.consumers.get(name, ())) == (at,) and op.operands.count(name) == 1
    goes = name in graph.differentiable or not graph.trains
    return alone and goes and rule_of(graph, op).op_class not in ("view", "copy")


def _goes_alone(template: Template, name: str, at: int) -> bool:
    """Whether a weight that an operator reads is the only one before the blocks that might go with others: it is
    gathered when it is used (`planner.plan.layout.block_gathers`)."""
    graph, before = template.graph, template.start if template.blocks.count else len(template.graph.operators)
    if at >= before:
        return False
    uses = ((other, reader) for reader in range(before) for other in graph.operators[reader].operands if other != name)
    return not any(other in graph.parameter_names and _goes_along(template, other, reader) for other, reader in uses)


def _by_samples(rule: Rule, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """Of strategies those that cut the results along their first dim or not at all; all where that leaves none.

    For what several operators read and no gradient flows to, such as masks. A reader takes its piece of what it finds
    whole without a message, so finer cuts save a little work once, and every layout of it would be a state of the
    boundary between blocks, times all states of the rest.
    """
    first = {factor for dims in rule.results for factor in (dims[0] if dims else ())}
    found = tuple(strategy for strategy in strategies if all(choice is None or choice in first for choice in strategy))
    return found or strategies
