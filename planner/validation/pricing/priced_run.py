"""The plan of a run: the search with every decision pinned, so that it prices the one configuration that was run."""

from dataclasses import replace
from itertools import accumulate

from hardware_profiles import TRAINED, Bytes, Cluster, Software
from planner.graph.operator_graph import OperatorGraph
from planner.models.dimensions import TRACED_BATCH, Dimensions, build
from planner.plan.binding.bind import bind
from planner.plan.plan import INTERLEAVED, Plan, Prediction, Stage
from planner.plan.prediction.predict import predict
from planner.sharding.update import DEFAULT, PARAMETERS
from planner.strategy_search.job import given_job
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.request.space import Pinned
from planner.validation.pricing.peak import Peaks, least_needed
from planner.validation.pricing.spared_plans import fewest_recomputed, spared_plan
from planner.validation.reading.rows import Row
from planner.validation.request.configuration import Job, Run
from planner.validation.results.evaluated import INFERRED

_NARROW = ("deepspeed-zero3", "internevo")


def traced(model: Dimensions) -> OperatorGraph:
    """The graph of a model with those dimensions and `TRACED_BATCH` samples."""
    from planner.graph.trace import trace

    module, args = build(model)
    return trace(module, args, {})


def priced_run(
    row: Row, run: Run, cluster: Cluster, graph: OperatorGraph, memory: Bytes
) -> tuple[Plan, Prediction, tuple[str, ...]]:
    """The plan of a run on devices with `memory` bytes, its prediction on unlimited ones, and notes on inferred
    recomputation."""

    def fits(one: Prediction) -> bool:
        return least_needed(Peaks.of(one), cluster.device, cluster.software) <= memory

    def as_run(plan: Plan) -> tuple[Plan, Prediction]:
        if not run.spared.by_block:
            return plan, plan.prediction
        plan = spared_plan(plan, run.spared, graph, TRACED_BATCH)
        return plan, predict(bind(plan, graph, TRACED_BATCH), cluster)

    plan, prediction = as_run(_searched(run, cluster, graph))
    if not run.untold or row.out_of_memory or fits(prediction):
        return plan, prediction, ()
    found = fewest_recomputed(plan, graph, TRACED_BATCH, cluster, fits)
    if found is None:
        return plan, prediction, ("it does not fit with all blocks recomputed, either",)
    count, plan, prediction = found
    return plan, prediction, (f"{INFERRED}: {count} blocks of every pipeline rank, the fewest with which it fits",)


def _searched(run: Run, cluster: Cluster, graph: OperatorGraph) -> Plan:
    job: Job = run.job
    asked = given_job(graph, cluster, batch=TRACED_BATCH, global_batch=job.global_batch, precision=job.model.precision)
    summed = gradient_dtype(cluster.software, asked.precision, run.pinned.zero)
    update = replace(
        DEFAULT,
        gradient_dtype=summed if run.states.master_weights else "parameter",
        master_weights=run.states.master_weights,
        moment_dtype=run.states.moment_dtype,
        clip_norm=run.states.clip_norm,
        zero_by=shared_out_by(cluster.software, run.pinned),
    )
    request = asked.request(placing="fit", pinned=run.pinned, update=update, optimizer=run.states.optimizer)
    result = plan_for(request, lambda _: None, lambda: False)
    return result.plan if run.stages is None else _cut(result.plan, run.stages, graph, cluster)


def shared_out_by(software: Software, pinned: Pinned) -> str:
    """How a stack shards optimizer states under ZeRO 1: in slices, or by whole parameters.

    With replicas (HSDP) they are priced in slices, which is the same within a node.
    """
    whole = software.owns_whole and pinned.zero == 1 and (pinned.replicas or 1) == 1
    return PARAMETERS if whole else DEFAULT.zero_by


def gradient_dtype(software: Software, precision: str, zero: int | None = None) -> str:
    """The dtype in which a stack accumulates and reduces gradients, as a word of a plan's update.

    It is the dtype of parameters in fp16 if the stack keeps nothing wider (`Stored.fp16`). DeepSpeed ZeRO 3 and
    InternEvo do the same in bf16 (`Stored.bf16`). Else it is the default of plans. (NVIDIA's recipes also reduce in
    bf16, but their overlapped shares were fitted to messages in fp32.) In Megatron ZeRO 2 reduces fp32 gradients of
    every micro-batch (Megatron-LLaMA@25306de megatron/optimizer/overlapped_dist_optimizer.py: `collect_param_grad`).
    """
    kept = {"fp16": software.stored.fp16, "bf16": software.stored.bf16 if software.name in _NARROW else None}
    narrow = kept.get(precision) == TRAINED[precision].nbytes
    if not narrow and zero == 2 and software.name == "megatron" and software.stored.bf16 == TRAINED["fp32"].nbytes:
        return "fp32"
    return "parameter" if narrow else DEFAULT.gradient_dtype


def _cut(plan: Plan, layers: tuple[int, ...], graph: OperatorGraph, cluster: Cluster) -> Plan:
    """A plan with one stage per rank, cut into other stages of `layers` layers each."""
    firsts = (0, *accumulate(layers))
    virtual = len(layers) // plan.pipeline
    moved = replace(
        plan,
        stages=tuple(Stage(first_block=first, blocks=count) for first, count in zip(firsts, layers, strict=False)),
        virtual_stages=virtual,
        schedule=INTERLEAVED if virtual > 1 else plan.schedule,
    )
    return replace(moved, prediction=predict(bind(moved, graph, TRACED_BATCH), cluster))
