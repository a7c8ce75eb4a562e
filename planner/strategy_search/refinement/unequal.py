"""Unequal virtual stages around the best plan, where the search has looked at equal ones alone.

    best plan    two ranks of 20 blocks in 4 equal stages each; the last rank has the head, too, as much as 1.2 blocks
    tried        the same with unequal stages: 21 blocks and 19

The search itself tries unequal stages where the head is as much work as two blocks. With less they gain little, but as
many more configurations take a third of its time. So only the configuration of the best plan is tried, if memory does
not bind: a rank that takes a block from another would recompute for it.
"""

from dataclasses import replace

from planner.errors import InfeasibleError, LimitError, RequestError
from planner.limits import ended_by
from planner.strategy_search.engine.families import Shared, engine_of
from planner.strategy_search.refinement.around import Listener, Stop, bound_of_like, exact, or_faster, told
from planner.strategy_search.request.configurations import may_be_uneven
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search


def with_unequal_stages(
    request: SearchRequest, result: SearchResult, shared: Shared, on_progress: Listener, cancelled: Stop
) -> SearchResult:
    """The result, with the plan of the same configuration with unequal virtual stages in place of its best plan if that
    is faster. Of that plan nothing is proved, as of all unequal stages. `shared` is that of the search."""
    best, pinned = result.plans[0], request.pinned
    c = best.configuration
    if not _left_open(request) or c.virtual_stages == 1 or c.uneven or best.memory_price or result.statistics.stopped:
        return result
    template = engine_of(request, shared)[0].template
    if template.heavy_ends or template.ends <= 1 or ended_by(cancelled):
        return result
    alike = replace(
        pinned,
        pipeline=c.pipeline,
        mesh=c.mesh if pinned.free else pinned.mesh,
        micro_batches=c.micro_batches if pinned.micro_batch is None else None,
        virtual_stages=c.virtual_stages,
    )
    try:
        found = search(
            replace(request, pinned=alike),
            told(on_progress, result, "trying unequal virtual stages"),
            cancelled,
            shared=shared,
            known=best,
            among=lambda one: one == replace(c, uneven=True),
        )
        bound = bound_of_like(found.plans[0], result, request, shared)
    except LimitError as error:
        return result.cut_short(error.by)
    except (InfeasibleError, RequestError):
        return result
    return or_faster(result, replace(found, covered=False), bound)  # no bound covers unequal stages


def _left_open(request: SearchRequest) -> bool:
    """Whether the request asks for one plan, and leaves the virtual stages to the search."""
    pinned = request.pinned
    single = request.top == 1 and not (request.alternatives or request.space or request.certify)
    return exact(request) and single and pinned.virtual_stages is None and may_be_uneven(pinned)
