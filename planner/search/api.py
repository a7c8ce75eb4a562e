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
from typing import Any

from hardware_profiles import Machine, load_machine
from hardware_profiles.foreign import ForeignTextError, literal, parse_python
from planner.errors import RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.uneven import EVEN
from planner.limits import default_memory, limited
from planner.plan.outline import model_reference
from planner.plan.plan import PRECISIONS, ModelReference
from planner.search.fixed_batch import with_fixed_batch
from planner.search.objectives import plan_for
from planner.search.request import Objective, Placing, SearchRequest, Shard
from planner.search.search import Progress, SearchResult
from planner.search.space import FREE, Pinned
from planner.sharding.discover import discover
from planner.sharding.fixed_batch import batch_fault
from planner.sharding.update import DEFAULT, Update

SAMPLES_PER_DEVICE = 4
"""Of the global batch where none is given."""


def search(
    model: Any,
    cluster: Machine | str,
    *,
    devices: int | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    batch: int | None = None,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    update: Update = DEFAULT,
    placing: Placing = "fit",
    imbalance: float = EVEN,
    algorithm: str = "dynamic_programming",
    pinned: Pinned = FREE,
    shards: Sequence[Shard] = (),
    objective: Objective = "time",
    top: int = 1,
    rule_cache: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    memory_limit: float | None = None,
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
        args, kwargs: example inputs of a module, with `batch` samples (the first dim of the first tensor where not
            given). Parameters and inputs may be on the meta device.
        batch: samples in the example inputs; needed for an OperatorGraph.
        sequence_length: tokens per sample of a zoo model.
        global_batch: samples of an optimizer step; 4 per device where not given.
        update: what becomes of gradients: how they are added up, reduced (in buckets where nothing is said) and
            clipped; see `planner.Update`.
        placing: "fit" moves tables of embeddings to the host where nothing fits otherwise and the model is mostly
            tables, "auto" where that is better, "given" none but those that `update` places.
        imbalance: rows of the device with the most of them over the average, where experts are divided among devices;
            1, the default, is a router that gives all the same (see `planner.graph.uneven` for what is measured).
        pinned: degrees and other choices made by hand.
        shards: strategies of operators made by hand, see `shard`.
        objective: "time" (seconds of a step), "memory" (bytes per device) or "cost" (device-seconds of a step).
        top: how many plans to return, of different configurations.
        rule_cache: a folder that keeps the rules of operators that the table of rules lacks, see `discover`. What must
            be known of them is given as a UserWarning.
        time_limit: seconds, tracing and pricing among them, after which the best plan so far is returned, with its gap.
        memory_limit: bytes of a device that may be used, if less than it has.
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
    machine = load_machine(cluster) if isinstance(cluster, str) else cluster
    if devices is not None:
        machine = machine.with_devices(devices)

    def request_of() -> SearchRequest:
        graph, reference, samples = _traced(model, args, kwargs or {}, batch, sequence_length, precision)
        cache = None if rule_cache is None else Path(rule_cache)
        graph = discover(graph, cache, lambda note: warnings.warn(note, stacklevel=2))
        fault = _batch_fault(model, args, kwargs or {}, graph, samples)
        request = SearchRequest(
            graph=graph,
            batch=samples,
            model=reference,
            cluster=machine,
            global_batch=SAMPLES_PER_DEVICE * machine.devices if global_batch is None else global_batch,
            precision=precision,
            optimizer=optimizer,
            update=update,
            placing=placing,
            imbalance=imbalance,
            algorithm=algorithm,
            pinned=pinned,
            shards=tuple(shards),
            objective=objective,
            top=top,
            time_limit=time_limit,
            memory_limit=memory_limit,
        )
        return request if fault is None else with_fixed_batch(request, fault, given=global_batch is not None)

    with limited(time_limit, default_memory() if planner_memory is None else planner_memory):
        return plan_for(request_of(), on_progress, cancelled)


def _batch_fault(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], graph: OperatorGraph, batch: int
) -> str | None:
    """Why a module of the user's computes with one batch alone; of the others it is known that they do not."""
    from planner.graph.examples import with_samples
    from planner.graph.on_meta import on_meta
    from planner.graph.trace import trace

    if isinstance(model, str | OperatorGraph):
        return None
    return batch_fault(
        graph, batch, lambda samples: trace(on_meta(model), *with_samples((args, dict(kwargs)), batch, samples))
    )


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


def _traced(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch: int | None,
    sequence_length: int | None,
    precision: str,
) -> tuple[OperatorGraph, ModelReference, int]:
    from planner.graph.on_meta import on_meta
    from planner.graph.trace import trace

    if isinstance(model, OperatorGraph):
        if batch is None:
            raise RequestError("batch: say how many samples the example inputs of the traced graph have")
        return model, model_reference(model, name="graph", sequence_length=None, batch=batch), batch
    if isinstance(model, str):
        from planner.models.zoo import build_model

        if precision not in PRECISIONS:
            raise RequestError(f"precision '{precision}' is none of {', '.join(PRECISIONS)}")
        built = build_model(model, dtype=PRECISIONS[precision], sequence_length=sequence_length)
        graph = trace(built.module, built.args, built.kwargs)
        reference = model_reference(graph, name=model, sequence_length=built.sequence_length, batch=built.batch)
        return graph, reference, built.batch
    graph = trace(on_meta(model), args, dict(kwargs))
    samples = batch
    if samples is None:
        tensors = [value for value in (*args, *kwargs.values()) if getattr(value, "ndim", 0)]
        if not tensors:
            raise RequestError("args: give example inputs with a batch dim, or say how many samples they have: batch")
        samples = int(tensors[0].shape[0])
    name = type(model).__name__
    return graph, model_reference(graph, name=name, sequence_length=None, batch=samples), samples
