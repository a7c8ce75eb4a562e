"""The tables of operators: their candidates, and what each candidate costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hardware_profiles import Cluster, Software
from planner.graph.blocks import IDENTITY
from planner.graph.fp8 import without_fp8
from planner.limits import check
from planner.plan.layout.expert_overlap import OP_CLASS
from planner.pricing import OperatorPrices, price_operator
from planner.pricing.operator_price import dominated_by_second, joined, transient_bytes
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy
from planner.sharding.rules import rule_of
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.restriction import Restriction
from planner.strategy_search.request.template import Template
from planner.strategy_search.tables.candidates import CandidateLists, Candidates, Indices
from planner.strategy_search.tables.cost_table import OperatorTable
from planner.strategy_search.tables.under_experts import beside_experts, saved_by_exchange, whole_exchange


@dataclass(kw_only=True)
class OperatorTables:
    """Makes the tables of operators on one mesh. `alike` as for `TableBuilder`."""

    mesh: Mesh
    cluster: Cluster
    optimizer: str
    alike: bool = False

    def __post_init__(self) -> None:
        self._lists = CandidateLists(mesh=self.mesh)
        self._prices: dict[tuple[int, tuple[bool, ...], int], tuple[Rule, Candidates, OperatorPrices]] = {}
        self._twofold: dict[tuple[int, bytes, bytes], tuple[Candidates, Candidates]] = {}

    def forget(self) -> None:
        """Drop the prices, which depend on the micro-batch."""
        self._prices.clear()

    def candidates(self, template: Template, restriction: Restriction | None) -> list[Candidates]:
        """The candidates of every operator. Operators of several kinds of blocks that make the same lane have only the
        candidates that all of them have."""
        found = [self.own(template, index, restriction) for index in range(len(template.graph.operators))]
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

    def own(self, template: Template, index: int, restriction: Restriction | None) -> Candidates:
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
        graded = graph.graded(op)
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

    def table(self, template: Template, index: int, candidates: Candidates) -> OperatorTable:
        """The table of an operator with these candidates."""
        check()
        graph, alive = template.graph, template.alive
        op = graph.operators[index]
        rule = rule_of(graph, op)
        results = [name for name in op.results if name is not None]
        prices = self._priced(template, index, candidates)
        made = [place for place, name in enumerate(results) if name in alive.kept]
        if kept_in_pieces(template, index, self.cluster.software):
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

    def exchanged(
        self, template: Template, index: int, operators: Sequence[OperatorTable], *, paired: bool
    ) -> OperatorTable:
        """An operator with the overlap of its exchange of experts subtracted."""
        table, op = operators[index], template.graph.operators[index]
        if rule_of(template.graph, op).op_class != OP_CLASS or not table.prices.inner_forward.any():
            return table
        if paired:
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


def kept_in_pieces(template: Template, index: int, software: Software) -> bool:
    """Whether a shared value of the block, which nothing else keeps, is kept in the layout in which it arrives, and
    gathered again for the backward pass."""
    op = template.graph.operators[index]
    if op.op != IDENTITY or not template.in_block(index) or not software.regathers:
        return False
    if not template.alive.trains:
        return False
    saved, edges = template.alive.saved, template.leaving.get(index, ())
    kinds = {edge.kind for edge in edges if edge.operand in saved[edge.consumer]}
    return op.results[0] in template.alive.kept and kinds == {"inside"}


def _by_samples(rule: Rule, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """The strategies that cut the results along their first dim or not at all; all strategies if there are none.

    Meant for values that several operators read and that have no gradient, such as masks. A reader takes its part of a
    full copy without a collective. Finer cuts would save little work, once, and each layout would be another state of
    the boundary between blocks, multiplying the number of states.
    """
    first = {factor for dims in rule.results for factor in (dims[0] if dims else ())}
    found = tuple(strategy for strategy in strategies if all(choice is None or choice in first for choice in strategy))
    return found or strategies
