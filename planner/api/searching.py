"""From a model to plans: `planner.trace`, `planner.search`, `planner.estimate`.

    result = planner.search("llama70b", "h100", devices=64, pinned={"tensor": 8, "zero": 1})
    plan = planner.estimate("llama70b", "h100", devices=64, pinned={"tensor": 8, "pipeline": 8})

Parameters have the names and defaults of the options of `plan search`; degrees and similar decisions are in `pinned`,
gradient and optimizer settings in `update`.
"""

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware_profiles import Machine
from hardware_profiles.nicknames import full_profile
from planner.api.checks import callback, file_path, kind_of, number, public, record, text, texts, word
from planner.api.exporting import check_told
from planner.engines.spaces import space_and_stack
from planner.errors import RequestError
from planner.fp8_recipes import RECIPES
from planner.graph.expert_load import EVEN
from planner.graph.fp8 import WORD, chosen
from planner.graph.operator_graph import OperatorGraph
from planner.limits import default_memory, limited
from planner.models.nicknames import full_model
from planner.plan.binding.machine import machine_of
from planner.plan.compare.repricing import repriced
from planner.plan.plan import OPTIMIZERS, PRECISIONS, Plan
from planner.sharding.update import DEFAULT, Update
from planner.strategy_search.job import (
    Job,
    given_job,
    machine_from,
    named_job,
    with_memory_margin,
)
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.request.offload import NOTHING, parse_offload
from planner.strategy_search.request.padded_batch import padding_samples, with_padded_batch
from planner.strategy_search.request.per_replica import parse_per_replica
from planner.strategy_search.request.request import (
    ALGORITHMS,
    OBJECTIVES,
    SIMPLICITY,
    Alltoall,
    Default,
    Objective,
    Padding,
    Placing,
    Shard,
)
from planner.strategy_search.request.shard import shard as sharded
from planner.strategy_search.request.space import FREE, Pinned, forward_pinned
from planner.strategy_search.result import Progress, SearchResult

if TYPE_CHECKING:
    from planner.models.zoo import BuiltModel

HARDWARE = "h100-80gb"

Shards = Mapping[str, "str | Sequence[Sequence[int]]"] | Sequence[Shard]
"""Strategies given by hand: {"*q_proj*": "b,o"}, or records of `planner.shard`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TracedModel:
    """A model as a graph of operators, on example inputs of `batch` samples. `search` can use it many times without
    tracing again."""

    job: Job

    @property
    def graph(self) -> OperatorGraph:
        return self.job.graph

    @property
    def batch(self) -> int:
        return self.job.batch

    @property
    def name(self) -> str:
        return self.job.model.reference

    def __repr__(self) -> str:
        return f"TracedModel({self.name!r}, {len(self.graph.operators)} operators, {self.job.precision})"


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
    job = _job(
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
    for name, value in (("devices", devices), ("seq_len", seq_len), ("global_batch", global_batch), ("top", top)):
        number(name, value)
    for name, limit in (("time_limit", time_limit), ("memory_limit", memory_limit), ("planner_memory", planner_memory)):
        number(name, limit, least=0, whole=False)
    number("simplicity", simplicity, least=0, whole=False)
    number("memory_margin", memory_margin, least=0, whole=False)
    number("imbalance", imbalance, least=1, whole=False)
    number("tokens_once", tokens_once)
    for name, words in (("cluster", cluster), ("software", software), ("engine", engine)):
        text(name, words)
    for name, heard in (("on_progress", on_progress), ("cancelled", cancelled)):
        callback(name, heard)
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
    decided, placing, changed = _decided(pinned), *_placed(place, record("update", update, Update, DEFAULT))
    padding, multiple, changed = _padded(pad, changed)
    changed = _replicated(per_replica, changed)
    if tokens_once is not None:
        decided = replace(decided, node=tokens_once)
    with limited(time_limit, default_memory() if planner_memory is None else planner_memory):
        job = _job(
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
            shards=_shards(shard),
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
        pinned: degrees. Those that are not given are 1, data parallelism takes the devices that are left, ZeRO is 0;
            micro-batches, recomputation and sequence parallelism are searched.
        options: others of `search`, for a model.

    Raises what `search` raises, and PlanFileError for a file that is none.
    """
    if isinstance(model, Plan | os.PathLike) or (isinstance(model, str) and _is_plan_file(model)):
        if pinned is not None or options:
            given = ", ".join(["pinned"] * (pinned is not None) + sorted(options))
            raise RequestError(f"{given}: the plan decides that; give only hardware, devices, cluster and software")
        return _moved(loaded(model), hardware, devices, cluster, software)
    machine = machine_given(hardware or HARDWARE, cluster=cluster, software=software, devices=devices)
    options.setdefault("simplicity", 0.0)
    return search(model, machine, pinned=_completed(_decided(pinned), machine), **options).plan


