"""The tables of parameters: their stored layouts, what each costs per step, and what each use costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Cluster
from planner.graph.fp8 import Fp8, delayed_scales, history_bytes
from planner.graph.operator_graph import TensorType
from planner.limits import check
from planner.plan.layout.block_gathers import longest_gather
from planner.pricing import ParameterPrices, Paths, Pricers, price_parameter
from planner.pricing.narrow_weights import cast_seconds, in_8_bits
from planner.pricing.parameter_price import reduced
from planner.sharding.mesh import Mesh
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter, legal_stored, own_copies, with_homes
from planner.sharding.update import Update
from planner.strategy_search.request.offload import NOTHING, Offload
from planner.strategy_search.request.restriction import Restriction
from planner.strategy_search.request.template import Template
from planner.strategy_search.tables.candidates import Candidates, DuplexColumn, LayoutColumn
from planner.strategy_search.tables.cost_table import OperatorTable, ParameterTable, UseTable
from planner.strategy_search.tables.dominance import among as priced_among
from planner.strategy_search.tables.dominance import undominated

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moving:
    """A weight on its way from its stored layouts to a reader: the layouts in which it is `made` and `wanted`, its
    `nbytes` under the candidates of the reader, and which of these read it in 8 bits."""

    tensor: TensorType
    made: DuplexColumn
    wanted: DuplexColumn
    nbytes: Array
    narrow: NDArray[np.bool_]


@dataclass(kw_only=True)
class ParameterTables:
    """Makes the tables of parameters on one mesh. Attributes as for `TableBuilder`; `pricers` has the prices for a
    weight that is gathered separately."""

    mesh: Mesh
    cluster: Cluster
    precision: str
    optimizer: str
    update: Update
    offload: Offload
    together: bool
    dominated: bool
    fp8: Fp8
    paths: Paths
    pricers: Pricers

    def __post_init__(self) -> None:
        self._together: dict[int, Pricers] = {}  # per run of the template
        self._wishes: dict[int, tuple[tuple[StoredParameter, ...], int]] = {}  # by id
        self._numbers: dict[tuple[StoredParameter, ...], int] = {}
        self._stored: dict[object, tuple[tuple[StoredParameter, ...], ParameterPrices, DuplexColumn]] = {}
        self._uses: dict[tuple[str, int, int], tuple[DuplexColumn, DuplexColumn, Array, UseTable]] = {}

    def table(
        self,
        template: Template,
        name: str,
        operators: Sequence[OperatorTable] | Mapping[int, OperatorTable],
        restriction: Restriction | None,
    ) -> ParameterTable:
        """The table of a parameter whose readers have these tables."""
        check()
        graph = template.graph
        trainable = name in graph.differentiable
        local = trainable and self.update.is_local(name)
        stored, prices, made = self._priced(template, name, restriction, trainable, local)
        uses = [
            self._use_of(template, name, at, operand, operators[at], made, reduces=trainable and not local)
            for at in sorted(set(graph.consumers.get(name, ())))
            for operand, used in enumerate(graph.operators[at].operands)
            if used == name
        ]
        return ParameterTable(name=name, stored=stored, prices=prices, uses=tuple(uses))

    def _priced(
        self, template: Template, name: str, restriction: Restriction | None, trainable: bool, local: bool
    ) -> tuple[tuple[StoredParameter, ...], ParameterPrices, DuplexColumn]:
        """The layouts in which a parameter may be stored, their prices, and the layouts of weight and gradient."""
        graph = template.graph
        tensor = graph.types[name]
        among = None if restriction is None else restriction.stored(name, tensor, trainable, self.mesh)
        if local:
            among = (own_copies(len(self.mesh.axes)),)
        states = self.offload.optimizer if trainable else NOTHING.optimizer
        weights = self.offload.weights if name in template.every_own_parameter else NOTHING.weights
        decided = (at for at in graph.consumers.get(name, ()) if at not in template.either)
        readers = (graph.operators[at] for at in decided)
        scales = delayed_scales(readers, graph.types).get(name) if self.fp8.delayed else None
        optimizer = template.optimizer_of(self.optimizer, name)
        key = (tensor, trainable, None if among is None else self._one_of(among), local, weights, scales, optimizer)
        if key not in self._stored:
            stored = legal_stored(tensor.shape, self.mesh.sizes, trainable) if among is None else among
            if states != NOTHING.optimizer or weights != NOTHING.weights:
                stored = with_homes(stored, states, weights)
            prices = price_parameter(
                tensor, trainable, stored, self.precision, optimizer, self.pricers, self.update, local,
                trains=graph.trains,
            )  # fmt: skip
            if scales is not None:
                prices = replace(prices, state=prices.state + history_bytes(self.fp8, scales))
            if not self.dominated:
                kept = undominated(stored, prices)
                stored, prices = tuple(stored[place] for place in kept), priced_among(prices, kept)
            column = DuplexColumn(
                forward=LayoutColumn.of([s.weight for s in stored]),
                gradient=LayoutColumn.of([s.gradient for s in stored]),
            )
            self._stored[key] = (stored, prices, column)
        return self._stored[key]

    def _one_of(self, among: tuple[StoredParameter, ...]) -> int:
        """A number for a tuple of stored layouts, the same for equal tuples. Long tuples that are asked for again are
        found by id."""
        known = self._wishes.get(id(among))
        if known is None:
            known = self._wishes[id(among)] = (among, self._numbers.setdefault(among, len(self._numbers)))
        return known[1]

    def _use_of(
        self,
        template: Template,
        name: str,
        at: int,
        operand: int,
        reader: OperatorTable,
        made: DuplexColumn,
        *,
        reduces: bool,
    ) -> UseTable:
        """One use of a parameter, usually the same for every micro-batch size."""
        wanted, nbytes = reader.candidates.operands[operand], reader.prices.operands[operand]
        known = self._uses.get((name, at, operand))
        if known is None or known[:2] != (made, wanted) or not np.array_equal(known[2], nbytes):
            narrow = _narrow(template, at, operand, reader.candidates)
            moving = _Moving(tensor=template.graph.types[name], made=made, wanted=wanted, nbytes=nbytes, narrow=narrow)
            use = self._both_ways(template, name, at, operand, moving, reduces=reduces)
            known = self._uses[name, at, operand] = (made, wanted, nbytes, use)
        return known[3]

    def _both_ways(
        self, template: Template, name: str, at: int, operand: int, moving: _Moving, *, reduces: bool
    ) -> UseTable:
        """One use of a parameter gathered separately, and if asked for also in a coalesced all-gather of its block."""
        needed = operand in template.alive.weights[at]
        use = self._use(self.pricers, at, moving, needed=needed, reduces=reduces)
        if not self.together:
            return use
        goes = _goes_along(template, name, at) and not _goes_alone(template, name, at)
        other = self._use(self._prices_together(template, at), at, moving, needed=needed, reduces=reduces, goes=goes)
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
        moving: _Moving,
        *,
        needed: bool,
        reduces: bool,
        goes: bool | None = None,
    ) -> UseTable:
        """One use at these prices. With coalesced all-gathers, `goes` says whether this weight may take part: its
        gradient then waits for the others and needs memory."""
        tensor, made, wanted, narrow = moving.tensor, moving.made, moving.wanted, moving.narrow
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
            gathered=np.where(sends, moving.nbytes[None, :], 0.0),
            first_gather=firsts[0] if goes else None,
            first_reduce=(firsts[1] if reduces else np.zeros_like(back)) if goes else None,
        )


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
