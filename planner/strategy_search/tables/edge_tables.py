"""The tables of edges: what it costs to bring a value from the layout in which it is made to that which its reader
wants."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Cluster
from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import TensorType
from planner.limits import check
from planner.pricing import RedistributionPricer
from planner.sharding.mesh import Mesh
from planner.strategy_search.request.template import Template, ValueEdge
from planner.strategy_search.tables.candidates import Candidates, LayoutColumn
from planner.strategy_search.tables.cost_table import EdgeTable, OperatorTable
from planner.strategy_search.tables.operator_tables import kept_in_pieces
from planner.strategy_search.tables.products import place_of, takes_result
from planner.strategy_search.tables.under_products import Confined, UnderProducts

Array = NDArray[np.float64]


@dataclass(kw_only=True)
class EdgeTables:
    """Makes the tables of edges on one mesh; `pricer` has the prices of activations."""

    mesh: Mesh
    cluster: Cluster
    pricer: RedistributionPricer

    def __post_init__(self) -> None:
        self._edges: dict[object, tuple[object, EdgeTable]] = {}  # with the objects whose ids are in the key
        self._under = UnderProducts(mesh=self.mesh, cluster=self.cluster, pricer=self.pricer)

    def forget(self) -> None:
        """Drop everything that depends on the micro-batch."""
        self._under.clear()
        self._edges.clear()

    def table(self, template: Template, edge: ValueEdge, operators: Sequence[OperatorTable]) -> EdgeTable:
        """The table of an edge. Edges between equal ends share its arrays, for example those of repeated blocks before
        the folded ones."""
        check()
        graph, alive = template.graph, template.alive
        ends = (operators[edge.producer], operators[edge.consumer])
        in_pieces = kept_in_pieces(template, edge.consumer, self.cluster.software)
        pieces = graph.operators[edge.consumer].results[0] if in_pieces else None
        key = (
            tuple((id(one.candidates), id(one.prices)) for one in ends),
            place_of(template, edge),
            edge.operand,
            graph.types[edge.name],
            graph.returns(graph.operators[edge.consumer], edge.name),
            alive.copied(edge.consumer) if edge.operand in alive.saved[edge.consumer] else None,
            any(edge.name in kept for kept in (alive.kept, template.kept_for_next, template.kept_for_rest)),
            None if pieces is None else alive.share(pieces),
            edge.kind == "inside",
        )
        if key not in self._edges:
            self._edges[key] = (ends, self._between(template, edge, operators))
        return replace(self._edges[key][1], edge=edge)

    def _between(self, template: Template, edge: ValueEdge, operators: Sequence[OperatorTable]) -> EdgeTable:
        graph = template.graph
        made = operators[edge.producer].candidates.results[place_of(template, edge)]
        wanted = operators[edge.consumer].candidates.operands[edge.operand]
        tensor = graph.types[edge.name]
        forward = _spread(self.pricer, tensor, made.forward, wanted.forward)
        if graph.returns(graph.operators[edge.consumer], edge.name):
            backward = _spread(self.pricer, tensor, wanted.gradient, made.gradient).T
        else:
            backward = np.zeros_like(forward)
        kept, own = self._kept(template, edge, operators, _same(made.forward, wanted.forward))
        return EdgeTable(edge=edge, forward=forward, backward=backward, kept=kept, own=own)

    def _kept(
        self, template: Template, edge: ValueEdge, operators: Sequence[OperatorTable], same: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        """The bytes that an edge keeps for the backward pass of its consumer, and the part that only the block of the
        consumer reads. `same`: whether the value is made as it is wanted. All are (K_producer, K_consumer)."""
        graph, alive = template.graph, template.alive
        made = operators[edge.producer].prices.results[place_of(template, edge)][:, None]
        wanted = operators[edge.consumer].prices.operands
        kept, own, shared = np.zeros(same.shape), np.zeros(same.shape), False
        if edge.operand in alive.saved[edge.consumer]:
            share, whole = alive.copied(edge.consumer), wanted[edge.operand][None, :]
            kept = kept + share * whole
            if any(edge.name in names for names in (alive.kept, template.kept_for_next, template.kept_for_rest)):
                kept = np.where(same, 0.0, kept)
                shared = True
            own = np.where(same, 0.0, kept)  # a copy
            if self.cluster.software.regathers:  # as in `OperatorVisit._kept_copy`
                kept = np.where(made < whole, 0.0 if shared else share * made, kept)
                own = np.where(made < whole, 0.0, own)
        if kept_in_pieces(template, edge.consumer, self.cluster.software):
            pieces = np.minimum(made, wanted[0][None, :])
            kept = kept + alive.share(graph.operators[edge.consumer].results[0] or "") * pieces
        return kept, kept if edge.kind == "inside" else own

    def told_apart(self, template: Template, lists: Sequence[Candidates]) -> list[Candidates]:
        """The candidates of all operators; those of some identities told apart by the product under which their value
        is gathered."""
        found = list(lists)
        for edge in template.edges:
            if template.graph.operators[edge.consumer].op == IDENTITY:
                made = lists[edge.producer].results[place_of(template, edge)]
                found[edge.consumer] = self._under.told_apart(template, edge, made, lists)
        return found

    def overlapped(self, template: Template, table: EdgeTable, lists: Sequence[Candidates]) -> EdgeTable:
        """An edge with the overlap of its collective under products subtracted."""
        made = lists[table.edge.producer].results[place_of(template, table.edge)]
        saved = self._under.saved(template, table.edge, made, lists)
        table = self._confined(table, self._under.confined(template, table.edge, lists))
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
                beneath=beneath if table.beneath is None else table.beneath + beneath,
                later=saved.later,
            )
            self._edges[key] = ((table, saved), travelling)
        return replace(self._edges[key][1], edge=table.edge)

    def _confined(self, table: EdgeTable, confined: Confined | None) -> EdgeTable:
        """An edge with the seconds by which less is saved under its product."""
        if confined is None:
            return table
        key = (id(table.forward), id(table.backward), id(table.kept), id(table.own), id(confined))
        if key not in self._edges:
            forward, backward = table.forward + confined.forward, table.backward + confined.backward
            found = replace(
                table,
                forward=forward,
                backward=backward,
                beneath=-(confined.forward + confined.backward),
                confined=confined.forward,
            )
            self._edges[key] = ((table, confined), found)
        return replace(self._edges[key][1], edge=table.edge)


def _spread(pricer: RedistributionPricer, tensor: TensorType, source: LayoutColumn, target: LayoutColumn) -> Array:
    """Redistribution seconds for every pair of candidates."""
    matrix = pricer.matrix(tensor, source.distinct, target.distinct)
    seconds: Array = matrix.seconds[source.index[:, None], target.index[None, :]]
    return seconds


def _same(made: LayoutColumn, wanted: LayoutColumn) -> NDArray[np.bool_]:
    """Whether two candidates have equal layouts, (K_made, K_wanted)."""
    place = {layout: i for i, layout in enumerate(made.distinct)}
    wanted_in_made = np.array([place.get(layout, -1) for layout in wanted.distinct])
    same: NDArray[np.bool_] = made.index[:, None] == wanted_in_made[wanted.index][None, :]
    return same