def machine_given(
    hardware: Machine | str, *, cluster: str | None = None, software: str | None = None, devices: int | None = None
) -> Machine:
    """The machine of the arguments. Raises RequestError, HardwareProfileError."""
    if isinstance(hardware, os.PathLike):
        hardware = os.fspath(hardware)
    if not isinstance(hardware, str) and not hasattr(hardware, "with_devices"):
        raise RequestError(f"hardware is {kind_of(hardware)}: give the name or file of a profile, or a machine")
    number("devices", devices)
    named = full_profile(hardware) if isinstance(hardware, str) else hardware
    return machine_from(named, levels=cluster, software=software, devices=devices)


def loaded(plan: "Plan | str | os.PathLike[str]") -> Plan:
    """A plan unchanged, or loaded from its file."""
    from planner.plan.file import load_plan

    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | os.PathLike):
        raise RequestError(f"plan is {kind_of(plan)}: give a Plan or the path of a plan file")
    return load_plan(plan)


def planned_graph(plan: Plan, model: str | None = None) -> tuple[OperatorGraph, int]:
    """The graph of a plan's model and its samples: from the given model, the zoo, or the plan itself."""
    from planner.plan.binding.model_of import build_planned, carried_model

    carried = carried_model(plan) if model is None else None
    if carried is not None:
        return carried.graph, carried.batch
    built = build_planned(plan, None if model is None else full_model(model))
    return traced_model(built), built.batch


def _is_plan_file(text: str) -> bool:
    """Whether a text names a plan file: JSON that is not a model config."""
    return text.endswith(".json") and Path(text).name != "config.json" and Path(text).is_file()


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


