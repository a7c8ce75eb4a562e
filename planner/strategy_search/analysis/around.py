"""Searches around an existing plan: what would be best if something were different.

A plan file does not say which parts of it were decided by hand. So there are two ways to search again: with nothing
decided, or within the configuration of the plan (mesh, pipeline, micro-batches, schedule), with everything else free
but the choice in question.
"""

import glob
import math
from dataclasses import replace

from hardware_profiles import Machine
from planner.errors import LimitError, PlannerError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import Plan, Prediction
from planner.sharding.discover import with_rules
from planner.sharding.update import AUTO_BUCKETS, AUTO_GATHERS, Update
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.objectives import Listener, Stop
from planner.strategy_search.request.offload import offload_of
from planner.strategy_search.request.request import SearchRequest, Shard
from planner.strategy_search.request.space import Pinned, forward_pinned
from planner.strategy_search.search import search


def request_for(plan: Plan, graph: OperatorGraph, batch: int, cluster: Machine) -> SearchRequest:
    """The request that a plan answers, with nothing decided, with these exceptions: whatever it offloads may be
    offloaded again, a plan that does not train is for the forward pass alone, links lack the all-to-all if the plan
    says so or does without it there, and buckets of named parameters and owners of whole parameters stay, which no
    search takes unless it is asked to."""
    training = plan.training
    pinned = Pinned(offload=offload_of(plan))
    return SearchRequest(
        graph=with_rules(graph, plan.rules),
        batch=batch,
        model=plan.model,
        cluster=cluster,
        global_batch=training.global_batch,
        precision=training.precision,
        optimizer=training.optimizer,
        update=undecided(training.update),
        imbalance=training.imbalance,
        tokens_once=training.tokens_once,
        fp8=training.fp8,
        pinned=pinned if plan.schedule_kind.trains else forward_pinned(pinned),
        alltoall=plan.links_with_alltoall,
    )


def undecided(update: Update) -> Update:
    """An update of which the search decides again how weights are gathered and what a bucket holds."""
    buckets = update.buckets if update.composed else AUTO_BUCKETS
    return replace(update, gathers=AUTO_GATHERS, buckets=buckets)


def configuration_of(plan: Plan) -> Pinned | None:
    """The configuration of a plan as a decision. None if it cannot be one: rings and zigzag order require degrees
    instead of a mesh."""
    if plan.mesh.zigzag:
        return None
    piped = plan.pipeline > 1
    return Pinned(
        pipeline=plan.pipeline,
        virtual_stages=plan.virtual_stages,
        schedule=plan.schedule if piped or not plan.schedule_kind.trains else None,
        interleave=plan.training.interleave if plan.training.interleave > 1 else None,
        slices=plan.slices if plan.slices > 1 else None,
        micro_batches=plan.training.micro_batches,
        mesh=plan.mesh.sizes,
        offload=offload_of(plan),
    )


def searched(
    request: SearchRequest,
    on_progress: Listener = lambda _: None,
    cancelled: Stop = lambda: False,
    cutoff: float = math.inf,
    shared: Shared | None = None,
) -> Prediction | str | None:
    """The prediction of the best plan of a request, or in words why there is none with an objective below `cutoff`
    seconds. None if the search was cancelled or reached a limit, since the answer is then unknown. `shared`: see
    `search`."""
    try:
        found = search(request, on_progress, cancelled, cutoff, shared)
    except LimitError:
        return None
    except PlannerError as error:
        return None if cancelled() else str(error)
    return None if found.statistics.stopped else found.plan.prediction


def with_strategy(request: SearchRequest, operator: str, names: tuple[str | None, ...]) -> SearchRequest:
    """The same request with the strategy of an operator decided, as by `--shard`."""
    decided = Shard(pattern=glob.escape(operator), strategy=tuple(name or "-" for name in names))
    return replace(request, shards=(*request.shards, decided))
