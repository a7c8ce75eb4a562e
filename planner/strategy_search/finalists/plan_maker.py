"""Contenders as plans: bound to their graph, priced by `predict`, settled, with their proved bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from costmodels import SCHEDULES
from hardware_profiles import Bytes, Machine, Seconds
from planner.graph.fp8 import Fp8, leaving_out
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan, bind_prepared
from planner.plan.binding.machine import cluster_reference, placed
from planner.plan.layout.segments import gathers_nothing
from planner.plan.plan import PLANNER_VERSION, Plan, Prediction, Provenance, Training
from planner.plan.prediction.predict import predict
from planner.plan.words import applied_update
from planner.pricing.bucket_size import room_of, smaller
from planner.sharding.discover import written_rules
from planner.sharding.rescale import rescale_batch
from planner.sharding.update import AUTO_BUCKETS, AUTO_GATHERS, EACH, NO_BUCKETS, Update
from planner.strategy_search.engine.assemble import assembly, groups_of, input_layouts, stages_of
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.engine.scheduling import all_fit
from planner.strategy_search.finalists.bucket_sizes import (
    in_faster_buckets,
    most_saved,
    with_update,
    without_needless_buckets,
)
from planner.strategy_search.finalists.fp8_choice import chosen_layers
from planner.strategy_search.finalists.proofs import Ranked, proved
from planner.strategy_search.finalists.settle import settle_and_certify, settling_saves
from planner.strategy_search.finalists.v_stages import spread_out, v_stages
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration

_LITTLE = 2e-3
"""Up to this share of the objective that settling may save, a result is settled only if it may win that way."""

_UNPRICED = Prediction.unknown()
"""The prediction of all plans that are compared without theirs: it equals no other, as its numbers are not numbers."""


@dataclass(kw_only=True)
class PlanMaker:
    """Makes plans of what ranks run. No plan has an objective below `bound`.

    `prepared` is the whole graph of the engine's template; `limits` has the highest predicted peak, in bytes, that a
    plan may have on a device of each group of the request; `covered`: whether the bound covers the fastest of the
    plans.
    """

    request: SearchRequest
    engine: Engine
    prepared: OperatorGraph
    bound: float
    limits: tuple[float, ...]
    covered: bool
    _saves: dict[int, tuple[Contender, Seconds]] = field(default_factory=dict)  # by id
    _wholes: dict[tuple[int, Fp8], OperatorGraph] = field(default_factory=dict)
    _priced: dict[tuple[Plan, float, bool], BoundPlan] = field(default_factory=dict)

    def limits_of(self, configuration: Configuration) -> tuple[float, ...]:
        """The highest predicted peak, in bytes, that a device of each pipeline rank may have."""
        return tuple(self.limits[self.engine.group_of(configuration, rank)] for rank in range(configuration.pipeline))

    def _fits(self, configuration: Configuration, prediction: Prediction) -> bool:
        """Whether a plan of a configuration is `storable`."""
        return all_fit(prediction, self.limits_of(configuration), self.request.cluster)

    def overfull_by(self, ranked: Ranked) -> Bytes:
        """The bytes that the fullest device lacks; negative if memory is left."""
        stages, limits = ranked.plan.prediction.stages, self.limits_of(ranked.configuration)
        return max(stage.peak_bytes - limit for stage, limit in zip(stages, limits, strict=True))

    def storable(self, ranked: Ranked) -> bool:
        """Whether a plan fits on the devices, and its offloaded tensors fit beside them."""
        return self._fits(ranked.configuration, ranked.plan.prediction)

    def as_found(
        self,
        found: Contender,
        cutoff: Seconds,
        later: Callable[[Ranked], Seconds],
        worth: Callable[[Ranked], bool],
    ) -> Ranked:
        """The plan of a contender, bound to its graph and priced by `predict`. It is settled if that is `worth` it and
        may save more than little, by the bound of its configuration. If it would take `cutoff` or longer even with what
        other buckets, settling and `later` changes may save, neither buckets of other sizes nor settling is tried."""
        made = self._made(found)
        if made.seconds - most_saved(made.bound) - found.outcome.open_seconds - later(made) >= cutoff:
            return made
        bucketed = self._bucketed(found, made)
        return self.worth_settling(bucketed) if worth(bucketed) else bucketed

    def worth_settling(self, ranked: Ranked) -> Ranked:
        """A plan, settled if that may save more than little."""
        found = ranked.found
        assert found is not None, "plans of other sources are not settled"
        return self.settled(ranked) if found.outcome.open_seconds > _LITTLE * found.objective else ranked

    def may_save(self, ranked: Ranked, seconds: Seconds) -> bool:
        """Whether settling a plan may save more than `seconds`. It saves at most the gap between its objective and the
        bound of its configuration, and at most the gap between its slowest rank and the bound of that rank."""
        found = ranked.found
        if seconds < 0 or found is None or ranked.settled:
            return seconds < 0
        if seconds >= found.outcome.open_seconds:
            return False
        if id(found) not in self._saves:
            setting = self.engine.setting(found.configuration)
            pipeline_of_kinds = found.pipeline_of_kinds.with_room(found.room)
            self._saves[id(found)] = (found, settling_saves(pipeline_of_kinds, setting, found.outcome))
        return seconds < self._saves[id(found)][1]

    def unsettled(self, found: Contender) -> Ranked:
        """The plan of a contender, bound to its graph and priced by `predict`."""
        return self._bucketed(found, self._made(found))

    def _bucketed(self, found: Contender, ranked: Ranked) -> Ranked:
        return replace(ranked, bound=self._in_faster_buckets(found, ranked.bound))

    def _made(self, found: Contender) -> Ranked:
        """The plan of a contender, with the buckets that its objective assumed."""
        return Ranked(
            bound=self.made(found, found.outcome.ranks),
            configuration=found.configuration,
            memory_price=found.outcome.price,
            filled=tuple(rank.peak for rank in found.outcome.ranks),
            found=found,
        )

    def settled(self, ranked: Ranked) -> Ranked:
        """A plan with its slowest rank solved exactly, if that fits and may be faster, and with what a solver says of
        it."""
        if ranked.settled:
            return ranked
        found = ranked.found
        assert found is not None, "plans of other sources are not settled"
        setting, filled = self.engine.setting(found.configuration), found.outcome.ranks
        pipeline_of_kinds = found.pipeline_of_kinds.with_room(found.room)
        ranks, busy, certificate = settle_and_certify(self.request, pipeline_of_kinds, setting, found.outcome)
        ranked = replace(ranked, certificate=certificate, settled=True)
        if ranks == filled or not self._holds(found, ranks):
            return ranked
        # fewer seconds per step may not make up for more per micro-batch, and cannot be told from communication in
        # smaller buckets than the objective assumes
        update = found.pipeline_of_kinds.chain.tables.update
        faster = self._update(update, found, ranks) != replace(update, gathers=found.outcome.gathers)
        faster = faster or found.sum_with(ranks) < found.sum_with(filled)
        if not faster or self._overflows(found, ranks, ranked.bound):
            return ranked
        settled = self.made(found, ranks)
        if not self._fits(found.configuration, settled.plan.prediction):
            return ranked
        return replace(
            ranked,
            bound=self._in_faster_buckets(found, settled),
            configuration=found.configuration,
            certificate=None if certificate is None else replace(certificate, busy_seconds=busy),
            filled=tuple(rank.peak for rank in ranks),
        )

    def _in_faster_buckets(self, found: Contender, priced: BoundPlan) -> BoundPlan:
        """The plan with its gradients in buckets of another size, if that is left to the search and faster."""
        fits = partial(self._fits, found.configuration)
        if self.request.update.buckets != AUTO_BUCKETS or not fits(priced.plan.prediction):
            return priced
        machine = self.engine.machine(found.configuration)
        return in_faster_buckets(
            priced, lambda other: self._predicted(other, machine), lambda other: fits(other.plan.prediction)
        )

    def _holds(self, found: Contender, ranks: Sequence[RankFilling]) -> bool:
        """Whether other ways to run the ranks fit by the memory that the search counts: another block's interior may be
        the largest."""
        return all(own.peak <= capacity for own, capacity in zip(ranks, self._capacities(found), strict=True))

    def _capacities(self, found: Contender) -> tuple[float, ...]:
        """The bytes that a device of each rank may fill, as the search counts them."""
        configuration, capacities = found.configuration, self.engine.capacities
        return tuple(capacities[self.engine.group_of(configuration, rank)] for rank in range(configuration.pipeline))

    def _overflows(self, found: Contender, ranks: Sequence[RankFilling], priced: BoundPlan) -> bool:
        """Whether other ways to run the ranks do not fit. Their memory exceeds that of the plan found, which is
        `priced`, by as much as the search counts."""
        limits, stages = self.limits_of(found.configuration), priced.plan.prediction.stages
        more = (own.peak - before.peak for own, before in zip(ranks, found.outcome.ranks, strict=True))
        return any(one.peak_bytes + own > limit for one, own, limit in zip(stages, more, limits, strict=True))

    def made(self, found: Contender, ranks: Sequence[RankFilling]) -> BoundPlan:
        """The plan of what ranks run, bound and priced."""
        request, configuration = self.request, found.configuration
        chain, machine = found.pipeline_of_kinds.chain, self.engine.machine(configuration)
        blocks, in_a_v = self.engine.template.blocks, SCHEDULES[configuration.schedule].v_shaped
        setting = self.engine.setting(configuration, found.room)
        whole = assembly(chain, spread_out(ranks) if in_a_v else ranks, setting)
        stages, virtual = stages_of(whole), configuration.virtual_stages
        if in_a_v:
            stages, virtual = v_stages(whole, chain, configuration.pipeline, configuration.micro_batches), 2
        fp8 = chosen_layers(whole, self.prepared, request.fp8)
        plan = Plan(
            model=request.model,
            training=Training(
                global_batch=request.global_batch,
                micro_batches=configuration.micro_batches,
                precision=request.precision,
                optimizer=request.optimizer,
                update=self._update(chain.tables.update, found, ranks),
                imbalance=request.imbalance,
                tokens_once=request.tokens_once,
                fp8=fp8,
            ),
            cluster=cluster_reference(machine),
            mesh=chain.tables.mesh,
            alltoall=None if request.decided_alltoall is True else request.decided_alltoall,
            stages=placed(stages, configuration.pipeline, machine, configuration.schedule),
            virtual_stages=virtual,
            schedule=configuration.schedule,
            inputs=input_layouts(whole),
            groups=groups_of(self.prepared, blocks, whole),
            rules=written_rules(request.graph),
            prediction=Prediction.unknown(),
            provenance=Provenance(planner=PLANNER_VERSION, search=request.algorithm, status="feasible", gap=0.0),
        )
        plan = replace(plan, training=replace(plan.training, update=applied_update(plan)))
        bound = bind_prepared(plan, self._whole(plan.training), blocks)
        if request.update.gathers == AUTO_GATHERS and gathers_nothing(bound):
            alike = with_update(bound, replace(bound.plan.training.update, gathers=EACH))
            said = self._in_needed_buckets(alike, machine)
            if alike.plan == bound.plan or self._fits(configuration, said.plan.prediction):
                return said
            # blocks are not run one by one then, and more memory is in use at a time
        return self._in_needed_buckets(bound, machine)

    def _in_needed_buckets(self, bound: BoundPlan, machine: Machine) -> BoundPlan:
        """The plan, priced; without buckets if the search chose them and they would not be needed."""
        if self.request.update.buckets == AUTO_BUCKETS:
            bound = without_needless_buckets(bound)
        return self._predicted(bound, machine)

    def _update(self, update: Update, found: Contender, ranks: Sequence[RankFilling]) -> Update:
        """How gradients are handled. If the bucket size was left to the search, the buckets fit into the free memory of
        the fullest rank."""
        update = replace(update, gathers=found.outcome.gathers)
        if not self.prepared.trains:  # there is nothing to reduce
            return replace(update, buckets=NO_BUCKETS)
        if self.request.update.buckets != AUTO_BUCKETS:
            return update
        room = min(capacity - rank.peak for capacity, rank in zip(self._capacities(found), ranks, strict=True))
        while update.bucketed and room_of(update.bucket_size) > room:
            update = smaller(update)
        return update

    def _predicted(self, bound_plan: BoundPlan, machine: Machine) -> BoundPlan:
        """The plan with its prediction and its bound; the same object for equal plans: with a little more memory left
        free, the search often finds the same."""
        key = replace(bound_plan.plan, prediction=_UNPRICED), self.bound, self.covered
        if key not in self._priced:
            plan = replace(bound_plan.plan, prediction=predict(bound_plan, machine))
            self._priced[key] = self.proved(replace(bound_plan, plan=plan))
        return self._priced[key]

    def proved(self, bound_plan: BoundPlan) -> BoundPlan:
        """The plan with its bound."""
        return replace(bound_plan, plan=proved(bound_plan.plan, self.bound, covered=self.covered))

    def _whole(self, training: Training) -> OperatorGraph:
        """The whole graph with the batch of one micro-batch and the plan's layers in fp8."""
        key = training.part, training.fp8
        if key not in self._wholes:
            graph = rescale_batch(self.prepared, self.request.prepared_batch, training.part)
            self._wholes[key] = leaving_out(graph, training.fp8)
        return self._wholes[key]