def _completed(pinned: Pinned, machine: Machine) -> Pinned:
    """All degrees: data parallelism takes the remaining devices."""
    filled = replace(
        pinned,
        tensor=pinned.tensor or 1,
        pipeline=pinned.pipeline or 1,
        context=pinned.context or 1,
        expert=pinned.expert or 1,
        virtual_stages=pinned.virtual_stages or (None if pinned.schedule == "interleaved_1f1b" or pinned.in_a_v else 1),
        zero=pinned.zero or 0,
        offload=pinned.offload or NOTHING,
    )
    others = math.prod(degree or 1 for degree in (filled.tensor, filled.pipeline, filled.context))
    if pinned.mesh is not None:
        raise RequestError("pinned['mesh']: estimate takes degrees; leave the mesh to search")
    if filled.data is None and machine.devices % others:
        raise RequestError(
            f"tensor x pipeline x context = {others} does not divide {machine.devices} devices; change a degree"
        )
    return replace(filled, data=filled.data or machine.devices // others)


def _decided(pinned: object) -> Pinned:
    if isinstance(pinned, Mapping):
        pinned = dict(pinned)
        if isinstance(pinned.get("offload"), str):
            pinned["offload"] = parse_offload(pinned["offload"])
        if isinstance(pinned.get("mesh"), list):
            pinned["mesh"] = tuple(pinned["mesh"])
    return record("pinned", pinned, Pinned, FREE)


def _placed(place: object, update: Update) -> tuple[Placing, Update]:
    if place is None:
        return ("given" if update.placed else "fit"), update
    if isinstance(place, Mapping):
        tables = tuple((str(pattern), str(where)) for pattern, where in place.items())
        return "given", replace(update, placed=(*update.placed, *tables))
    word("place", place, ("auto", "none"))
    return ("auto" if place == "auto" else "given"), update


def _padded(pad: object, update: Update) -> tuple[Padding, int | None, Update]:
    """How the search pads weights, the multiple of the global batch, and the update with the padded weights."""
    if pad is None:
        return "given", None, update
    if not isinstance(pad, Mapping):
        word("pad", pad, ("auto",))
        return "auto", None, update
    for pattern, multiple in pad.items():
        number(f"pad[{str(pattern)[:80]!r}]", multiple)
    weights = tuple((str(pattern), multiple) for pattern, multiple in pad.items() if pattern != "batch")
    if "batch" in pad and update.padding_samples:
        raise RequestError("pad['batch'] and update['padding_samples'] both pad the global batch; give one of them")
    return "given", pad.get("batch"), replace(update, padded=(*update.padded, *weights))


def _replicated(per_replica: Sequence[str], update: Update) -> Update:
    """The update with the operators that each replica computes alone."""
    texts("per_replica", per_replica)
    patterns, count = parse_per_replica(per_replica)
    if update.replicas and count not in (0, update.replicas):
        raise RequestError(f"per_replica has {count} replicas, update['replicas'] {update.replicas}; give one of them")
    both = tuple(dict.fromkeys((*update.per_replica, *patterns)))
    return replace(update, per_replica=both, replicas=count or update.replicas)


def _warned(note: str) -> None:
    warnings.warn(note, stacklevel=5)


def _shards(given: object) -> tuple[Shard, ...]:
    if isinstance(given, Mapping):
        return tuple(sharded(str(pattern), strategy) for pattern, strategy in given.items())
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, Shard) for one in given):
        raise RequestError("shard: give {'*q_proj*': 'b,o'}, or a list of planner.shard(pattern, strategy)")
    return tuple(given)


def _job(
    model: Any,
    machine: Machine,
    seq_len: int | None,
    args: Any,
    kwargs: Any,
    batch: int | None,
    *,
    precision: str | None,
    global_batch: int | None = None,
    rule_cache: str | os.PathLike[str] | None = None,
    graph_cache: str | os.PathLike[str] | None = None,
) -> Job:
    if isinstance(model, TracedModel):
        if seq_len is not None or args or kwargs or batch is not None or precision not in (None, model.job.precision):
            raise RequestError("the model is traced: say seq_len, precision and example inputs to planner.trace")
        return replace(model.job, cluster=machine, asked_batch=global_batch)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping | None):
        raise RequestError("args, kwargs: give a tuple and a dict of example inputs, as the module is called")
    asked: dict[str, Any] = {
        "precision": precision,
        "global_batch": global_batch,
        "rule_cache": None if rule_cache is None else file_path("rule_cache", rule_cache),
        "noted": lambda note: warnings.warn(note, stacklevel=4),
    }
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if isinstance(model, str):
        kept = None if graph_cache is None else file_path("graph_cache", graph_cache)
        return named_job(full_model(model), machine, traced_model, sequence_length=seq_len, graph_cache=kept, **asked)
    if not isinstance(model, OperatorGraph) and not callable(getattr(model, "named_parameters", None)):
        raise RequestError(f"model is {kind_of(model)}: give a name, a torch module, or what planner.trace returned")
    if seq_len is not None:
        raise RequestError("seq_len is for models that are named; example inputs say how long their sequences are")
    return given_job(model, machine, args=tuple(args), kwargs=kwargs, batch=batch, **asked)


def traced_model(model: "BuiltModel") -> OperatorGraph:
    """The graph of a built model."""
    from planner.graph.on_meta import without_data
    from planner.graph.trace import trace

    bare = without_data(model.module, on_host=model.on_host)
    return trace(bare, model.args, model.kwargs, compared=model.compared)


def _heard(progress: Progress) -> None:
    """Does nothing: the default callback."""


def _never() -> bool:
    return False
