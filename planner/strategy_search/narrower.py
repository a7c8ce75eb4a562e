"""Narrower searches around the best plan, for a gap that is still wide.

A configuration gets the plan with the least sum. Sums assume that collectives overlap, that memory suffices to gather
weights ahead, and that the backward pass hides all reductions. Where a plan cannot have that, another one may have the
shorter step. So the configuration of the best plan is searched again, each time with one more decision pinned, and only
for plans that are faster than the best one so far:

    from gap     decided
    half of 1%   tensor parallelism waits for its collectives: sums of such layouts are exact
    4%           weights of the configuration come each, by block, or ahead
    4%           every axis has one purpose, for the pipeline and the micro-batches of the plan; after a search of few
                 configurations for all pipelines
"""

from collections.abc import Iterator
from dataclasses import replace

from planner.errors import InfeasibleError, LimitError, RequestError
from planner.limits import reached
from planner.sharding.update import AUTO_GATHERS
from planner.strategy_search.around import Listener, Stop, exact, together, told
from planner.strategy_search.engine.product_overlap import may_overlap
from planner.strategy_search.engine.proofs import Ranked, with_proof
from planner.strategy_search.engine.scheduling import IN_A_V
from planner.strategy_search.request.gathering import ways_to_gather
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search

OPEN = 0.005
"""The gap from which on plans that wait for collectives are looked for."""

WIDE = 0.04
"""The gap from which on the other narrower searches run: each takes a tenth to a half of the time of the search."""

FEW = 30
"""Configurations that a search has evaluated at most for all pipelines to be searched with one purpose for every axis,
which takes as long as the search itself."""


def with_narrower(request: SearchRequest, result: SearchResult, on_progress: Listener, cancelled: Stop) -> SearchResult:
    """A result, with the fastest plan of narrower searches in the place of its best one, where that is faster."""
    if not _left_open(request):
        return result
    every, as_asked = result.bounds, (request.update, request.pinned.tensor_overlap)
    for gap, what, asked in _narrower(request, result):
        if result.gap < gap:
            continue
        if result.statistics.stopped or cancelled() or reached():
            return result.cut_short()
        best, bound = result.plans[0], result.bound_seconds
        try:
            bounds = every if (asked.update, asked.pinned.tensor_overlap) == as_asked else {}
            found = search(asked, told(on_progress, result, f"trying {what}"), cancelled, known=best, bounds=bounds)
        except LimitError:
            return result.cut_short()
        except (InfeasibleError, RequestError):
            continue
        stopped = found.statistics.stopped
        statistics = replace(together(result.statistics, found.statistics), stopped=stopped)
        result = replace(result, statistics=statistics)
        proved = not _in_a_v(found.plans[0]) or _in_a_v(best)  # else the bound is not one of such plans
        if found.plans[0].seconds < best.seconds and proved:
            covered = result.covered and found.covered and _axes(found.plans[0]) <= 2
            first = with_proof(found.plans[0], bound, covered=covered)
            result = replace(result, plans=(first,), priced=(*found.priced, *result.priced), covered=covered)
    return result


def _in_a_v(ranked: Ranked) -> bool:
    return ranked.plan.schedule in IN_A_V


def _axes(ranked: Ranked) -> int:
    """How many axes cut anything: the bound of a search is about meshes of one and two."""
    return sum(size > 1 for size in ranked.plan.mesh.sizes)


def _left_open(request: SearchRequest) -> bool:
    """Whether one plan of the whole space is asked for."""
    narrow = request.top > 1 or request.alternatives or request.space or request.certify or request.fp8
    return exact(request) and not (narrow or request.shards or request.stores or request.default != "search")


def _narrower(request: SearchRequest, result: SearchResult) -> Iterator[tuple[float, str, SearchRequest]]:
    """From which gap on what is tried, and the request for it."""
    pinned, best, found = request.pinned, result.plans[0].configuration, result.plans[0].found
    own = replace(pinned, pipeline=best.pipeline, virtual_stages=best.virtual_stages, micro_batches=best.micro_batches)
    alike = replace(own, mesh=best.mesh if pinned.free else pinned.mesh)
    if request.update.gathers == AUTO_GATHERS:
        for way in ways_to_gather(request, result.plans[0].bound.blocks.count):
            if found is not None and found.outcome.gathers == way:
                continue  # so it was found
            update = replace(request.update, gathers=way)
            yield WIDE, f"weights gathered {way}", replace(request, pinned=alike, update=update)
    if pinned.free and pinned.mesh is None and pinned.context_by is None:
        few = result.statistics.evaluated <= FEW
        roles = replace(pinned if few else own, replicas=1)
        yield WIDE, "one purpose for every axis", replace(request, pinned=roles)
