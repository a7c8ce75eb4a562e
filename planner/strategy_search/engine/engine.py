"""The engine evaluates configurations: it builds and keeps cost tables, cuts pieces and tries prices
(evaluation.py)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType

from costmodels import peak_memory, planned_memory, usable_memory
from hardware_profiles import Bytes, Cluster, Machine, MixedCluster, of_one_kind, parts_of
from planner.plan.schedule_checks import tensor_overlap_fault
from planner.pricing.bucket_size import flat_bytes
from planner.sharding.rules import rule_of
from planner.sharding.update import AHEAD, NO_BUCKETS
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.decomposition.piece_maker import LEAST_WAITING
from planner.strategy_search.decomposition.setting import Setting, setting_of
from planner.strategy_search.engine.assemble import Assembly
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.evaluation import NO_HINT, Evaluation, Hint, check_virtual_stages
from planner.strategy_search.engine.family import Family, Recent, Scaling, Ways, scaling_of
from planner.strategy_search.engine.outcome import (
    Agreed,
    Outcome,
    best_of,
    best_try,
    proving_most,
    ruled_out,
    ways_to_agree,
)
from planner.strategy_search.engine.piece_store import Built, PieceStore, ordered_machine
from planner.strategy_search.engine.product_overlap import may_overlap
from planner.strategy_search.engine.propagation import fixed_of
from planner.strategy_search.engine.recursive import RecursivePlan, Task, plan_recursively, refine
from planner.strategy_search.engine.scheduling import IN_A_V
from planner.strategy_search.engine.uneven_stages import waiting_of_uneven
from planner.strategy_search.request.bounds import Bounds, mixed_step_seconds
from planner.strategy_search.request.constraints import decided_of
from planner.strategy_search.request.gathering import ways_to_gather
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import EXPERTS, Configuration
from planner.strategy_search.request.template import Template
from planner.strategy_search.tables.launches import least_counted

_AGREEING = 5e-4
"""If pieces that agree take longer than pieces that choose by themselves by at most this share, nothing else on which
they may agree is tried."""

_OTHER_HINTS: tuple[Hint, ...] = ((0.0, (0.5, 0.5, 0.0)), (0.0, (0.5, 0.0, 0.0)))
"""Shares of exposed communication that are tried where memory does not bind and plans with virtual stages are far above
their lower bound: each of their columns is the best by itself, so prices of memory suggest no others."""


@dataclass(kw_only=True)
class Engine:
    """Evaluates configurations and keeps what they share. Used in `search`. Engines of requests that differ only in
    their memory and global batch may share what is `built`.

    `waits`: gradients that are reduced once per step are priced as if no backward pass overlapped them. `capped`:
    buckets are small enough that all gradients of the model fill at least half of one. `apart`: launches are counted by
    pass and kind of block where these differ (`planner.strategy_search.tables.launches`). `paired`: passes of two
    micro-batches run together and overlap all exchanges of experts.
    """

    request: SearchRequest
    template: Template
    limits: tuple[Bounds, ...]  # for every group of devices
    built: Built = field(default_factory=Built)
    waits: bool = False
    capped: bool = True
    apart: bool = False
    paired: bool = False

    def __post_init__(self) -> None:
        self._recent = Recent()
        self.gathers = ways_to_gather(self.request, self.template.blocks.count)
        self.groups = parts_of(self.request.cluster)
        self.capacities = tuple(self._capacity(group) for group in self.groups)

    @cached_property
    def store(self) -> PieceStore:
        """The tables and pieces of its configurations. It is made when it is first used: the request may be refused
        before that."""
        return PieceStore(
            request=self.request, template=self.template, built=self.built, gathers=self.gathers, groups=self.groups,
            capacities=self.capacities, overlapped=self.overlapped, spreads=self.spreads, waits=self.waits,
            capped=self.capped, apart=self.apart, paired=self.paired,
        )  # fmt: skip

    @cached_property
    def without_buckets(self) -> "Engine":
        """The same engine without gradient buckets."""
        update = replace(self.request.update, buckets=NO_BUCKETS)
        return Engine(request=replace(self.request, update=update), template=self.template, limits=self.limits)

    @cached_property
    def with_buckets_of_links(self) -> "Engine":
        """The same engine with buckets as large as the links need, even if all gradients of the model fill only part of
        one."""
        return Engine(request=self.request, template=self.template, limits=self.limits, capped=False)

    @cached_property
    def without_overlap(self) -> "Engine":
        """The same engine in which the collectives of tensor parallelism are exposed."""
        request = replace(self.request, pinned=replace(self.request.pinned, tensor_overlap=1))
        return replace(self, request=request, built=self.built.anew)

    @cached_property
    def recomputing(self) -> "Engine":
        """The same engine in which all repeated blocks are recomputed. Each keeps the results of any operators."""
        request = replace(self.request, pinned=replace(self.request.pinned, recompute="selective"))
        return replace(self, request=request, built=self.built.anew)

    @cached_property
    def waiting(self) -> "Engine":
        """The same engine in which all reductions once per step are exposed."""
        return replace(self, waits=True)

    @cached_property
    def launched_apart(self) -> "Engine":
        """The same engine with launches counted by pass and kind of block."""
        return replace(self, apart=True)

    @cached_property
    def in_a_v(self) -> "Engine":
        """The same engine for requests with stages in a V. There nothing overlaps with their matrix products, which
        changes layouts."""
        request = replace(self.request, pinned=replace(self.request.pinned, schedule=IN_A_V[0]))
        return Engine(request=request, template=self.template, limits=self.limits, built=self.built.anew)

    @cached_property
    def in_pairs(self) -> "Engine":
        """`in_a_v` with passes that run together: exchanges of experts take no time. No plan takes less."""
        return replace(self.in_a_v, built=self.built.anew, paired=True)

    @cached_property
    def has_experts(self) -> bool:
        """Whether any operator has experts, whose exchange may overlap with other work."""
        graph = self.template.graph
        return any(rule_of(graph, operator).op_class == EXPERTS for operator in graph.operators)

    def _capacity(self, group: Cluster) -> float:
        """Bytes that the tensors of a plan may fill on a device."""
        limit, planned = self.request.memory_limit, planned_memory(group.device, group.software)
        memory = planned if limit is None else min(planned, limit)
        return usable_memory(replace(group.device, memory=memory), group.software) - self.buffers(group)

    @cached_property
    def host(self) -> Bytes:
        """Bytes of the host's memory that a device may use; infinite where nothing may be kept there."""
        if "host" not in self.request.offload.stores and not self.request.update.served:
            return math.inf
        limit, there = self.request.host_limit, of_one_kind(self.request.cluster, "offload").store("host").capacity
        return there if limit is None else min(limit, there)

    def buffers(self, group: Cluster) -> float:
        """Bytes that are reserved for the software and for communication buffers."""
        return group.software.buffers + flat_bytes(self.request.graph, self.request.update)

    def limit_bytes(self, group: Cluster) -> float:
        """The highest predicted peak, in bytes, that a plan may have on a device."""
        return float(peak_memory(self._capacity(group), 0.0, self.buffers(group), group.device, group.software))

    def machine(self, configuration: Configuration) -> Machine:
        """The machine, with its groups in the order of the pipeline."""
        return ordered_machine(self.request, configuration)

    def setting(self, configuration: Configuration, room: Bytes = 0.0) -> Setting:
        """How the pipeline is run, with the capacity of the first group, of which `room` bytes are set aside."""
        return setting_of(configuration, self.capacities[0] - room, self.host)

    def bound(self, configuration: Configuration) -> float:
        """A lower bound on the step time, from the work alone."""
        request = self.request
        recompute = configuration.under(request.pinned).recompute == "full"
        if len(self.groups) > 1:
            devices = [group.devices for group in self.groups]
            return mixed_step_seconds(self.limits, devices, configuration, request.padded_batch, recompute)
        return self.limits[0].step_seconds(configuration, request.cluster.devices, request.padded_batch, recompute)

    def seconds_of_one(self, configuration: Configuration) -> float:
        """A lower bound on the time in which a micro-batch passes all stages forward and back, from the work alone; 0
        on several kinds of devices."""
        request = self.request
        if len(self.groups) > 1:
            return 0.0
        return self.limits[0].seconds_of_one(configuration, request.cluster.devices, request.padded_batch)

    @property
    def least_work(self) -> float:
        """A lower bound on the step time: the work shared by all devices, and nothing else."""
        return self.limits[0].work * self.request.padded_batch / self.request.cluster.devices

    def group_of(self, configuration: Configuration, rank: int) -> int:
        """Index of the group of devices of a pipeline rank, in the order of the request."""
        machine = self.machine(configuration)
        if not isinstance(machine, MixedCluster):
            return 0
        return configuration.order[machine.group_of_rank(rank, configuration.pipeline)]

    @cached_property
    def overlapped(self) -> bool:
        """Whether collectives of tensor parallelism may overlap with its matrix products."""
        pinned = self.request.pinned
        order = (pinned.schedule or "1f1b", pinned.interleave or 1, pinned.slices or 1)
        return may_overlap(pinned, self.request.cluster) and tensor_overlap_fault(True, *order) is None

    @property
    def hopeless(self) -> bool:
        """Whether weights, gradients and optimizer states alone are more than all devices hold."""
        if len(self.groups) == 1:
            return self.limits[0].device_bytes(self.groups[0].devices) > self.capacities[0]
        room = sum(own * group.devices for own, group in zip(self.capacities, self.groups, strict=True))
        return self.limits[0].parameters > room

    @property
    def spreads(self) -> bool:
        """Whether the user's decisions are spread by propagation."""
        return self.request.algorithm == "sharding_propagation"

    def recursive(self, configuration: Configuration, *, sweeps: int) -> RecursivePlan | None:
        """The plan that recursive programming finds for a configuration; it chooses the mesh unless one is decided."""
        return plan_recursively(self._task(configuration, sweeps, self.gathers[0]), self.capacities[0])

    def refined(
        self, configuration: Configuration, found: Assembly, seconds: float, gathers: str
    ) -> RecursivePlan | None:
        """A faster plan on a mesh of more axes, by small changes to a plan that was found with the given way to gather
        weights."""
        if configuration.order:
            return None
        task = self._task(configuration, 1, gathers)
        if task.given:
            return None
        return refine(task, configuration.mesh, fixed_of(found), seconds, self.capacities[0])

    def _task(self, configuration: Configuration, sweeps: int, gathers: str) -> Task:
        request = self.request
        template = self.store.template_of(configuration.micro_batches)
        decided = decided_of(request, configuration, template)
        return Task(
            template=template,
            cluster=of_one_kind(request.cluster, "recursive programming"),
            configuration=configuration,
            precision=request.precision,
            optimizer=request.optimizer,
            update=request.update,
            offload=request.offload_under(gathers),
            recomputation=request.pinned.recomputation,
            decided=decided,
            given=decided is not None or request.pinned.mesh is not None,
            sweeps=sweeps,
            alltoall=request.decided_alltoall,
            gathers=gathers,
            fp8=request.fp8,
        )

    def adopt(self, configuration: Configuration, found: RecursivePlan) -> Configuration:
        """The configuration on the mesh of a recursive plan. From now on the strategies of that plan are its only
        candidates."""
        adopted = replace(configuration, mesh=found.mesh.sizes)
        template = self.store.template_of(configuration.micro_batches)
        tables = self.store.builder(adopted, self.groups[0]).build(template, found.chosen)
        for engine in (self, self.launched_apart):
            engine.store.keep(adopted, (tables,))
        return adopted

    def family(self, configuration: Configuration, *, scales: bool = True) -> Family:
        """Lower bounds for all configurations of a family with as many micro-batches as this one, or, if it `scales`, a
        multiple."""
        tables = self.store.tables(configuration)
        part = self.request.padded_batch // configuration.micro_batches
        scaling = scaling_of(tables[0], self.store.scaled_to(2 * part)) if scales else Scaling()
        waiting = tuple(way for way in self.gathers if way != AHEAD)
        apart: list[tuple[str, Ways]] = [(way, (way,)) for way in self.gathers if way == AHEAD or len(waiting) == 1]
        apart += [(LEAST_WAITING, waiting)] if len(waiting) > 1 else []
        pieces = list[tuple[Ways, HeterogeneousPipeline]]()
        for gathers, ways in apart:
            like = pieces[0][1].chains if pieces else None
            if gathers in self.gathers and not scaling.hindered and not self.spreads:  # cut for itself
                pieces.append((ways, self.store.pieces(configuration, gathers)))
            else:
                pieces.append((ways, self.store.cut_from(configuration, tables, gathers, scaling.hindered, like)))
        launched = min(least_counted(one.template, one.operators) for one in tables)
        return Family(pieces, configuration.micro_batches, scaling, self._recent, launched)

    def evaluate(
        self,
        configuration: Configuration,
        *,
        cutoff: float = math.inf,
        enough: float = -math.inf,
        hint: Hint = NO_HINT,
        proved: Mapping[str, float] = MappingProxyType({}),
    ) -> Outcome:
        """The best plan of a configuration, with weights gathered in whichever way is best, and a lower bound for all
        its plans (see `Evaluation`). `proved`: lower bounds on the step time for some ways to gather, which may rule
        them out. Where launches may be counted in two ways, both bounds hold, and the plan is that of the objective
        with the higher bound.

        Raises NothingAgreesError if the user's decisions, or virtual stages, are impossible on this mesh.
        """
        outcome = self._evaluate(configuration, cutoff=cutoff, enough=enough, hint=hint, proved=proved)
        if outcome.bound >= cutoff or outcome.overfull or not self.may_count_apart(configuration):
            return outcome
        other = self.launched_apart._evaluate(configuration, cutoff=cutoff, enough=enough, hint=hint, proved=proved)
        return proving_most(outcome, other, cutoff)

    def may_count_apart(self, configuration: Configuration) -> bool:
        """Whether launches may be counted by pass and kind of block, and this changes the count: a host then cannot
        launch ahead for one block while it waits for another."""
        alone = configuration.pipeline > 1 or configuration.micro_batches == 1
        return alone and not self.spreads and any(one.apart for one in self.store.tables(configuration))

    def _evaluate(
        self,
        configuration: Configuration,
        *,
        cutoff: float,
        enough: float,
        hint: Hint,
        proved: Mapping[str, float],
    ) -> Outcome:
        """`evaluate`, with launches as this engine counts them.

        With prefetched weights no way to run a block takes longer than with other ways to gather, because copying a
        weight out of a coalesced all-gather takes less than an all-gather of its own. But prefetched weights take more
        memory, so the other ways are tried where memory matters.
        """
        outcomes = list[Outcome]()
        first = min(self.gathers, key=lambda way: proved.get(way, 0.0))
        for gathers in self.gathers:
            least = proved.get(gathers, 0.0)
            if least >= cutoff and gathers != first:
                outcomes.append(ruled_out(gathers, least))
                continue
            outcomes.append(self.evaluate_as(gathers, configuration, cutoff=cutoff, enough=enough, hint=hint))
            if configuration.virtual_stages > 1 and outcomes[-1].coarse:
                others = (self.evaluate_as(gathers, configuration, cutoff=cutoff, hint=one) for one in _OTHER_HINTS)
                outcomes[-1] = best_try([outcomes[-1], *others])
            if gathers == AHEAD and outcomes[-1].free >= cutoff:  # for any memory
                outcomes += [ruled_out(way, outcomes[-1].free) for way in self.gathers if way != AHEAD]
                break
            cutoff = min(cutoff, outcomes[-1].seconds)
            if outcomes[-1].ranks and not outcomes[-1].price and gathers == AHEAD:
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
        covering: float = 0.0,
    ) -> Outcome:
        """The best plan of a configuration with the given way to gather weights that leaves `room` bytes of every
        device free; `covering`: see `Evaluation`."""
        run = partial(self._run, gathers, configuration, enough=enough, hint=hint, room=room, covering=covering)
        outcome = run((), cutoff)
        relaxed = self.store.pieces(configuration, gathers).chain.relaxed
        if not outcome.ranks or not relaxed:
            return outcome
        best = replace(outcome, seconds=math.inf, ranks=())
        for way in ways_to_agree(outcome, relaxed):
            agreed = run(way, min(cutoff, best.seconds))
            solved = best.solved + agreed.solved
            best = replace(agreed if agreed.ranks and agreed.seconds < best.seconds else best, solved=solved)
            if best.seconds <= outcome.seconds * (1 + _AGREEING):
                break
        least = math.inf if best.ranks else agreed.least
        return replace(best, bound=min(outcome.bound, best.seconds), free=outcome.free, least=least)

    def _run(
        self,
        gathers: str,
        configuration: Configuration,
        way: Agreed,
        cutoff: float,
        *,
        enough: float,
        hint: Hint,
        room: float,
        covering: float,
    ) -> Outcome:
        """`evaluate_as`, with all pieces agreeing on a `way` to store weights and lay out values; without it each piece
        chooses."""
        pipeline_of_kinds = self.store.pieces(configuration, gathers, way).with_room(room)
        setting = self.setting(configuration, room)
        check_virtual_stages(pipeline_of_kinds.chain, setting)
        multipliers: list[Multipliers] | None = None
        if setting.chunks > 1 and not covering:  # reuse the prices that other numbers of virtual stages have solved
            multipliers = self.store.multipliers(configuration, gathers, way)
        decided = configuration.decided
        evaluation = Evaluation(
            pipeline_of_kinds, setting, cutoff=cutoff, enough=enough, hint=hint, multipliers=multipliers,
            patterned=decided is not None and decided.pattern is not None, covering=covering,
        )  # fmt: skip
        outcome = replace(evaluation.run(), gathers=gathers, apart=self.apart, agreed=way)
        if not configuration.uneven or not outcome.ranks:
            return outcome
        waiting = waiting_of_uneven(pipeline_of_kinds.chain, outcome.ranks, setting)
        return replace(outcome, seconds=outcome.seconds + waiting, waiting=waiting)

    def source_of(self, outcome: Outcome) -> "Engine":
        """The engine that found an outcome: this one, or the one that counts launches by pass and kind of block."""
        return self.launched_apart if outcome.apart and not self.apart else self

    def contender(self, configuration: Configuration, outcome: Outcome) -> Contender:
        """The contender with what was found for a configuration."""
        pieces = self.source_of(outcome).store.pieces(configuration, outcome.gathers, outcome.agreed)
        return Contender(configuration=configuration, outcome=outcome, pipeline_of_kinds=pieces)
