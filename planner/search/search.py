"""The search, on one screen.

    traced graph ── prepare ──> graph with identities, blocks ── fold ──> template
    for every configuration, least lower bound first:                                  (space)
        stop when the bound reaches the best step time
        tables = prices of the template on this mesh at this micro-batch               (cost_table)
        for every kind of stage: problem = tables weighed by the stage; solve it       (stages, solvers)
    the best choices become a plan, which is bound and priced once more, independently (assemble, plan.predict)

Inside a stage the answer is exact: the solver proves that no other strategies are faster within the memory. Around it
every configuration is tried or cut off by a bound. All stages of a pipeline meet in one layout; the stages between the
first and the last share one solution.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from costmodels import peak_memory
from planner.errors import InfeasibleError, RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.bind import BoundPlan, bind, prepare
from planner.plan.plan import PLANNER_VERSION, ClusterReference, Plan, Prediction, Provenance, Training
from planner.plan.predict import predict
from planner.search.assemble import groups_of, input_layouts, stages_of
from planner.search.request import SearchRequest
from planner.search.space import Configuration, bounds, configurations
from planner.search.stages import Engine, Found
from planner.search.template import Template, fold


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the search is: configurations in all, done so far, and the best step time yet."""

    total: int
    done: int
    best_seconds: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plan, bound to its graph, and how it was found.

    `configurations` there were in all, `tried` of them were solved, in so many `seconds`.
    """

    bound: BoundPlan
    configurations: int
    tried: int
    seconds: float

    @property
    def plan(self) -> Plan:
        return self.bound.plan


def search(request: SearchRequest, on_progress: Callable[[Progress], None] = lambda _: None) -> SearchResult:
    """The fastest plan that fits.

    Raises RequestError where the request divides into nothing, InfeasibleError, with the bytes that are missing, where
    nothing fits.
    """
    started = time.perf_counter()
    prepared, blocks = prepare(request.graph)
    engine = _engine(request, fold(prepared, blocks))
    space = _ordered_space(engine)
    best: Found | None = None
    least = math.inf
    tried = 0
    for done, (bound, configuration) in enumerate(space):
        if best is not None and request.prune and bound >= best.seconds:
            break
        outcome = engine.attempt(configuration, best.seconds if best is not None and request.prune else math.inf)
        tried += 1
        if isinstance(outcome, Found) and (best is None or outcome.seconds < best.seconds):
            best = outcome
        elif isinstance(outcome, float):
            least = min(least, outcome)
        on_progress(Progress(total=len(space), done=done + 1, best_seconds=best.seconds if best else math.inf))
    if best is None:
        raise _nothing_fits(request, least)
    winner = _plan(request, prepared, best)
    return SearchResult(bound=winner, configurations=len(space), tried=tried, seconds=time.perf_counter() - started)


def find_fitting(request: SearchRequest) -> bool:
    """Whether anything fits. Tries the leanest configurations first and stops at the first that does."""
    engine = _engine(request, fold(*prepare(request.graph)))
    space = configurations(engine.template, request.cluster.devices, request.global_batch, request.pinned)
    lean = sorted(space, key=lambda c: (not c.recompute, -c.micro_batches, c.stages, c.mesh))
    return any(isinstance(engine.attempt(configuration, math.inf), Found) for configuration in lean)


def _engine(request: SearchRequest, template: Template) -> Engine:
    limits = bounds(template, request.batch, request.cluster, request.precision, request.optimizer)
    return Engine(request=request, template=template, limits=limits)


def _ordered_space(engine: Engine) -> list[tuple[float, Configuration]]:
    request, template, limits = engine.request, engine.template, engine.limits
    devices = request.cluster.devices
    space = list(configurations(template, devices, request.global_batch, request.pinned))
    if not space:
        raise RequestError(_no_configuration(request, template))
    keyed = [(limits.step_seconds(c, devices, request.global_batch), c) for c in space]
    return sorted(
        keyed, key=lambda item: (item[0], item[1].stages, item[1].recompute, item[1].micro_batches, item[1].mesh)
    )


def _no_configuration(request: SearchRequest, template: Template) -> str:
    wanted = {
        name: value
        for name in ("stages", "mesh", "micro_batches")
        if (value := getattr(request.pinned, name)) is not None
    }
    if wanted.get("stages", 1) > 1 and not template.pipelines:
        return (
            f"{request.model.reference} cannot be cut into {wanted['stages']} pipeline stages: that takes equal blocks,"
            " one after the other, that share nothing but what each hands to the next; leave the stages at 1"
        )
    return (
        f"nothing divides evenly: {request.cluster.devices} devices, global batch {request.global_batch}, "
        f"{template.blocks.count} blocks,"
        f" with {', '.join(f'{k} = {v}' for k, v in wanted.items()) or 'no option pinned'}; stages must divide "
        "both devices and blocks,"
        " micro-batches the global batch"
    )


def _plan(request: SearchRequest, prepared: OperatorGraph, best: Found) -> BoundPlan:
    """The winner as a plan, bound to its graph and priced by the judge."""
    recomputation = "full" if best.configuration.recompute else "none"
    worst = max(best.solutions, key=lambda solution: solution.gap)
    plan = Plan(
        model=request.model,
        training=Training(
            global_batch=request.global_batch,
            micro_batches=best.configuration.micro_batches,
            precision=request.precision,
            optimizer=request.optimizer,
        ),
        cluster=ClusterReference(
            profile=request.cluster.name, digest=request.cluster.digest(), devices=request.cluster.devices
        ),
        mesh=best.tables.mesh,
        stages=stages_of(best.configuration.stages, best.tables.template.blocks),
        schedule="1f1b",
        inputs=input_layouts(best.tables, best.choices),
        groups=groups_of(prepared, best.tables.template.blocks, best.tables, best.choices, recomputation),
        prediction=Prediction.unknown(),
        provenance=Provenance(
            planner=PLANNER_VERSION,
            search=request.algorithm,
            status=worst.status,
            gap=0.0 if worst.status == "optimal" else float(f"{worst.gap:.3g}"),
        ),
    )
    bound = bind(plan, request.graph, request.batch)
    return replace(bound, plan=replace(plan, prediction=predict(bound, request.cluster)))


def _nothing_fits(request: SearchRequest, least: float) -> InfeasibleError:
    device = request.cluster.device
    needed = float(peak_memory(least, 0.0, 0.0, device))
    return InfeasibleError(
        f"{request.model.reference} does not fit on {request.cluster.devices} x {request.cluster.name}: the "
        "leanest plan needs"
        f" {needed / 2**30:.1f} GiB per device, {(needed - device.memory) / 2**30:.1f} GiB more than the "
        f"{device.memory / 2**30:.1f} GiB there are"
    )
