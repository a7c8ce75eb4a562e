"""Tensor parallelism that waits for its collectives, around the best plan where they may be under products.

The search chooses layouts by what collectives save at most under the products beside them. A plan may save less: what
several products read is gathered once, and memory may have no room for chunks. So layouts that were chosen for it may
be slower than those that are best where nothing overlaps, of which the sums are exact. The configuration of the best
plan is searched that way, too, where the bound leaves that open, and only for what is faster.
"""

import contextlib
from dataclasses import replace

from planner.errors import InfeasibleError, RequestError
from planner.limits import reached
from planner.strategy_search.around import Listener, Stop, exact, together, told
from planner.strategy_search.engine.product_overlap import may_overlap
from planner.strategy_search.engine.proofs import with_proof
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search

OPEN = 0.005
"""The gap from which on plans without overlap are looked for."""


def with_waiting(request: SearchRequest, result: SearchResult, on_progress: Listener, cancelled: Stop) -> SearchResult:
    """A result, with the plan of its configuration whose tensor parallelism waits for all collectives, where that is
    faster."""
    best = result.plans[0]
    if not _left_open(request) or result.gap < OPEN:
        return result
    if result.statistics.stopped or cancelled() or reached():
        return result
    with contextlib.suppress(InfeasibleError, RequestError):
        asked = _waiting(request, result)
        found = search(asked, told(on_progress, result, "trying without overlap"), cancelled, known=best)
        statistics = together(result.statistics, found.statistics)
        if found.plans[0].seconds >= best.seconds:
            return replace(result, statistics=statistics)
        first = with_proof(found.plans[0], result.bound_seconds, covered=result.covered)
        return replace(result, plans=(first,), statistics=statistics, priced=(*found.priced, *result.priced))
    return result


def _left_open(request: SearchRequest) -> bool:
    """Whether the search hopes for collectives under products, and one plan is asked for."""
    alone = request.top == 1 and not (request.alternatives or request.space or request.certify or request.fp8)
    return (
        alone
        and exact(request)
        and request.pinned.tensor_overlap is None
        and may_overlap(request.pinned, request.cluster)
    )


def _waiting(request: SearchRequest, result: SearchResult) -> SearchRequest:
    """The request for the configuration of its best plan, in which no collective is under products."""
    best = result.plans[0].configuration
    pinned = replace(
        request.pinned,
        tensor_overlap=1,
        pipeline=best.pipeline,
        virtual_stages=best.virtual_stages,
        mesh=best.mesh if request.pinned.free else request.pinned.mesh,
        micro_batches=best.micro_batches,
    )
    return replace(request, pinned=pinned)
