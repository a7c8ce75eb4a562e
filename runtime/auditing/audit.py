"""Compares the prediction of a plan with what the runtime does, at the plan's full size, on one machine without
devices.

    for every stage: one rank ─ imitated (auditing.imitation) ─> one step ─ recorded (auditing.ledger) ──────> emitted
                     the plan ─ charges, local work, live memory ─────────────────────────────> predicted
                                                                          compared operator by operator

Ranks of one stage differ only in which pieces they hold, and that does not change any count. So a stage (or the stages
of a pipeline rank) is audited by its middle rank. All micro-batches but the first are alike. So of a step with many
micro-batches only the first few run, enough to reach the maximum number in flight, and the rest are counted like those.
The update at the end is counted once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from hardware_profiles import PYTORCH, Bytes, Flops, Machine, clusters_of_ranks, parts_of
from planner.errors import AuditError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.plan import Plan
from planner.plan.prediction.charges import Charges, Phase
from planner.plan.prediction.host_link import crossing_parameters, crossing_rows
from planner.plan.prediction.local_work import local_work, update_work
from planner.plan.prediction.memory.chunks import GRADIENTS, STATES, WEIGHTS
from planner.plan.prediction.memory.live import live_memory
from planner.plan.prediction.predict import stage_peak, stated_costs
from planner.plan.schedule import telling_micro_batches
from runtime.auditing.imitation import imitated_inputs, imitated_step
from runtime.auditing.ledger import Ledger
from runtime.optimizers.optimizers import FUSED
from runtime.step.inputs import Inputs
from runtime.step.step import RankStep

MEMORY_TOLERANCE = 0.02
"""The share of the predicted live memory by which the actual live memory may differ."""

HOST_LINK = "host_link"
"""The kind of transfers over the link between a host and its device: rows of tables off the devices, and gradients and
weights of parameter servers."""

MEMORY_FLOOR: Bytes = 2.0 * 2**20
"""The difference that is always allowed: the smallest amount that PyTorch's caching allocators take from a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """One kind of collective in one pass of one operator: the bytes of each, the mesh axis (None: between stages, or
    for `HOST_LINK` between host and device), and the number of them in a step, as predicted and as emitted."""

    phase: Phase
    operator: str
    kind: str
    axis: int | None
    nbytes: Bytes
    predicted: int
    emitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Floating point operations of one operator in one pass, per step."""

    phase: Phase
    operator: str
    predicted: Flops
    emitted: Flops


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAudit:
    """One pipeline rank with its stages, seen by one of its devices. `live` and `predicted_live` are the bytes of each
    class at peak memory. `stated` is the peak with which the plan was found to fit: the sum of the maximum of each
    part, and what an allocator needs beside tensors."""

    stage: int
    rank: int
    micro_batches: int
    collectives: tuple[Collectives, ...]
    products: tuple[Products, ...]
    live: Mapping[str, Bytes]
    predicted_live: Mapping[str, Bytes]
    stated: Bytes

    @property
    def peak(self) -> Bytes:
        return sum(self.live.values())

    @property
    def predicted_peak(self) -> Bytes:
        return sum(self.predicted_live.values())

    @property
    def unequal(self) -> tuple[Collectives | Products, ...]:
        """Rows in which prediction and emission differ."""
        rows: tuple[Collectives | Products, ...] = (*self.collectives, *self.products)
        return tuple(row for row in rows if row.predicted != row.emitted)

    @property
    def memory_agrees(self) -> bool:
        """Whether live memory is within the tolerance of its prediction, and at most what the plan states."""
        near = abs(self.peak - self.predicted_peak) <= max(MEMORY_TOLERANCE * self.predicted_peak, MEMORY_FLOOR)
        return near and self.peak <= self.stated

    @property
    def agrees(self) -> bool:
        return not self.unequal and self.memory_agrees


