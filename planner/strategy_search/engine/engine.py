"""Configurations evaluated: tables built and kept, pieces cut, prices tried (evaluation.py)."""

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodels import peak_memory, planned_memory, usable_memory
from hardware_profiles import Cluster, Machine, MixedCluster, of_one_kind, parts_of
from planner.pricing.bucket_size import flat_bytes, sized
from planner.sharding.mesh import build_mesh
from planner.sharding.rescale import rescale_batch
from planner.sharding.rule import pieces_of
from planner.sharding.rules import rule_of
from planner.sharding.update import NO_BUCKETS
from planner.strategy_search.decomposition.cutting import cut
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline, step_bounds
from planner.strategy_search.decomposition.lagrangian import Multipliers, Setting, first_bounds, setting_of
from planner.strategy_search.decomposition.piece_maker import LEAST, LEAST_WAITING
from planner.strategy_search.decomposition.pieces import NEITHER, Passes
from planner.strategy_search.engine.assemble import Assembly
from planner.strategy_search.engine.evaluation import NO_HINT, Evaluation, Hint, Outcome, best_of, check_virtual_stages
from planner.strategy_search.engine.propagation import fixed_of, propagated
from planner.strategy_search.engine.recursive import RecursivePlan, Task, plan_recursively, refine
from planner.strategy_search.request.bounds import Bounds, mixed_step_seconds
from planner.strategy_search.request.constraints import decided_of
from planner.strategy_search.request.gathering import ways_to_gather
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.request.template import Template
from planner.strategy_search.tables.cost_table import CostTables, TableBuilder

KEPT = 4
"""Cost tables, and pieces made of them, that are kept: of the configurations that were asked for last."""


