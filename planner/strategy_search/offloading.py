"""Offload where nothing fits on the devices alone, or where it makes the step much shorter.

Where nobody decided what is offloaded, everything stays on the devices as long as that fits: what is offloaded costs
time, and memory of hosts that others may use. Where nothing fits, the search is made once more with all that the hosts
can hold, each thing where it makes the step fastest.

Where memory binds, the best plan has a price of memory, in seconds of the step per byte (a Lagrange multiplier). Bytes
of optimizer states that left the device would save no more than that price for each. Where that is `WORTH` of the step,
the search is made once more, too, and a plan that is faster by as much is taken.

`--offload none` excludes that, `--offload auto` offers it to all plans.
"""

from collections.abc import Callable
from dataclasses import replace

from hardware_profiles import HardwareProfileError, Seconds, device_type_of
from planner.errors import InfeasibleError, LimitError, RequestError
from planner.limits import reached
from planner.plan.plan import Plan
from planner.plan.prediction.chunk_memory import STATES
from planner.strategy_search.around import exact, together
from planner.strategy_search.engine.proofs import Ranked
from planner.strategy_search.request.offload import ANYTHING, NOTHING, offload_of
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult

WORTH = 0.05
"""Share of a step by which offload must make it shorter where plans fit without it: what links of hosts carry beside
each other was measured on few machines, and more on a host may fail."""


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


def with_faster_offload(
    request: SearchRequest,
    result: SearchResult,
    solve: Callable[[SearchRequest, Seconds], SearchResult],
    cancelled: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """A result, or that of plans that may offload anything, where memory binds, offload was left to the search, and its
    best plan is faster by `WORTH`; `solve` looks for plans that take less than so many seconds."""
    best = result.plans[0]
    if result.statistics.stopped or not exact(request) or request.top > 1 or request.certify:
        return result
    if device_type_of(request.cluster) == "cpu" or may_save(best) < WORTH * best.bounded:  # CPUs have the host's memory
        return result
    offloading = None if cancelled() else _offloading(request)
    if offloading is None:
        return result
    if reached():
        return result.cut_short()
    cutoff = best.bounded * (1 - WORTH)
    try:
        found = solve(offloading, cutoff)
    except LimitError:
        return result.cut_short()
    except (InfeasibleError, RequestError):  # none is as fast, or a stage does not divide
        return result
    if found.plans[0].bounded >= cutoff or not offload_of(found.plan).stores:
        return result
    statistics = replace(together(result.statistics, found.statistics), stopped=found.statistics.stopped)
    return replace(found, statistics=statistics, on_devices_alone=best)


def may_save(ranked: Ranked) -> Seconds:
    """What a step would take less at most, by the price of memory, if no device held optimizer states."""
    return ranked.memory_price * dict(ranked.plan.prediction.memory).get(STATES, 0.0)


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