def audit(
    plan: Plan, traced: OperatorGraph, batch: int, cluster: Machine, ranks: Sequence[int] | None = None
) -> Iterator[StageAudit]:
    """Audit the pipeline ranks of a plan one by one, or only the given ones. `traced` is the graph of its model on
    `batch` samples.

    Raises what `runtime.parallelize` raises for a plan that cannot be executed, and AuditError where the runtime does
    something that cannot be judged.
    """
    if not plan.schedule_kind.flushes:
        raise AuditError(
            f"an audit follows one step, and schedule '{plan.schedule}' updates weights within a step; audit the plan"
            " with schedule '1f1b', which differs only in the updates"
        )
    strange = [rank for rank in ranks or () if not 0 <= rank < plan.pipeline]
    if strange:
        raise AuditError(f"pipeline rank {strange[0]}: the plan has {plan.pipeline}, from 0 to {plan.pipeline - 1}")
    few, fused = _few(plan), _updated_by_one_kernel(plan, cluster)
    whole = bind(_of_this_runtime(plan), traced, batch)
    composing = _composing(cluster)
    costs, clusters = stated_costs(whole, composing), clusters_of_ranks(composing, plan.pipeline)
    for stage in range(plan.pipeline) if ranks is None else ranks:
        rank = stage * plan.mesh.size + plan.mesh.size // 2
        with imitated_step(few, traced, batch, rank, fused=fused) as step:
            ledger = _written(step, imitated_inputs(step, traced, batch))
            yield StageAudit(
                stage=stage,
                rank=rank,
                micro_batches=few.training.micro_batches,
                collectives=(
                    *_collectives(whole, costs[stage].messages, _emitted(ledger, step, plan)),
                    *_crossings(whole, stage, step.place.rank, ledger, few),
                ),
                products=_products(whole, stage, ledger, few),
                live=ledger.live.at_peak,
                predicted_live=live_memory(whole, stage, costs[stage].memory, costs[stage].rows, fused=fused),
                stated=stage_peak(costs[stage], clusters[stage]),
            )


def _of_this_runtime(plan: Plan) -> Plan:
    """The plan for this runtime: other software drops probabilities inside its attention kernels."""
    return replace(plan, cluster=replace(plan.cluster, software=PYTORCH.name))


def _composing(cluster: Machine) -> Machine:
    """The machine without scan kernels: on tensors without data, scans are composed of PyTorch's operators."""
    software = parts_of(cluster)[0].software
    return cluster.with_software(replace(software, composes_scans=True))


def _updated_by_one_kernel(plan: Plan, cluster: Machine) -> bool:
    """Whether the devices of the plan update with one kernel (see `runtime.optimizers.optimizers`)."""
    return plan.training.optimizer in FUSED and all(part.device.device_type == "cuda" for part in parts_of(cluster))


def _few(plan: Plan) -> Plan:
    """The plan with only as many micro-batches as the audit needs."""
    training, count = plan.training, telling_micro_batches(plan)
    samples = training.part * count - training.update.padding_samples
    return replace(plan, training=replace(training, micro_batches=count, global_batch=samples))


def _written(step: RankStep, inputs: Inputs) -> Ledger:
    """Record one step, after a first one that creates the optimizer states; for a plan without training, one
    evaluation."""
    trains = step.bound.graph.trains
    if trains:
        step.optimizer.step()
    ledger = Ledger()
    parts = range(step.bound.plan.stage_passes)
    ledger.live.leave_out([*step.buffers.values(), *(piece for part in parts for piece in inputs(part).values())])
    ledger.live.leave_out((*step.optimizer.rows, *step.weights.rows, step.scales.most))
    for parameter in step.parameters.values():
        ledger.live.add(parameter.piece, WEIGHTS)
        if parameter.trainable:
            parameter.leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, p=parameter: None if p.gradient is None else ledger.live.claim(p.gradient, GRADIENTS)
            )
    for state in (*step.optimizer.states(), *step.fp8.kept()):
        ledger.live.add(state, STATES)
    ledger.live.forget_peak()
    step.observer = ledger
    step.tables.crossed = step.optimizer.reduction.crossed = ledger.cross
    if not trains:
        with ledger:
            step.forward_pass().mean_loss(inputs, {})
        return ledger
    step.optimizer.reduction.begin()
    with ledger:
        step.accumulate(inputs)
        with ledger.updating():
            step.end_scales()
            step.optimizer.step()
    return ledger


