"""The search around a plan that is there already: what would be best if something were otherwise.

A plan file does not say what of it was decided by hand. So it is searched again in one of two ways: with nothing
decided, or within the configuration of the plan (mesh, pipeline, micro-batches, schedule), where everything else is
free but for what is asked about.
"""

import glob
import math
from dataclasses import replace

from hardware_profiles import Machine
from planner.errors import LimitError, PlannerError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import Plan, Prediction
from planner.sharding.discover import with_rules
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.objectives import Listener, Stop
from planner.strategy_search.request.offload import offload_of
from planner.strategy_search.request.request import SearchRequest, Shard
from planner.strategy_search.request.space import Pinned, forward_pinned
from planner.strategy_search.search import search


def request_for(plan: Plan, graph: OperatorGraph, batch: int, cluster: Machine) -> SearchRequest:
    """What a plan is an answer to, with nothing decided, but where it offloads something that may be offloaded
    again, and that one which never trains is of the forward pass alone."""
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
        update=training.update,
        imbalance=training.imbalance,
        tokens_once=training.tokens_once,
        fp8=training.fp8,
        pinned=pinned if plan.schedule_kind.trains else forward_pinned(pinned),
    )


def configuration_of(plan: Plan) -> Pinned | None:
    """The configuration of a plan as a decision; None where it cannot be one: rings and the orders in which they cut
    sequences belong to degrees, not to meshes."""
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
    """What the best plan of a request costs, or why there is none with an objective below `cutoff` seconds; None where
    the search was cancelled, or a limit was reached, as then nobody knows. `shared`: see `search`."""
    try:
        found = search(request, on_progress, cancelled, cutoff, shared)
    except LimitError:
        return None
    except PlannerError as error:
        return None if cancelled() else str(error)
    return None if found.statistics.stopped else found.plan.prediction


def with_strategy(request: SearchRequest, operator: str, names: tuple[str | None, ...]) -> SearchRequest:
    """The same request with the strategy of an operator decided, as `--shard` does."""
    decided = Shard(pattern=glob.escape(operator), strategy=tuple(name or "-" for name in names))
    return replace(request, shards=(*request.shards, decided))
