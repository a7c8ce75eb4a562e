"""The programmatic face of the search: a model, a cluster, and what is decided; plans come back.

import planner

result = planner.search("llama70b", "h100-80gb", devices=64)
result.plan.prediction.step_seconds, result.gap
planner.search(module, cluster, args=(tokens, labels), global_batch=256, shards=[planner.shard("*.q_proj", "b,o")])
"""

import ast
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware_profiles import Machine
from hardware_profiles.foreign import ForeignTextError, literal, parse_python
from planner.engines.spaces import space_and_stack
from planner.errors import RequestError
from planner.graph.expert_load import EVEN
from planner.graph.operator_graph import OperatorGraph
from planner.limits import default_memory, limited
from planner.sharding.update import DEFAULT, Update
from planner.strategy_search.job import given_job, machine_from, named_job, with_memory_margin
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.request.request import Default, Objective, Placing, Shard
from planner.strategy_search.request.space import FREE, Pinned, forward_pinned
from planner.strategy_search.result import Progress, SearchResult

if TYPE_CHECKING:
    from planner.models.zoo import BuiltModel


def search(
    model: Any,
    cluster: Machine | str,
    *,
    devices: int | None = None,
    software: str | None = None,
    engine: str | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    batch: int | None = None,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    update: Update = DEFAULT,
    placing: Placing = "fit",
    imbalance: float = EVEN,
    algorithm: str = "dynamic_programming",
    pinned: Pinned = FREE,
    shards: Sequence[Shard] = (),
    default: Default = "search",
    forward_only: bool = False,
    objective: Objective = "time",
    top: int = 1,
    rule_cache: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    memory_limit: float | None = None,
    memory_margin: float | None = None,
    planner_memory: float | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """Search for the best plans.

    Args:
        model: the name of a zoo model, a torch module whose call gives the loss, or a traced OperatorGraph.
        cluster: a cluster, or the name of a hardware profile, or a text for several kinds of devices,
            "h100-80gb:32,a100-80gb:32" (see `hardware_profiles.mixed`).
        devices: how many devices of the cluster to use; all that it says it has where not given.
        software: the training stack that will run the plan (`hardware_profiles.software_names`); that of the cluster
            where one is given as such, else PyTorch.
        engine: the training engine that will run the plan, such as "megatron" (`planner.engines.spaces`): the best plan
            that it can be told is searched, for its own training stack unless `software` says otherwise.
        args, kwargs: example inputs of a module, with `batch` samples (the first dim of the first tensor where not
            given). Parameters and inputs may be on the meta device.
        batch: samples in the example inputs; needed for an OperatorGraph.
        sequence_length: tokens per sample of a zoo model; its own where not given.
        precision: "bf16", "fp16" or "fp32"; bf16 where not given, fp32 on CPUs.
        global_batch: samples of an optimizer step; 4 per device where not given.
        update: what becomes of gradients: how they are added up, reduced (in buckets where nothing is said) and
            clipped; see `planner.Update`.
        placing: "fit" moves tables of embeddings to the host where nothing fits otherwise and the model is mostly
            tables, "auto" where that is better, "given" none but those that `update` places.
        imbalance: rows of the device with the most of them over the average, where experts are divided among devices;
            1, the default, is a router that gives all the same (see `planner.graph.expert_load` for what is measured).
        pinned: degrees and other choices made by hand.
        shards: strategies of operators made by hand, see `shard`.
        default: what operators beside `shards` do: "search", or "data_parallel", which splits the batch.
        forward_only: whether the forward pass alone is planned, for evaluation: without backward pass, gradients and
            states of an optimizer.
        objective: "time" (seconds of a step), "memory" (bytes per device) or "cost" (device-seconds of a step).
        top: how many plans to return, of different configurations.
        rule_cache: a folder that keeps the rules of operators that the table of rules lacks, see `discover`. What must
            be known of them is given as a UserWarning.
        time_limit: seconds, tracing and pricing among them, after which the best plan so far is returned, with its gap.
        memory_limit: bytes of a device that may be used, if less than it has.
        memory_margin: share of the predicted peak that is left free for its error; where not given what the errors of
            measured runs with the training stack ask for (`hardware_profiles.Software.peak_high`).
        planner_memory: bytes that this process may have resident while it plans; what it has, and most of what the
            machine has available, where not given. Where it is reached, the best plan so far is returned.
        on_progress: called after every configuration that was evaluated, and where another phase begins.
        cancelled: asked between configurations; where it returns True the best plans so far are returned.

    Raises:
        RequestError: where the request contradicts itself or divides into nothing.
        ModelError: where the model cannot be traced.
        RuleError: where an operator has no rule and cannot get one, as it draws random numbers.
        InfeasibleError: where nothing fits; it says how much is missing.
        LimitError: where `time_limit` or `planner_memory` was reached before there was a plan.
    """
    space, software = space_and_stack(engine, software)
    machine = machine_from(cluster, software=software, devices=devices)
    if memory_margin is not None:
        machine = with_memory_margin(machine, memory_margin)
    asked: dict[str, Any] = {
        "precision": precision,
        "global_batch": global_batch,
        "rule_cache": None if rule_cache is None else Path(rule_cache),
        "noted": lambda note: warnings.warn(note, stacklevel=2),
    }
    with limited(time_limit, default_memory() if planner_memory is None else planner_memory):
        if isinstance(model, str):
            job = named_job(model, machine, _trace, sequence_length=sequence_length, **asked)
        else:
            job = given_job(model, machine, args=args, kwargs=kwargs, batch=batch, **asked)
        request = job.request(
            optimizer=optimizer,
            update=update,
            placing=placing,
            imbalance=imbalance,
            algorithm=algorithm,
            pinned=forward_pinned(pinned) if forward_only else pinned,
            shards=tuple(shards),
            default=default,
            objective=objective,
            top=top,
            time_limit=time_limit,
            memory_limit=memory_limit,
            space=space,
        )
        return plan_for(request, on_progress, cancelled)


def _trace(model: "BuiltModel") -> OperatorGraph:
    from planner.graph.trace import trace

    return trace(model.module, model.args, model.kwargs)


def shard(pattern: str, strategy: str | Sequence[Sequence[int]]) -> Shard:
    """A strategy decided by hand for the operators whose name matches `pattern` (wildcards as in `fnmatch`).

    `strategy` names a factor of the operator for each mesh axis, slowest links first: "b,o", with "-" for an axis that
    is not used and "*" for one that is left to the search. Or it says into how many pieces each dim of each operand is
    cut, ((4, 1, 1), (1, 2)) for a linear layer, as text or as numbers; that holds on any mesh on which it is possible.
    Operators are called as `plan show` and plan files call them; a pattern that matches an operator of the first block
    holds for all blocks.
    """
    if not isinstance(strategy, str):
        return Shard(pattern=pattern, cuts=tuple(tuple(int(pieces) for pieces in dims) for dims in strategy))
    text = strategy.strip()
    if not text:
        raise RequestError(f"--shard {pattern}=: the strategy is missing; write the names of factors, as in b,o")
    if text.startswith("("):
        return Shard(pattern=pattern, cuts=_cuts(pattern, text))
    return Shard(pattern=pattern, strategy=tuple(word.strip() for word in text.split(",")))


def _cuts(pattern: str, text: str) -> tuple[tuple[int, ...], ...]:
    try:
        body = parse_python(text).body
        found = literal(body[0].value) if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    except ForeignTextError:
        found = None
    rows = found if isinstance(found, tuple) and all(isinstance(row, tuple) for row in found) else ()
    if not rows or not all(isinstance(pieces, int) and pieces > 0 for row in rows for pieces in row):
        raise RequestError(
            f"--shard {pattern}={text:.80}: write the cuts of each operand's dims, as in ((4,1,1),(1,2))"
        )
    return rows