Key = tuple[Phase, str, str, int | None, float]


def _emitted(ledger: Ledger, step: RankStep, plan: Plan) -> Counter[Key]:
    """The collectives of a step of the whole plan: those of each micro-batch, times the number of such
    micro-batches."""
    axes = {_ranks(group): axis for axis, group in enumerate(step.place.groups) if group is not None}
    stages = _ranks(step.pipeline.everyone) if step.pipeline.everyone is not None else None
    found: Counter[Key] = Counter()
    few = step.bound.plan.stage_passes
    for sent, times in ledger.sent.items():
        loss = sent.ranks == stages and sent.kind == "all_reduce"  # of the step, for the stages before the last
        bucket = sent.phase == "backward" and not sent.owner and sent.kind != "send_recv"  # that starts early
        phase: Phase = "update" if loss or bucket else sent.phase
        key = (phase, sent.owner, sent.kind, axes.get(sent.ranks), float(sent.nbytes))
        assert phase == "update" or times % few == 0, (sent, times)
        found[key] += times if phase == "update" else times // few * plan.stage_passes
    return found


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _collectives(bound: BoundPlan, charges: Charges, emitted: Counter[Key]) -> tuple[Collectives, ...]:
    """Predicted and emitted collectives, one by one; predicted sizes are products of shares, emitted ones whole
    bytes."""
    predicted: Counter[Key] = Counter()
    for sent, times in charges.items():
        message, nbytes = sent.message, float(round(sent.message.nbytes))
        between = message.kind == "send_recv" and message.axis is None
        phase: Phase = "forward" if between else sent.phase  # no operator runs meanwhile
        steps = 1 if sent.phase == "update" else bound.plan.stage_passes
        predicted[phase, sent.owner, message.kind, message.axis, nbytes] += times * steps
    return tuple(
        Collectives(
            phase=phase,
            operator=owner,
            kind=kind,
            axis=axis,
            nbytes=nbytes,
            predicted=predicted[phase, owner, kind, axis, nbytes],
            emitted=emitted[phase, owner, kind, axis, nbytes],
        )
        for phase, owner, kind, axis, nbytes in dict.fromkeys((*predicted, *emitted))
    )


def _crossings(bound: BoundPlan, stage: int, place: int, ledger: Ledger, few: Plan) -> tuple[Collectives, ...]:
    """Rows of tables off the devices that cross the link between host and device (each look-up is one message), and
    pushes to and pulls from parameter servers. Every id counts as a different row, as in the price: an audit has no
    values of ids."""
    every, told = bound.plan.training.micro_batches, few.training.micro_batches
    predicted = {(*key, nbytes): every for key, nbytes in crossing_rows(bound, stage, place).items()}
    predicted.update(crossing_parameters(bound, stage, place))
    emitted: Counter[tuple[Phase, str, float]] = Counter()
    for (phase, owner, size), times in ledger.crossed.items():
        assert phase == "update" or times % told == 0, (phase, owner, size, times)
        emitted[phase, owner, float(size)] = times if phase == "update" else times // told * every
    return tuple(
        Collectives(
            phase=phase,
            operator=owner,
            kind=HOST_LINK,
            axis=None,
            nbytes=nbytes,
            predicted=predicted.get((phase, owner, nbytes), 0),
            emitted=emitted[phase, owner, nbytes],
        )
        for phase, owner, nbytes in dict.fromkeys((*predicted, *emitted))
    )


def _products(bound: BoundPlan, stage: int, ledger: Ledger, few: Plan) -> tuple[Products, ...]:
    times = bound.plan.stage_passes
    predicted = {key: flops * times for key, flops in local_work(bound, stage).items()}
    if update := update_work(bound, stage):
        predicted["update", ""] = update
    scale = bound.plan.training.micro_batches / few.training.micro_batches
    return tuple(
        Products(
            phase=phase,
            operator=owner,
            predicted=predicted.get((phase, owner), 0.0),
            emitted=ledger.flops[phase, owner] * (1 if phase == "update" else scale),
        )
        for phase, owner in dict.fromkeys((*predicted, *ledger.flops))
    )
