"""From a model to plans: `planner.trace`, `planner.search`, `planner.estimate`.

    result = planner.search("llama70b", "h100", devices=64, pinned={"tensor": 8, "zero": 1})
    plan = planner.estimate("llama70b", "h100", devices=64, pinned={"tensor": 8, "pipeline": 8})

Parameters have the names and defaults of the options of `plan search`; degrees and similar decisions are in `pinned`,
gradient and optimizer settings in `update`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Unpack

from hardware_profiles import Machine
from planner.api.checks import callbacks, names, number, numbers, public, record, word
from planner.api.decisions import completed, pinned_given
from planner.api.jobs import HARDWARE, TracedModel, job_of, machine_given
from planner.api.planned import is_plan_file, loaded, planned_graph
from planner.api.requesting import checked, memory_of, request_of
from planner.api.search_options import SearchOptions
from planner.errors import RequestError
from planner.limits import limited
from planner.plan.binding.machine import machine_of
from planner.plan.compare.repricing import repriced
from planner.plan.plan import PRECISIONS, Plan
from planner.sharding.update import DEFAULT, SLICES, Update
from planner.strategy_search.job import machine_from
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.result import Progress, SearchResult


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
    hardware: Machine | str | os.PathLike[str] = HARDWARE,
    *,
    devices: int | None = None,
    software: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **options: Unpack[SearchOptions],
) -> SearchResult:
    """Search for the best plans.

    Args:
        model: a name as for `--model` ("llama70b", "meta-llama/Llama-3.1-70B", "path/config.json", "package:factory"),
            a torch module whose call gives the loss, in the dtype in which it is trained, what `trace` returned, or an
            OperatorGraph.
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
            `fp8`. Where not given bf16, fp32 on CPUs, and fp16 on devices without matrix units for bf16 (V100, Ascend
            910A).
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
            is faster; a list has both, ["auto", {"batch": 4}]. Where pinned["data"] does not divide the global batch,
            it is padded unless "batch" is here.
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
        graph_cache: a folder that keeps traced graphs, of zoo models and of a config.json.
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
    numbers(devices=devices)
    names(software=software)
    callbacks(on_progress=on_progress, cancelled=cancelled)
    asked = checked(options)
    if asked["top"] > 1:
        asked["simplicity"] = 0.0
    with limited(asked["time_limit"], memory_of(asked)):
        request = request_of(model, hardware, asked, devices=devices, software=software)
        return plan_for(request, on_progress or _heard, cancelled or _never)


@public
def estimate(
    model: Any,
    hardware: Machine | str | os.PathLike[str] | None = None,
    *,
    devices: int | None = None,
    software: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **options: Unpack[SearchOptions],
) -> Plan:
    """Price one configuration, or a plan on other hardware: returns a plan with its `prediction`.

    Args:
        model: a model as for `search`; or a Plan, or the path of a plan file, which is priced again.
        hardware: as for `search`; that of the plan where a plan is given and nothing said.
        devices, cluster, software: as for `search`. For a plan, another number of devices changes the size of its data
            axis.
        pinned: degrees. Those that are not given are 1, data parallelism takes the devices that are left, ZeRO is 0 (1
            with an update's zero_by); micro-batches, recomputation and sequence parallelism are searched.
        on_progress, cancelled, and the other options: as for `search`, for a model.

    Raises what `search` raises, and PlanFileError for a file that is none.
    """
    if isinstance(model, Plan | os.PathLike) or (isinstance(model, str) and is_plan_file(model)):
        given = ", ".join(sorted({*options} - {"cluster"}))
        if given:
            raise RequestError(f"{given}: the plan decides that; give only hardware, devices, cluster and software")
        return _moved(loaded(model), hardware, devices, options.get("cluster"), software)
    there = HARDWARE if hardware is None else hardware
    machine = machine_given(there, cluster=options.get("cluster"), software=software, devices=devices)
    if options.get("objective") == "cost":
        raise RequestError("objective = cost compares configurations, estimate prices one; leave it out, or use search")
    if options.get("engine") is not None:
        raise RequestError(
            f"engine = {options['engine']} needs a search: use search, or price one configuration with software"
        )
    owned = record("update", options.get("update"), Update, DEFAULT).zero_by != SLICES
    options["pinned"] = completed(pinned_given(options.get("pinned")), machine, owned=owned)
    options["cluster"] = None  # it is the machine's now
    options.setdefault("simplicity", 0.0)
    return search(model, machine, on_progress=on_progress, cancelled=cancelled, **options).plan


def _moved(
    plan: Plan,
    hardware: Machine | str | os.PathLike[str] | None,
    devices: int | None,
    cluster: str | None,
    software: str | None,
) -> Plan:
    stack = software or plan.cluster.software
    known = replace(plan.cluster, devices=devices or plan.cluster.devices, software=stack)
    graph, batch = planned_graph(plan)
    if hardware is None and cluster is None:
        return repriced(plan, graph, batch, machine_of(known)).plan
    there = plan.cluster.profile if hardware is None else hardware
    machine = machine_given(there, cluster=cluster, software=stack, devices=known.devices)
    return repriced(plan, graph, batch, machine).plan


def _heard(progress: Progress) -> None:
    """Does nothing: the default callback."""


def _never() -> bool:
    return False
