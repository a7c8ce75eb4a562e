"""From options to a request, in one place for Python and the command: checks, machine, traced model, decisions.

options ──checked──▶ SearchOptions, complete ──request_of──▶ SearchRequest
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from costmodels import FORWARD
from hardware_profiles import Machine, parts_of
from planner.api.checks import amounts, names, number, numbers, record, texts, word
from planner.api.decisions import padding_given, pinned_given, places_given, replicas_given, shards_given
from planner.api.exporting import check_told
from planner.api.jobs import job_of, machine_given, warned
from planner.api.search_options import USUAL, JobOptions, SearchOptions
from planner.engines.spaces import space_and_stack
from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import WORD, chosen
from planner.graph.operator_graph import OperatorGraph
from planner.graph.random_ops import dropping_attention
from planner.limits import default_memory
from planner.plan.plan import OPTIMIZERS, PRECISIONS
from planner.sharding.compared_samples import comparing_samples
from planner.sharding.update import DEFAULT, Update
from planner.strategy_search.job import Job, Trace, with_memory_margin
from planner.strategy_search.request.padded_batch import padding_samples, with_padded_batch
from planner.strategy_search.request.request import ALGORITHMS, OBJECTIVES, SearchRequest, Shard
from planner.strategy_search.request.space import forward_pinned


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks.

    Attributes:
        traced: traces a built model; None: `planner.api.jobs.traced_model`.
        noted: gets notes for people.
        more_shards: told the graph; strategies of operators besides those of the options.
    """

    traced: Trace | None = None
    noted: Callable[[str], None] = warned
    more_shards: Callable[[OperatorGraph], tuple[Shard, ...]] = lambda graph: ()


IN_PYTHON = Caller()


def checked(options: JobOptions | SearchOptions) -> SearchOptions:
    """All options, those that are not given as usual. Raises RequestError for an argument of another type."""
    asked: SearchOptions = {**USUAL, **options}
    numbers(seq_len=asked["seq_len"], global_batch=asked["global_batch"], top=asked["top"])
    amounts(
        time_limit=asked["time_limit"],
        memory_limit=asked["memory_limit"],
        planner_memory=asked["planner_memory"],
        simplicity=asked["simplicity"],
        memory_margin=asked["memory_margin"],
    )
    number("imbalance", asked["imbalance"], whole=False)
    numbers(tokens_once=asked["tokens_once"])
    names(cluster=asked["cluster"], engine=asked["engine"])
    for name in ("fp8_layers", "fp8_left_out"):
        texts(name, asked[name])
    word("optimizer", asked["optimizer"], tuple(OPTIMIZERS))
    word("search", asked["search"], tuple(ALGORITHMS))
    word("objective", asked["objective"], tuple(OBJECTIVES))
    if asked["precision"] is not None:
        word("precision", asked["precision"], (*PRECISIONS, WORD))
    if asked["fp8"] is not None:
        word("fp8", asked["fp8"], tuple(RECIPES))
    pinned_given(asked["pinned"])
    shards_given(asked["shard"])
    record("update", asked["update"], Update, DEFAULT)
    return asked


def memory_of(asked: SearchOptions) -> float:
    """Bytes that the planner itself may have resident."""
    return default_memory() if asked["planner_memory"] is None else asked["planner_memory"]


def request_of(
    model: Any,
    hardware: Machine | str | os.PathLike[str],
    asked: SearchOptions,
    *,
    devices: int | None = None,
    software: str | None = None,
    caller: Caller = IN_PYTHON,
) -> SearchRequest:
    """Trace the model and build the request. Options are complete, as `checked` returns them.

    Raises RequestError for what contradicts itself, ModelError, RuleError.
    """
    precision, in_fp8 = chosen(
        asked["precision"],
        asked["fp8"],
        asked["fp8_left_out"],
        gathered=asked["fp8_gathered"],
        experts=asked["fp8_experts"],
        dispatch=asked["fp8_dispatch"],
        history=asked["fp8_history"],
        margin=asked["fp8_margin"],
    )
    space, stack = space_and_stack(asked["engine"], software)
    machine = machine_given(hardware, cluster=asked["cluster"], software=stack, devices=devices)
    if asked["memory_margin"] is not None:
        machine = with_memory_margin(machine, asked["memory_margin"])
    decided, shards, tokens_once = pinned_given(asked["pinned"]), shards_given(asked["shard"]), asked["tokens_once"]
    placing, changed = places_given(asked["place"], record("update", asked["update"], Update, DEFAULT))
    padding, multiple, changed = padding_given(asked["pad"], changed)
    changed = replicas_given(asked["per_replica"], changed)
    if tokens_once is not None:
        decided = replace(decided, node=tokens_once)
    job = job_of(
        model,
        machine,
        asked["seq_len"],
        asked["args"],
        asked["kwargs"],
        asked["batch"],
        precision=precision,
        global_batch=asked["global_batch"],
        rule_cache=asked["rule_cache"],
        graph_cache=asked["graph_cache"],
        traced=caller.traced,
        noted=caller.noted,
    )
    if unlike := _unlike(job):
        caller.noted(unlike)
    more = caller.more_shards(job.graph)
    pinned = forward_pinned(decided) if asked["forward_only"] else decided
    if pinned.schedule != FORWARD and (dropping := _dropping(job)):
        caller.noted(dropping)
    if pinned.micro_batches is None and job.only_batch is not None:
        caller.noted(
            f"micro-batches have the {job.batch} samples of the model's example; for others give an example with"
            f" as many: {job.only_batch}"
        )
    elif pinned.micro_batches != 1 and (comparing := comparing_samples(job.graph, job.batch)):
        caller.noted(comparing)
    check_told(asked["engine"], job.model)
    samples = changed.padding_samples or padding_samples(job.global_batch, multiple)
    request = job.request(
        optimizer=asked["optimizer"],
        update=replace(changed, padding_samples=samples),
        placing=placing,
        padding=padding,
        imbalance=asked["imbalance"],
        tokens_once=tokens_once is not None,
        fp8=in_fp8,
        fp8_layers=tuple(asked["fp8_layers"]),
        algorithm=asked["search"],
        pinned=pinned,
        shards=(*shards, *more),
        default=asked["default"],
        objective=asked["objective"],
        top=asked["top"],
        time_limit=asked["time_limit"],
        memory_limit=asked["memory_limit"],
        simplicity=asked["simplicity"],
        alltoall=asked["alltoall"],
        certify=asked["certify"],
        space=space,
    )
    return with_padded_batch(
        request,
        given=multiple is not None or changed.padding_samples > 0,
        noted=caller.noted,
    )


def _unlike(job: Job) -> str | None:
    """What a user must know of weights that all have another dtype than the precision means; None if there is
    nothing."""
    types = [job.graph.types[one.name] for one in job.graph.parameters]
    dtypes, wanted = {one.dtype for one in types if one.floating}, PRECISIONS[job.precision]
    if len(dtypes) != 1 or wanted in dtypes:
        return None
    return (
        f"the weights are {dtypes.pop()}, and precision '{job.precision}' means {wanted}; the model is planned as it"
        f" is: convert it (module.to(torch.{wanted})) and its inputs, or take the precision that it has"
    )


def _dropping(job: Job) -> str | None:
    """What a user must know of attention that drops probabilities; None if there is nothing."""
    fused, kernels = job.cluster.software.drops_fused, job.cluster.software.attention
    priced = all(part.device.dropout_slowdown(kernels) for part in parts_of(job.cluster))
    return dropping_attention(job.graph.operators, fused=fused, priced=priced)
