"""Builds the cost tables of templates on one mesh (`cost_table` says what they hold)."""

import math
from dataclasses import dataclass, field, replace

from hardware_profiles import Bytes, Cluster
from planner.graph.fp8 import NO_FP8, Fp8
from planner.limits import room
from planner.pricing import Paths, Pricers
from planner.pricing.bucket_size import filled, sized
from planner.sharding.mesh import Mesh
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.request.offload import NOTHING, Offload
from planner.strategy_search.request.restriction import Restriction
from planner.strategy_search.request.template import Template
from planner.strategy_search.tables.cost_table import CostTables, OperatorTable, ParameterTable
from planner.strategy_search.tables.counted_launches import added_up, launched_ahead
from planner.strategy_search.tables.edge_tables import EdgeTables
from planner.strategy_search.tables.launches import kernels_shares
from planner.strategy_search.tables.operator_tables import OperatorTables
from planner.strategy_search.tables.parameter_tables import ParameterTables

_CELL_BYTES = 24  # per pair of candidates of an edge: seconds forward and backward, bytes; some are shared


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
        mesh, cluster = self.mesh, self.cluster
        self.update = sized(self.update, mesh, cluster, self.gradients)
        counted = replace(filled(self.update, self.gradients), gathers="each")
        pricers = Pricers.of(mesh, cluster, counted, paths=self.paths)
        self._operators = OperatorTables(mesh=mesh, cluster=cluster, optimizer=self.optimizer, alike=self.alike)
        self._edges = EdgeTables(mesh=mesh, cluster=cluster, pricer=pricers.activations)
        self._parameters = ParameterTables(
            mesh=mesh,
            cluster=cluster,
            precision=self.precision,
            optimizer=self.optimizer,
            update=self.update,
            offload=self.offload,
            together=self.together,
            dominated=self.dominated,
            fp8=self.fp8,
            paths=self.paths,
            pricers=pricers,
        )

    def build(
        self, template: Template, restriction: Restriction | None = None, like: CostTables | None = None
    ) -> CostTables:
        """The tables of a template whose graph has the batch of one micro-batch, for all candidates or those of a
        restriction. `like` are tables of the same template, mesh and cluster whose operators have the same candidates:
        operators and edges are reused from them."""
        if like is not None:
            return self._sharing(like, template, restriction)
        graph = template.graph
        self._operators.forget()
        self._edges.forget()
        lists = self._operators.candidates(template, restriction)
        if self.overlapped and not self.alike:
            lists = self._edges.told_apart(template, lists)
        operators = tuple(self._operators.table(template, index, own) for index, own in enumerate(lists))
        sizes = [len(table.candidates.strategies) for table in operators]
        cells = sum(sizes[edge.producer] * sizes[edge.consumer] for edge in template.edges)
        room(_CELL_BYTES * cells, f"the cost tables of {len(template.edges)} edges between operators")
        edges = tuple(self._edges.table(template, edge, operators) for edge in template.edges)
        if self.exchanged:
            operators = tuple(
                self._operators.exchanged(template, index, operators, paired=self.paired)
                for index in range(len(operators))
            )
        if self.overlapped:
            edges = tuple(self._edges.overlapped(template, table, lists) for table in edges)
        parameters = tuple(
            self._parameters.table(template, one.name, operators, restriction) for one in graph.parameters
        )
        apart, shares = None, None
        if self.ahead:
            shares, differing = kernels_shares(template, operators, edges, parameters)
            if differing is not None:
                own = added_up(template, parameters, differing)
                apart = (*launched_ahead(template, operators, edges, differing), own, differing)
            operators, edges = launched_ahead(template, operators, edges, shares)
        parameters = added_up(template, parameters, shares)
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

    def _sharing(self, like: CostTables, template: Template, restriction: Restriction | None) -> CostTables:
        """Tables with the operators and edges of others, and their own parameters."""
        parameters = tuple(
            self._parameters.table(template, one.name, like.operators, restriction) for one in template.graph.parameters
        )
        apart = like.apart
        if apart is not None:
            apart = (*apart[:2], added_up(template, parameters, apart[3]), apart[3])
        added = added_up(template, parameters, like.shares)
        return replace(like, parameters=added, update=self.update, apart=apart)

    def alone(
        self, template: Template, index: int, restriction: Restriction | None, *, parameters: bool
    ) -> tuple[OperatorTable, tuple[ParameterTable, ...]]:
        """The table of one operator and, if asked for, those of the parameters that no other operator reads."""
        self._operators.forget()
        table = self._operators.table(template, index, self._operators.own(template, index, restriction))
        graph = template.graph
        operands = graph.operators[index].operands if parameters else ()
        names = dict.fromkeys(name for name in operands if name in graph.parameter_names)
        own = (name for name in names if set(graph.consumers[name]) == {index})
        return table, tuple(self._parameters.table(template, name, {index: table}, restriction) for name in own)
