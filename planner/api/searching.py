"""From a model to plans: `planner.trace`, `planner.search`, `planner.estimate`.

    result = planner.search("llama70b", "h100", devices=64, pinned={"tensor": 8, "zero": 1})
    plan = planner.estimate("llama70b", "h100", devices=64, pinned={"tensor": 8, "pipeline": 8})

Parameters have the names and defaults of the options of `plan search`; degrees and similar decisions are in `pinned`,
gradient and optimizer settings in `update`.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hardware_profiles import Machine
from planner.api.checks import amounts, callbacks, names, number, numbers, public, record, word
from planner.api.decisions import (
    Shards,
    completed,
    padding_given,
    pinned_given,
    places_given,
    replicas_given,
    shards_given,
)
from planner.api.exporting import check_told
from planner.api.jobs import HARDWARE, TracedModel, job_of, machine_given
from planner.api.planned import is_plan_file, loaded, planned_graph
from planner.engines.spaces import space_and_stack
from planner.errors import RequestError
from planner.fp8_recipes import RECIPES
from planner.graph.expert_load import EVEN
from planner.graph.fp8 import WORD, chosen
from planner.limits import default_memory, limited
from planner.plan.binding.machine import machine_of
from planner.plan.compare.repricing import repriced
from planner.plan.plan import OPTIMIZERS, PRECISIONS, Plan
from planner.sharding.update import DEFAULT, SLICES, Update
from planner.strategy_search.job import (
    machine_from,
    with_memory_margin,
)
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.request.padded_batch import padding_samples, with_padded_batch
from planner.strategy_search.request.request import (
    ALGORITHMS,
    OBJECTIVES,
    SIMPLICITY,
    Alltoall,
    Default,
    Objective,
)
from planner.strategy_search.request.space import Pinned, forward_pinned
from planner.strategy_search.result import Progress, SearchResult

if TYPE_CHECKING:
    pass


@public
def trace(
    model: Any,
    *,
    seq_len: int | None = None,
    precision: str = "bf16",
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    batch: int | None = None,
    rule_cache: str | os.PathLike[str] | None = None,
    graph_cache: str | os.PathLike[str] | None = None,
) -> TracedModel:
    """Trace a model once, for several searches.

    Args:
        model: a name (of the zoo, a config.json or its folder, package.module:factory), or a torch module whose call
            gives the loss.
        seq_len: tokens of a sequence, of a model that is named.
        precision: "bf16", "fp16", "fp32" or "tf32", fp32 with matrix products in TF32.
        args, kwargs, batch: example inputs of a module, and how many samples they have.
        rule_cache: a folder that keeps rules that were found by trial.
        graph_cache: a folder that keeps traced graphs, of zoo models and of a config.json.

    Raises:
        ModelError: where the model cannot be found or traced.
        RuleError: where an operator has no rule and cannot get one.
        RequestError: for an argument of another type.
    """
    word("precision", precision, tuple(PRECISIONS))
    number("seq_len", seq_len)
    machine = machine_from(HARDWARE)
    job = job_of(
        model, machine, seq_len, args, kwargs, batch,
        precision=precision, rule_cache=rule_cache, graph_cache=graph_cache,
    )  # fmt: skip
    return TracedModel(job=job)


@public
def search(
    model: Any,
    hardware: Machine | str = HARDWARE,
    *,
    devices: int | None = None,
    cluster: str | None = None,
    software: str | None = None,
    engine: str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    imbalance: float = EVEN,
    tokens_once: int | None = None,
    precision: str | None = None,
    fp8: str | None = None,
    fp8_layers: Sequence[str] = (),
    fp8_left_out: Sequence[str] = (),
    fp8_gathered: bool = False,
    fp8_experts: bool = False,
    fp8_dispatch: bool = False,
    fp8_history: int | None = None,
    fp8_margin: int | None = None,
    optimizer: str = "adamw",
    pinned: Pinned | Mapping[str, Any] | None = None,
    shard: Shards = (),
    default: Default = "search",
    place: Mapping[str, str] | str | None = None,
    pad: Mapping[str, int] | str | None = None,
    per_replica: Sequence[str] = (),
    update: Update | Mapping[str, Any] | None = None,
    search: str = "dynamic_programming",
    forward_only: bool = False,
    objective: Objective = "time",
    top: int = 1,
    simplicity: float = SIMPLICITY,
    alltoall: Alltoall = True,
    time_limit: float | None = None,
    memory_limit: float | None = None,
    memory_margin: float | None = None,
    planner_memory: float | None = None,
    certify: bool = False,
    rule_cache: str | os.PathLike[str] | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    batch: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> SearchResult:
    """Search for the best plans.

    Args:
        model: a name as for `--model` ("llama70b", "meta-llama/Llama-3.1-70B", "path/config.json", "package:factory"),
            a torch module whose call gives the loss, what `trace` returned, or an OperatorGraph.
        hardware: a profile as for `--hardware` ("h100", "mine.toml", "h100:32,a100:32"), or a machine.
        devices: how many; all that the profile says where not given.
        cluster: network levels in place of the profile's, "node=8,rack=4@50,cluster@25/2".
        software: the training stack that will run the plan; PyTorch where not given.
        engine: the engine that will train, as for `--for`: the best plan that it can be told, priced by its own stack.
        seq_len: tokens of a sequence; the model's own where not given.
        global_batch: samples of a step; where not given 4 per device, 32 of images, 2,048 of clicks.
        imbalance: maximum expert load over the mean; 1 is a balanced router.
        tokens_once: devices of a node, to which a token is sent once and copied there for its experts; 1 sends it once
            to each device. Once for each expert where not given.
        precision: "bf16", "fp16", "fp32", "tf32" (fp32 with matrix products in TF32), or "fp8", which is a recipe of
            `fp8`; bf16 where not given, on CPUs fp32.
        fp8: a recipe by which linear layers are computed in fp8 where that pays: "tensorwise", "rowwise",
            "rowwise_with_gw_hp", "blockwise", "delayed" or "mxfp8"; all else is in bf16.
        fp8_layers: patterns of weights whose linear layers, or experts, are always in fp8; ["*"] for all. The search
            decides about the others.
        fp8_left_out: patterns of weights whose linear layers, or experts, stay out of fp8.
        fp8_gathered: weights of blocks are cast where they are stored, and gathered in 8 bits; with scales
            of tensors or of blocks.
        fp8_experts: experts may use that recipe too, where that saves time; those in `fp8_layers` always do.
        fp8_history: with "delayed", number of steps in the history of a scale; default 1,024.
        fp8_margin: with "delayed", powers of two that scales leave free; 0 where not given.
        fp8_dispatch: tokens are sent to experts in 8 bits, and so are gradients of their results.
        optimizer: "adamw", "sgd", "lamb", or "muon" for the matrices of hidden layers, with AdamW for the rest.
        pinned: what is decided, as a `planner.Pinned` or a dict of its fields: {"tensor": 8, "pipeline": 4, "zero": 1}.
        shard: strategies of operators, {"*q_proj*": "b,o"}, or records of `planner.shard`.
        default: for all other operators: "search", or "data_parallel", which splits the batch.
        place: where tables of embeddings are, {"tables.*": "host"}; "auto" where that is faster, "none" on the devices;
            on the host where nothing fits otherwise if not given.
        pad: weights and the multiple to which their rows are padded, {"lm_head.weight": 4}; "batch" is the global
            batch, padded with samples of weight zero: {"batch": 4}. "auto" pads what devices do not divide, where that
            is faster. Where pinned["data"] does not divide the global batch, it is padded unless "batch" is here.
        per_replica: operators or modules that each data-parallel replica computes over its own samples, as batch norm
            in DistributedDataParallel: ["*norm*"], or ["*norm*=4"] for 4 replicas (`planner.sharding.per_replica`).
        update: gradient and optimizer settings, as a `planner.Update` or a dict of its fields: {"clip_norm": 1.0}.
        search: the algorithm, as for `--search`.
        forward_only: plan the forward pass alone, for evaluation, without backward pass, gradients and states.
        objective: "time" of a step, "memory" per device, or "cost" in device-seconds.
        top: how many plans, of different configurations. The fastest ones, where it is more than 1; stages in a V are
            tried for the first of them alone.
        simplicity: how much longer than the fastest, as a share of its step, a simpler plan may take that is preferred
            to it; 0 takes the fastest. `SearchResult.simpler` says what was done.
        alltoall: False for links or backends that lack that collective: an all-gather and a slice in its place.
            "node": only links inside a node have it. "auto": the best of all, "node" and False, each searched.
        time_limit: seconds, tracing included, after which the best plan so far is returned.
        memory_limit: bytes of a device that may be used.
        memory_margin: share of the predicted peak that is left free for its error.
        planner_memory: bytes that this process may have resident while it plans.
        certify: have an integer program check the slowest pipeline rank.
        rule_cache: a folder that keeps rules that were found by trial.
        args, kwargs, batch: example inputs of a module or graph, and how many samples they have.
        on_progress: called with a `Progress` after every configuration and where another phase begins.
        cancelled: asked between configurations; once it returns True the best plans so far are returned.

    Raises:
        RequestError: if the request contradicts itself, its numbers do not divide, or an argument has a wrong type.
        ModelError: where the model cannot be found or traced.
        RuleError: where an operator has no rule and cannot get one.
        InfeasibleError: if nothing fits; it says how much memory is missing.
        LimitError: where `time_limit` or `planner_memory` was reached, or it was cancelled, before there was a plan.
    """
    numbers(devices=devices, seq_len=seq_len, global_batch=global_batch, top=top)
    amounts(time_limit=time_limit, memory_limit=memory_limit, planner_memory=planner_memory)
    amounts(simplicity=simplicity, memory_margin=memory_margin)
    number("imbalance", imbalance, least=1, whole=False)
    numbers(tokens_once=tokens_once)
    names(cluster=cluster, software=software, engine=engine)
    callbacks(on_progress=on_progress, cancelled=cancelled)
    word("optimizer", optimizer, tuple(OPTIMIZERS))
    word("search", search, tuple(ALGORITHMS))
    word("objective", objective, tuple(OBJECTIVES))
    if precision is not None:
        word("precision", precision, (*PRECISIONS, WORD))
    if fp8 is not None:
        word("fp8", fp8, tuple(RECIPES))
    precision, in_fp8 = chosen(
        precision,
        fp8,
        fp8_left_out,
        gathered=fp8_gathered,
        experts=fp8_experts,
        dispatch=fp8_dispatch,
        history=fp8_history,
        margin=fp8_margin,
    )
    space, stack = space_and_stack(engine, software)
    machine = machine_given(hardware, cluster=cluster, software=stack, devices=devices)
    if memory_margin is not None:
        machine = with_memory_margin(machine, memory_margin)
    decided = pinned_given(pinned)
    placing, changed = places_given(place, record("update", update, Update, DEFAULT))
    padding, multiple, changed = padding_given(pad, changed)
    changed = replicas_given(per_replica, changed)
    if tokens_once is not None:
        decided = replace(decided, node=tokens_once)
    with limited(time_limit, default_memory() if planner_memory is None else planner_memory):
        job = job_of(
            model, machine, seq_len, args, kwargs, batch,
            precision=precision, global_batch=global_batch, rule_cache=rule_cache,
        )  # fmt: skip
        check_told(engine, job.model)
        samples = changed.padding_samples or padding_samples(job.global_batch, multiple)
        request = job.request(
            optimizer=optimizer,
            update=replace(changed, padding_samples=samples),
            placing=placing,
            padding=padding,
            imbalance=imbalance,
            tokens_once=tokens_once is not None,
            fp8=in_fp8,
            fp8_layers=tuple(fp8_layers),
            algorithm=search,
            pinned=forward_pinned(decided) if forward_only else decided,
            shards=shards_given(shard),
            default=default,
            objective=objective,
            top=top,
            time_limit=time_limit,
            memory_limit=memory_limit,
            simplicity=simplicity if top == 1 else 0.0,
            alltoall=alltoall,
            certify=certify,
            space=space,
        )
        told = multiple is not None or changed.padding_samples > 0
        request = with_padded_batch(
            request, given=told, noted=_warned, data_option="pinned data = ", refusing="pad={'batch': 1}"
        )
        return plan_for(request, on_progress or _heard, cancelled or _never)


@public
def estimate(
    model: Any,
    hardware: Machine | str | None = None,
    *,
    devices: int | None = None,
    cluster: str | None = None,
    software: str | None = None,
    pinned: Pinned | Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """Price one configuration, or a plan on other hardware: returns a plan with its `prediction`.

    Args:
        model: a model as for `search`; or a Plan, or the path of a plan file, which is priced again.
        hardware: as for `search`; that of the plan where a plan is given and nothing said.
        devices, cluster, software: as for `search`. For a plan, another number of devices changes the size of its data
            axis.
        pinned: degrees. Those that are not given are 1, data parallelism takes the devices that are left, ZeRO is 0 (1
            with an update's zero_by); micro-batches, recomputation and sequence parallelism are searched.
        options: others of `search`, for a model.

    Raises what `search` raises, and PlanFileError for a file that is none.
    """
    if isinstance(model, Plan | os.PathLike) or (isinstance(model, str) and is_plan_file(model)):
        if pinned is not None or options:
            given = ", ".join(["pinned"] * (pinned is not None) + sorted(options))
            raise RequestError(f"{given}: the plan decides that; give only hardware, devices, cluster and software")
        return _moved(loaded(model), hardware, devices, cluster, software)
    machine = machine_given(hardware or HARDWARE, cluster=cluster, software=software, devices=devices)
    if options.get("objective") == "cost":
        raise RequestError("objective = cost compares configurations, estimate prices one; leave it out, or use search")
    if options.get("engine") is not None:
        raise RequestError(
            f"engine = {options['engine']} searches a plan, estimate prices one; use search, or give software"
        )
    options.setdefault("simplicity", 0.0)
    owned = record("update", options.get("update"), Update, DEFAULT).zero_by != SLICES
    return search(model, machine, pinned=completed(pinned_given(pinned), machine, owned=owned), **options).plan


def _moved(
    plan: Plan, hardware: Machine | str | None, devices: int | None, cluster: str | None, software: str | None
) -> Plan:
    stack = software or plan.cluster.software
    known = replace(plan.cluster, devices=devices or plan.cluster.devices, software=stack)
    graph, batch = planned_graph(plan)
    if hardware is None and cluster is None:
        return repriced(plan, graph, batch, machine_of(known)).plan
    there = plan.cluster.profile if hardware is None else hardware
    machine = machine_given(there, cluster=cluster, software=stack, devices=known.devices)
    return repriced(plan, graph, batch, machine).plan


def _warned(note: str) -> None:
    warnings.warn(note, stacklevel=5)


def _heard(progress: Progress) -> None:
    """Does nothing: the default callback."""


def _never() -> bool:
    return False
