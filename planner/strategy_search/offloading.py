"""Offload where nothing fits on the devices alone.

Where nobody decided what is offloaded, everything stays on the devices as long as that fits: what is offloaded costs
time, and memory of hosts that others may use. Where nothing fits, the search is made once more with all that the hosts
can hold, each thing where it makes the step fastest. `--offload none` excludes that, `--offload auto` offers it also to
plans that fit without.
"""

from collections.abc import Callable
from dataclasses import replace

from hardware_profiles import HardwareProfileError
from planner.errors import InfeasibleError, LimitError, RequestError
from planner.plan.plan import Plan
from planner.strategy_search.request.offload import ANYTHING, NOTHING, offload_of
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult


def with_offload(
    request: SearchRequest,
    solve: Callable[[SearchRequest], SearchResult],
    cancelled: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """`solve`; and, where nothing fits and offload was left to the search, `solve` with whatever can be offloaded to
    hosts. Raises what `solve` raises of the request itself where that does not fit either."""
    try:
        return solve(request)
    except InfeasibleError as error:
        offloading = None if isinstance(error, LimitError) or cancelled() else _offloading(request)
        if offloading is None:
            raise
        try:
            return solve(offloading)
        except LimitError:
            raise
        except (InfeasibleError, RequestError):  # a model without blocks, one stage that does not divide
            if cancelled():
                raise
        raise


def decided_as(request: SearchRequest, plan: Plan) -> SearchRequest:
    """A request with what may be offloaded decided, as it was for this plan of it."""
    if request.pinned.offload is not None:
        return request
    offload = ANYTHING if offload_of(plan).stores else NOTHING
    return replace(request, pinned=replace(request.pinned, offload=offload))


def _offloading(request: SearchRequest) -> SearchRequest | None:
    """A request that may offload anything to hosts; None where something else was decided, or they hold nothing."""
    if request.pinned.offload is not None or request.space is not None or request.alternatives:
        return None
    try:
        return replace(request, pinned=replace(request.pinned, offload=ANYTHING))
    except (RequestError, HardwareProfileError):
        return None
