"""Configurations evaluated: tables built and kept, pieces cut, prices tried (evaluation.py)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels import usable_memory
from planner.pricing.bucket_size import flat_bytes
from planner.search.assemble import Assembly
from planner.search.cost_table import CostTables, TableBuilder
from planner.search.cutting import cut
from planner.search.decided import decided_of
from planner.search.duals import Duals, Setting, first_bounds, setting_of
from planner.search.evaluation import Evaluation, Outcome, check_virtual_stages
from planner.search.pieces import Chain
from planner.search.propagation import fixed_of, propagated
from planner.search.recursive import RecursivePlan, Task, plan_recursively, refine
from planner.search.request import SearchRequest
from planner.search.space import Bounds, Configuration
from planner.search.template import Template
from planner.sharding.mesh import build_mesh
from planner.sharding.rescale import rescale_batch
from planner.sharding.rule import pieces_of
from planner.sharding.rules import rule_of


class Family:
    """Configurations that differ in the number of micro-batches only, and what their largest micro-batch proves.

    k times the batch takes at most k times as long, and holds k times as much, so the pieces of the largest micro-batch
    bound those of its k-th parts: under the strategies that are legal for them.
    """

    def __init__(self, chain: Chain, micro_batches: int, capacity: float, scaling: "Scaling") -> None:
        self.chain, self.micro_batches, self.capacity, self.scaling = chain, micro_batches, capacity, scaling
        self.hint = 0.0  # a price of memory that mattered to a member
        self._duals: dict[tuple[int, float], Duals] = {}
        self._known: set[tuple[int, float, float, float]] = set()

    def step_seconds(self, members: Sequence[Configuration]) -> list[float]:
        """Least step time of each member, whatever the memory; to be asked once."""
        return first_bounds([self._of(configuration) for configuration in members])

    def priced_seconds(self, configuration: Configuration, price: float) -> float:
        """Least step time of a member with memory at a price; infinite where even the leanest choice does not fit."""
        duals, setting = self._of(configuration)
        flights = sorted({setting.flights(0), setting.flights(setting.ranks // 2)})
        tries = [(0.0, 0.0), (math.inf, flights[-1]), *((float(f"{price:.3g}"), number) for number in flights if price)]
        known = {(duals.parts, duals.weight, *one): one for one in tries}
        duals.solve_all([one for key, one in known.items() if key not in self._known])
        self._known |= known.keys()
        return float(duals.bounds(setting).min())

    def least_bytes(self, configuration: Configuration) -> float:
        """About the least bytes that a member needs; never more."""
        duals, setting = self._of(configuration)
        duals.solve(math.inf, setting.flights(setting.ranks - 1))
        return duals.least_bytes(setting)

    def _of(self, configuration: Configuration) -> tuple[Duals, Setting]:
        """What is known of a member, with micro-batches in flight counted in those of the family's chain."""
        ratio = configuration.micro_batches // self.micro_batches
        setting = setting_of(configuration, self.capacity)
        key = (ratio, setting.weight)
        if key not in self._duals:
            self._duals[key] = Duals(self.chain, setting.weight, ratio, self.scaling.allowed(ratio), columns=False)
        flights = tuple(tuple(number / ratio for number in chunks) for chunks in setting.in_flight)
        return self._duals[key], replace(setting, in_flight=flights)