class Family:
    """Configurations that differ in the number of micro-batches only, and what their largest micro-batch proves.

    k times the batch takes at most k times as long, and holds k times as much, so the pieces of the largest micro-batch
    bound those of its k-th parts: under the strategies that are legal for them.
    """

    def __init__(self, pipeline_of_kinds: HeterogeneousPipeline, micro_batches: int, scaling: "Scaling") -> None:
        self.pipeline_of_kinds, self.micro_batches, self.scaling = pipeline_of_kinds, micro_batches, scaling
        self.hint = NO_HINT  # what mattered to a member
        self._duals: dict[tuple[int, float], list[Multipliers]] = {}
        self._known: set[tuple[int, float, float, float, Passes]] = set()

    def step_seconds(self, members: Sequence[Configuration]) -> list[float]:
        """Least step time of each member, whatever the memory; to be asked once."""
        known = [self._of(configuration) for configuration in members]
        if len(self.pipeline_of_kinds.chains) == 1:
            return first_bounds([(multipliers[0], setting) for multipliers, setting in known])
        found = []
        for multipliers, setting in known:
            for one in multipliers:
                one.solve(0.0, 0.0)
            found.append(float(step_bounds(self.pipeline_of_kinds, multipliers, setting).min()))
        return found

    def priced_seconds(self, configuration: Configuration, hint: Hint) -> float:
        """Least step time of a member with memory at a price, and shares of what travels under work; infinite where
        even the leanest choice does not fit."""
        multipliers, setting = self._of(configuration)
        flights = sorted({setting.flights(0), setting.flights(setting.ranks // 2)})
        price, under = hint
        under = under if self.pipeline_of_kinds.chain.travels else NEITHER
        tries = [(0.0, 0.0, NEITHER), (math.inf, flights[-1], NEITHER), *([(0.0, 0.0, under)] if any(under) else [])]
        tries += [(float(f"{price:.3g}"), number, under) for number in flights if price]
        known = {(multipliers[0].parts, multipliers[0].weight, *one): one for one in tries}
        for each in multipliers:
            each.solve_all([one for key, one in known.items() if key not in self._known])
        self._known |= known.keys()
        return float(step_bounds(self.pipeline_of_kinds, multipliers, setting).min())

    def least_bytes(self, configuration: Configuration) -> float:
        """About the least bytes that a member needs; never more."""
        multipliers, setting = self._of(configuration)
        multipliers[0].solve(math.inf, setting.flights(setting.ranks - 1))
        return multipliers[0].least_bytes(setting)

    def _of(self, configuration: Configuration) -> tuple[list[Multipliers], Setting]:
        """What is known of a member, with micro-batches in flight counted in those of the family's chain."""
        ratio = configuration.micro_batches // self.micro_batches
        setting = setting_of(configuration, self.pipeline_of_kinds.capacities[0])
        key = (ratio, setting.shared_weight)
        if key not in self._duals:
            allowed = self.scaling.allowed(ratio)
            self._duals[key] = [
                Multipliers(chain, setting.shared_weight, ratio, allowed, columns=False)
                for chain in self.pipeline_of_kinds.chains
            ]
        flights = tuple(tuple(number / ratio for number in chunks) for chunks in setting.in_flight)
        return self._duals[key], replace(setting, in_flight=flights)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kept:
    """Cost tables, and what was made of them by way to gather: pieces, and their prices of memory for several numbers
    of virtual stages."""

    tables: tuple[CostTables, ...]
    pieces: dict[str, HeterogeneousPipeline] = field(default_factory=dict)
    multipliers: dict[str, list[Multipliers]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Engine:
    """Evaluates configurations; keeps what they share. Use it in `search`."""

    request: SearchRequest
    template: Template
    limits: tuple[Bounds, ...]  # of every group of devices

    def __post_init__(self) -> None:
        self._builders: dict[tuple[Cluster, tuple[int, ...], frozenset[int]], TableBuilder] = {}
        self._kept: OrderedDict[object, _Kept] = OrderedDict()
        self.gathers = ways_to_gather(self.request, self.template.blocks.count)
        self._scaled: dict[int, Template] = {}
        self.groups = parts_of(self.request.cluster)
        self.capacities = tuple(self._capacity(group) for group in self.groups)

    @cached_property
    def without_buckets(self) -> "Engine":
        """The same without buckets of gradients."""
        update = replace(self.request.update, buckets=NO_BUCKETS)
        return Engine(request=replace(self.request, update=update), template=self.template, limits=self.limits)

    def _capacity(self, group: Cluster) -> float:
        """Bytes that the tensors of a plan may fill on a device."""
        limit, planned = self.request.memory_limit, planned_memory(group.device, group.software)
        memory = planned if limit is None else min(planned, limit)
        return usable_memory(replace(group.device, memory=memory)) - self.buffers(group)

    def buffers(self, group: Cluster) -> float:
        """Bytes that are set aside for what the software and messages need."""
        return group.software.buffers + flat_bytes(self.request.graph, self.request.update)

    def limit_bytes(self, group: Cluster) -> float:
        """The most that a plan may be predicted to need on a device."""
        return float(peak_memory(self._capacity(group), 0.0, self.buffers(group), group.device))

    def machine(self, configuration: Configuration) -> Machine:
        """The machine, its groups in the order of the pipeline."""
        cluster = self.request.cluster
        return cluster.ordered(configuration.order) if isinstance(cluster, MixedCluster) else cluster

    def setting(self, configuration: Configuration) -> Setting:
        """How the pipeline is run, with the capacity of the first group."""
        return setting_of(configuration, self.capacities[0])

    def bound(self, configuration: Configuration) -> float:
        """Least step time, from the work alone."""
        request = self.request
        recompute = request.pinned.recompute == "full"
        if len(self.groups) > 1:
            devices = [group.devices for group in self.groups]
            return mixed_step_seconds(self.limits, devices, configuration, request.global_batch, recompute)
        return self.limits[0].step_seconds(configuration, request.cluster.devices, request.global_batch, recompute)

    def group_of(self, configuration: Configuration, rank: int) -> int:
        """Number of the group of devices, in the order of the request, that a pipeline rank is on."""
        machine = self.machine(configuration)
        if not isinstance(machine, MixedCluster):
            return 0
        return configuration.order[machine.group_of_rank(rank, configuration.pipeline)]

    @property
    def hopeless(self) -> bool:
        """Whether weights, gradients and optimizer states alone are more than all devices hold."""
        if len(self.groups) == 1:
            return self.limits[0].device_bytes(self.groups[0].devices) > self.capacities[0]
        room = sum(own * group.devices for own, group in zip(self.capacities, self.groups, strict=True))
        return self.limits[0].parameters > room

    @property
    def spreads(self) -> bool:
        """Whether what the user has decided is spread by propagation."""
        return self.request.algorithm == "sharding_propagation"

    def recursive(self, configuration: Configuration, *, sweeps: int) -> RecursivePlan | None:
        """What recursive programming makes of a configuration; the mesh is its own unless one is decided."""
        return plan_recursively(self._task(configuration, sweeps), self.capacities[0])

    def refined(self, configuration: Configuration, found: Assembly, seconds: float) -> RecursivePlan | None:
        """A faster plan on a mesh of more axes, by small changes to one that was found."""
        if configuration.order:
            return None
        task = self._task(configuration, sweeps=1)
        if task.given:
            return None
        return refine(task, configuration.mesh, fixed_of(found), seconds, self.capacities[0])

    def _task(self, configuration: Configuration, sweeps: int) -> Task:
        request = self.request
        template = self._template(configuration.micro_batches)
        decided = decided_of(request, configuration, template)
        return Task(
            template=template,
            cluster=of_one_kind(request.cluster, "recursive programming"),
            configuration=configuration,
            precision=request.precision,
            optimizer=request.optimizer,
            update=request.update,
            offload=request.offload,
            recomputation=request.pinned.recomputation,
            decided=decided,
            given=decided is not None or request.pinned.mesh is not None,
            sweeps=sweeps,
        )

    def adopt(self, configuration: Configuration, found: RecursivePlan) -> Configuration:
        """The configuration on the mesh of a recursive plan, whose strategies are from now on its only candidates."""
        adopted = replace(configuration, mesh=found.mesh.sizes)
        template = self._template(configuration.micro_batches)
        tables = self._builder(adopted, self.groups[0]).build(template, found.chosen)
        self._keep(adopted, (tables,))
        return adopted

    def family(self, configuration: Configuration) -> Family:
        """A bound on all configurations of a family with as many micro-batches as this one, or a multiple."""
        tables = self.tables(configuration)
        part = self.request.global_batch // configuration.micro_batches
        scaling = _scaling(tables[0], self._scaled_to(2 * part))
        least = LEAST if "ahead" in self.gathers else LEAST_WAITING
        gathers = self.gathers[0] if len(self.gathers) == 1 else least
        cut_for_all = self._cut(configuration, tables, gathers, scaling.hindered)
        return Family(cut_for_all, configuration.micro_batches, scaling)

    def evaluate(
        self, configuration: Configuration, *, cutoff: float = math.inf, enough: float = -math.inf, hint: Hint = NO_HINT
    ) -> Outcome:
        """The best plan of a configuration, with weights gathered in whichever way is best, and how good any could be
        (see `Evaluation`).

        Where they come ahead, no way to run a block takes longer than where they come otherwise, but it takes more
        memory: the other ways are tried where that matters.

        Raises NothingAgreesError where what is decided, or virtual stages, cannot be had on this mesh.
        """
        outcomes = list[Outcome]()
        for gathers in self.gathers:
            outcomes.append(self.evaluate_as(gathers, configuration, cutoff=cutoff, enough=enough, hint=hint))
            cutoff = min(cutoff, outcomes[-1].seconds)
            if outcomes[-1].ranks and not outcomes[-1].price and gathers == "ahead":
                break
        return best_of(outcomes)

    def evaluate_as(
        self,
        gathers: str,
        configuration: Configuration,
        *,
        cutoff: float = math.inf,
        enough: float = -math.inf,
        hint: Hint = NO_HINT,
        room: float = 0.0,
    ) -> Outcome:
        """The best plan of a configuration in which weights are gathered in one way, and which leaves `room` bytes of
        every device."""
        pipeline_of_kinds, setting = self.pipeline_of_kinds(configuration, gathers), self.setting(configuration)
        if room:
            capacities = tuple(capacity - room for capacity in pipeline_of_kinds.capacities)
            pipeline_of_kinds = replace(pipeline_of_kinds, capacities=capacities)
            setting = replace(setting, capacity=capacities[0])
        check_virtual_stages(pipeline_of_kinds.chain, setting)
        multipliers: list[Multipliers] | None = None
        if setting.chunks > 1:  # what other numbers of virtual stages have asked is known
            multipliers = self._known(configuration).multipliers.setdefault(gathers, [])
        evaluation = Evaluation(
            pipeline_of_kinds, setting, cutoff=cutoff, enough=enough, hint=hint, multipliers=multipliers
        )
        return replace(evaluation.run(), gathers=gathers)

    def pipeline_of_kinds(self, configuration: Configuration, gathers: str) -> HeterogeneousPipeline:
        """The pieces of a configuration with weights gathered in a way; kept as long as its tables are."""
        known = self._known(configuration)
        if gathers not in known.pieces:
            own = self._spread(configuration, gathers) if self.spreads else known.tables
            known.pieces[gathers] = self._cut(configuration, own, gathers)
        return known.pieces[gathers]

    def _cut(
        self, configuration: Configuration, tables: tuple[CostTables, ...], gathers: str, free: Collection[int] = ()
    ) -> HeterogeneousPipeline:
        """Tables, one for every group of devices in the order of the pipeline, cut into pieces."""
        machine, ranks = self.machine(configuration), configuration.pipeline
        chains = tuple(
            cut(
                own,
                group,
                recomputation=self.request.pinned.recomputation,
                stages=ranks,
                free=free,
                activations=self.request.offload.activations,
                saved=self.request.offload.saved,
                gathers=gathers,
                machine=machine,
            )
            for own, group in zip(tables, parts_of(machine), strict=True)
        )
        kinds, capacities = (0,) * ranks, self.capacities
        if isinstance(machine, MixedCluster):
            kinds = tuple(machine.group_of_rank(rank, ranks) for rank in range(ranks))
            capacities = tuple(self.capacities[at] for at in configuration.order)
        return HeterogeneousPipeline(chains=chains, kinds=kinds, capacities=capacities)

    def tables(self, configuration: Configuration) -> tuple[CostTables, ...]:
        """The cost tables of a configuration, for every group of devices in the order of the pipeline."""
        return self._known(configuration).tables

    def _known(self, configuration: Configuration) -> "_Kept":
        """What is kept of a configuration: of the `KEPT` last ones asked for, and of all that differ from them in their
        virtual stages."""
        key = (configuration.family, configuration.micro_batches)
        if key not in self._kept:
            template = self._template(configuration.micro_batches)
            restriction = decided_of(self.request, configuration, template)
            groups = parts_of(self.machine(configuration))
            tables = tuple(self._builder(configuration, one).build(template, restriction) for one in groups)
            self._keep(configuration, tables)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _keep(self, configuration: Configuration, tables: tuple[CostTables, ...]) -> None:
        self._kept[configuration.family, configuration.micro_batches] = _Kept(tables=tables)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def _spread(self, configuration: Configuration, gathers: str) -> tuple[CostTables, ...]:
        """The tables of what the user's decisions spread to (see `propagation`)."""
        request, setting = self.request, self.setting(configuration)
        cluster = of_one_kind(request.cluster, "propagation of decisions")
        (tables,) = self.tables(configuration)
        fixed = propagated(tables, setting, cluster, request.pinned.recomputation)
        if fixed is None:
            return (tables,)
        return (self._builder(configuration, cluster).build(tables.template, fixed),)

    def _builder(self, configuration: Configuration, group: Cluster) -> TableBuilder:
        """The builder of the mesh of a configuration on a group of devices; what it has priced is kept."""
        key = (group, configuration.mesh, configuration.zigzag_axes)
        if key not in self._builders:
            request = self.request
            mesh = build_mesh(request.cluster, configuration.mesh, zigzag=configuration.zigzag_axes)
            sizes = [sized(request.update, mesh, one) for one in self.groups]
            self._builders[key] = TableBuilder(
                mesh=mesh,
                cluster=group,
                precision=request.precision,
                optimizer=request.optimizer,
                update=max(sizes, key=lambda update: update.bucket_size),
                offload=request.offload,
                together=self.gathers != ("each",),
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
