"""Narrower searches around the best plan, if the gap is still wide.

A configuration gets the plan with the lowest objective. Objectives assume that collectives overlap, that memory
suffices to prefetch weights, and that the backward pass overlaps all gradient reductions. If a plan cannot have
these overlaps, another plan of the same configuration may have the shorter step. So the search repeats for that
configuration, each time with one more decision pinned, and only for plans that are faster than the best one so far:

    the weights of the configuration are gathered one by one, by block, or prefetched
    every axis has one purpose, for the pipeline and the micro-batches of the plan, with half, once or twice its
    degrees; for all degrees and pipelines if the space is small and the search evaluated few of it
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from hardware_profiles import Seconds
from planner.errors import InfeasibleError, LimitError, RequestError
from planner.limits import ended_by
from planner.plan.layout.roles import Roles, roles
from planner.sharding.update import AUTO_GATHERS
from planner.strategy_search.engine.contenders import NEAR
from planner.strategy_search.engine.families import Shared, engine_of
from planner.strategy_search.engine.scheduling import halves_may_cover
from planner.strategy_search.refinement.around import Listener, Stop, bound_of_like, exact, or_faster, told
from planner.strategy_search.request.gathering import ways_to_gather
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search

WIDE = 0.04
"""Narrower searches run if the gap is at least this wide: each takes a tenth to a half of the time of the search. From
this gap on the search also looks for simpler plans that are faster
(`planner.strategy_search.refinement.simplicity`)."""

EXPOSED = 0.02
"""Halves of the micro-batches, two at a time, are tried if the best plan exposes communication between operators for
this share of its step."""

FEW = 30
"""If the search evaluated at most this many configurations, and its space has at most `SMALL`, all of them are searched
again with one purpose for every axis, which takes as long as the search itself."""

SMALL = 1_000
"""Largest number of configurations of a space that is searched again in full: with one purpose for every axis there are
up to five times as many. A search for a deep model of experts on thousands of devices evaluates few, but takes long for
each."""


def with_narrower(
    request: SearchRequest,
    result: SearchResult,
    shared: Shared,
    on_progress: Listener,
    cancelled: Stop,
    cutoff: Seconds = math.inf,
) -> SearchResult:
    """The result, with the fastest plan of the narrower searches in place of its best plan if that is faster. `shared`
    is that of the search. Plans that take `cutoff` or longer are of no interest."""
    if not _left_open(request):
        return result
    every, below = result.bounds, cutoff * (1 + NEAR)  # a step may be shorter than its objective
    for what, asked, among in _narrower(request, result):
        if result.objective_gap < WIDE:
            break
        if by := result.statistics.stopped_by or ended_by(cancelled):
            return result.cut_short(by)
        best = result.plans[0]
        try:
            bounds = every if asked.update == request.update else {}
            listener = told(on_progress, result, f"trying {what}")
            found = search(asked, listener, cancelled, below, known=best, among=among, bounds=bounds)
            bound = bound_of_like(found.plans[0], result, request, shared)
        except LimitError as error:
            return result.cut_short(error.by)
        except (InfeasibleError, RequestError):
            continue
        result = or_faster(result, found, bound)
    return result


def with_halves(
    request: SearchRequest, result: SearchResult, shared: Shared, on_progress: Listener, cancelled: Stop
) -> SearchResult:
    """The result; or a plan with twice the micro-batches, of which two at a time run operator by operator, if that is
    faster. It is looked for where the best plan exposes communication between operators and has no memory for two of
    its micro-batches, on the mesh of that plan."""
    if not _left_open(request):
        return result
    best, engine = result.plans[0], engine_of(request, shared)[0]
    limit = engine.limit_bytes(engine.groups[0])
    if not halves_may_cover(best.plan, request.pinned, request.cluster, limit, EXPOSED):
        return result
    if by := result.statistics.stopped_by or ended_by(cancelled):
        return result.cut_short(by)
    own, count = best.configuration, 2 * best.configuration.micro_batches
    mesh = own.mesh if request.pinned.free else request.pinned.mesh
    pinned = replace(request.pinned, pipeline=1, mesh=mesh, micro_batches=count, interleave=2)
    try:
        found = search(
            replace(request, pinned=pinned), told(on_progress, result, "trying interleaved micro-batches"), cancelled
        )
    except LimitError as error:
        return result.cut_short(error.by)
    except (InfeasibleError, RequestError):  # the batch does not divide so
        return result
    return or_faster(result, found, result.bound_seconds)


def least_of_narrower(result: SearchResult) -> Seconds:
    """A lower bound on what the narrower searches may find, by the bounds of the configurations that they look at; not
    on meshes of three axes, which no bound covers."""
    best = result.plans[0].configuration
    if _is_small(result):
        return result.bound_seconds
    alike = best.pipeline, best.virtual_stages, best.micro_batches
    bounds = (b for c, b in result.bounds.items() if (c.pipeline, c.virtual_stages, c.micro_batches) == alike)
    return min(bounds, default=result.bound_seconds)


def _is_small(result: SearchResult) -> bool:
    """Whether the whole space is searched again."""
    return result.statistics.evaluated <= FEW and result.statistics.configurations <= SMALL


def _left_open(request: SearchRequest) -> bool:
    """Whether the request asks for one plan of the whole space."""
    narrow = request.top > 1 or request.alternatives or request.space or request.certify or request.fp8
    return exact(request) and not (narrow or request.shards or request.stores or request.default != "search")


def _narrower(
    request: SearchRequest, result: SearchResult
) -> Iterator[tuple[str, SearchRequest, Callable[[Configuration], bool]]]:
    """For each narrower search: its name, its request, and the configurations that it looks at."""
    pinned, best, found = request.pinned, result.plans[0].configuration, result.plans[0].found
    count = best.micro_batches if pinned.micro_batch is None else None  # either of the two may be decided
    own = replace(pinned, pipeline=best.pipeline, virtual_stages=best.virtual_stages, micro_batches=count)
    alike = replace(own, mesh=best.mesh if pinned.free else pinned.mesh)
    if request.update.gathers == AUTO_GATHERS:
        for way in ways_to_gather(request, result.plans[0].bound.blocks.count):
            if found is not None and found.outcome.gathers == way:
                continue  # the plan was found this way
            update = replace(request.update, gathers=way)
            asked = replace(request, pinned=alike, update=update)
            yield f"weights gathered {way}", asked, lambda c: c.micro_batches == best.micro_batches
    if pinned.free and pinned.mesh is None and pinned.context_by is None:
        few = _is_small(result)
        asked = replace(request, pinned=replace(pinned if few else own, replicas=1))
        yield "one purpose for every axis", asked, (lambda _: True) if few else near(roles(result.plans[0].bound))


def near(words: Roles) -> Callable[[Configuration], bool]:
    """A test for configurations whose axes have one purpose each: whether their tensor and context degrees are each
    half, once or twice those of a plan."""

    def is_near(configuration: Configuration) -> bool:
        tensor = dict(zip(configuration.roles, configuration.mesh, strict=True)).get("tensor", 1)
        context = math.prod(configuration.context)
        return all(a <= 2 * b and b <= 2 * a for a, b in ((tensor, words.tensor), (context, words.context)))

    return is_near