@dataclass(kw_only=True)
class Engine:
    """Evaluates configurations; keeps what they share. Use it in `search`."""

    request: SearchRequest
    template: Template
    limits: Bounds

    def __post_init__(self) -> None:
        self._builders: dict[tuple[tuple[int, ...], frozenset[int]], TableBuilder] = {}
        self._tables: tuple[object, CostTables] | None = None
        self._chain: tuple[object, Chain] | None = None
        self._scaled: dict[int, Template] = {}
        self.capacity = usable_memory(self.request.cluster.device)
        if self.request.memory_limit is not None:
            device = replace(self.request.cluster.device, memory=self.request.memory_limit)
            self.capacity = min(self.capacity, usable_memory(device))
        self.buffers = self.request.cluster.software.buffers + flat_bytes(
            self.request.graph, self.request.update, self.request.cluster
        )
        self.capacity -= self.buffers

    def bound(self, configuration: Configuration) -> float:
        """Least step time, from the work alone."""
        request = self.request
        recompute = request.pinned.recompute == "full"
        return self.limits.step_seconds(configuration, request.cluster.devices, request.global_batch, recompute)

    @property
    def spreads(self) -> bool:
        """Whether what the user has decided is spread by propagation."""
        return self.request.algorithm == "sharding_propagation"

    def recursive(self, configuration: Configuration, *, sweeps: int) -> RecursivePlan | None:
        """What recursive programming makes of a configuration; the mesh is its own unless one is decided."""
        return plan_recursively(self._task(configuration, sweeps), self.capacity)

    def refined(self, configuration: Configuration, found: Assembly, seconds: float) -> RecursivePlan | None:
        """A faster plan on a mesh of more axes, by small changes to one that was found."""
        task = self._task(configuration, sweeps=1)
        if task.given:
            return None
        return refine(task, configuration.mesh, fixed_of(found), seconds, self.capacity)

    def _task(self, configuration: Configuration, sweeps: int) -> Task:
        request = self.request
        template = self._template(configuration.micro_batches)
        decided = decided_of(request.shards, request.pinned, configuration, template)
        return Task(
            template=template,
            cluster=request.cluster,
            configuration=configuration,
            precision=request.precision,
            optimizer=request.optimizer,
            update=request.update,
            offload=request.pinned.offload,
            recomputation=request.pinned.recomputation,
            decided=decided,
            given=decided is not None or request.pinned.mesh is not None,
            sweeps=sweeps,
        )

    def adopt(self, configuration: Configuration, found: RecursivePlan) -> Configuration:
        """The configuration on the mesh of a recursive plan, whose strategies are from now on its only candidates."""
        adopted = replace(configuration, mesh=found.mesh.sizes)
        template = self._template(configuration.micro_batches)
        tables = self._builder(adopted).build(template, found.chosen)
        self._tables = ((adopted.family, adopted.micro_batches), tables)
        self._chain = None
        return adopted

    def family(self, configuration: Configuration) -> Family:
        """A bound on all configurations of a family with as many micro-batches as this one, or a multiple."""
        tables = self.tables(configuration)
        part = self.request.global_batch // configuration.micro_batches
        scaling = _scaling(tables, self._scaled_to(2 * part))
        chain = cut(
            tables,
            self.request.cluster,
            recomputation=self.request.pinned.recomputation,
            stages=configuration.pipeline,
            free=scaling.hindered,
            activations=self.request.pinned.offload.activations,
        )
        return Family(chain, configuration.micro_batches, self.capacity, scaling)

    def evaluate(
        self, configuration: Configuration, *, cutoff: float = math.inf, enough: float = -math.inf, hint: float = 0.0
    ) -> Outcome:
        """The best plan of a configuration, and how good any could be (see `Evaluation`).

        Raises NothingAgreesError where what is decided, or virtual stages, cannot be had on this mesh.
        """
        chain, setting = self.chain(configuration), setting_of(configuration, self.capacity)
        check_virtual_stages(chain, setting)
        return Evaluation(chain, setting, cutoff=cutoff, enough=enough, hint=hint).run()

    def chain(self, configuration: Configuration) -> Chain:
        """The pieces of a configuration; those of the last one asked for are kept."""
        key = (configuration.family, configuration.micro_batches)
        if self._chain is None or self._chain[0] != key:
            chain = cut(
                self._spread(configuration) if self.spreads else self.tables(configuration),
                self.request.cluster,
                recomputation=self.request.pinned.recomputation,
                stages=configuration.pipeline,
                activations=self.request.pinned.offload.activations,
            )
            self._chain = (key, chain)
        return self._chain[1]

    def tables(self, configuration: Configuration) -> CostTables:
        """The cost tables of a configuration; those of the last one asked for are kept."""
        request = self.request
        key = (configuration.family, configuration.micro_batches)
        if self._tables is None or self._tables[0] != key:
            template = self._template(configuration.micro_batches)
            restriction = decided_of(request.shards, request.pinned, configuration, template)
            self._tables = (key, self._builder(configuration).build(template, restriction))
        return self._tables[1]

    def _spread(self, configuration: Configuration) -> CostTables:
        """The tables of what the user's decisions spread to (see `propagation`)."""
        request, setting = self.request, setting_of(configuration, self.capacity)
        tables = self.tables(configuration)
        fixed = propagated(tables, setting, request.cluster, request.pinned.recomputation)
        if fixed is None:
            return tables
        return self._builder(configuration).build(tables.template, fixed)

    def _builder(self, configuration: Configuration) -> TableBuilder:
        """The builder of the mesh of a configuration; what it has priced is kept."""
        key = (configuration.mesh, configuration.zigzag_axes)
        if key not in self._builders:
            request = self.request
            self._builders[key] = TableBuilder(
                mesh=build_mesh(request.cluster, configuration.mesh, zigzag=configuration.zigzag_axes),
                cluster=request.cluster,
                precision=request.precision,
                optimizer=request.optimizer,
                update=request.update,
                offload=request.pinned.offload,
            )
        return self._builders[key]

    def _template(self, micro_batches: int) -> Template:
        """The template with the batch of one micro-batch."""
        return self._scaled_to(self.request.global_batch // micro_batches)

    def _scaled_to(self, part: int) -> Template:
        if part not in self._scaled:
            graph = rescale_batch(self.template.graph, self.request.batch, part)
            self._scaled[part] = replace(self.template, graph=graph)
        return self._scaled[part]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scaling:
    """How candidates depend on the batch.

    `hindered` are operators for which a larger batch may forbid a strategy: one that splits an inner factor of a
    compound dim after the outer one, which grows with the batch, has been split completely. For all others `pieces` has
    extents that grow with the batch, and into how many pieces each candidate cuts them.
    """

    hindered: frozenset[int]
    pieces: tuple[tuple[int, int, NDArray[np.int64]], ...]  # operator, extent, pieces of each candidate

    def allowed(self, parts: int) -> dict[int, NDArray[np.bool_]]:
        """Candidates that are still legal for a batch of a `parts`-th."""
        found: dict[int, NDArray[np.bool_]] = {}
        for index, extent, pieces in self.pieces:
            legal = (extent // parts) % pieces == 0
            found[index] = found[index] & legal if index in found else legal
        return found


def _scaling(tables: CostTables, doubled: Template) -> Scaling:
    """Seen by comparing with twice the batch."""
    template, sizes = tables.template, tables.mesh.sizes
    hindered, pieces = set(), []
    for index, (op, other) in enumerate(zip(template.graph.operators, doubled.graph.operators, strict=True)):
        rule, twin = rule_of(template.graph, op), rule_of(doubled.graph, other)
        changing = [f for f, factor in enumerate(rule.factors) if factor.extent != twin.factors[f].extent]
        if any(f in changing for dims in (*rule.operands, *rule.results) for factors in dims for f in factors[:-1]):
            hindered.add(index)
            continue
        strategies = tables.operators[index].candidates.strategies
        for f in changing:
            counts = [pieces_of(rule, strategy, sizes)[f] for strategy in strategies]
            pieces.append((index, rule.factors[f].extent, np.array(counts, dtype=np.int64)))
    return Scaling(hindered=frozenset(hindered), pieces=tuple(pieces))
