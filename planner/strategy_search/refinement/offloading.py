"""Offload where nothing fits on the devices alone, or where it makes the step much shorter.

If the user did not decide what is offloaded, everything stays on the devices as long as that fits: offload costs time,
and memory of hosts that others may use. If nothing fits, the search runs once more with offload of everything that the
hosts can hold, each part where it makes the step fastest. CPUs, which have the host's memory, offload only what is
asked for.

Where memory binds, the best plan has a price of memory, in seconds of the step per byte (a Lagrange multiplier).
Offloading optimizer states saves at most this price for each byte. If that comes to `WORTH` of the step, the search
also runs once more, and a plan that is faster by at least as much is taken. This comes before the narrower searches and
those with rings around the plan without offload, which do not run where their result could not change the choice.

`--offload none` excludes this, `--offload auto` allows offload in all plans.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hardware_profiles import HardwareProfileError, Seconds, device_type_of
from planner.errors import InfeasibleError, LimitError, RequestError
from planner.limits import reached
from planner.plan.plan import Plan
from planner.plan.prediction.memory.chunks import STATES
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.refinement.around import exact, together
from planner.strategy_search.refinement.narrower import least_of_narrower
from planner.strategy_search.request.offload import ANYTHING, NOTHING, offload_of
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.result import SearchResult

WORTH = 0.05
"""Share of a step by which offload must shorten it where plans fit without it: the bandwidth of host links that run
beside each other was measured on few machines, and more can fail on a host."""


def with_offload(
    request: SearchRequest,
    solve: Callable[[SearchRequest], SearchResult],
    cancelled: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """`solve`; and if nothing fits and offload was left to the search, `solve` with everything that can be offloaded to
    hosts. Raises what `solve` raises for the request itself if that does not fit either."""
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
        except (InfeasibleError, RequestError):  # a model without blocks, or one stage that does not divide
            if cancelled():
                raise
        raise


def with_faster_offload(
    request: SearchRequest,
    result: SearchResult,
    solve: Callable[[SearchRequest, Seconds], SearchResult],
    cancelled: Callable[[], bool] = lambda: False,
    refined: Callable[[SearchResult, Seconds], SearchResult] = lambda result, _: result,
) -> SearchResult:
    """The result; or that of plans that may offload anything, if memory binds, offload was left to the search, and the
    step of the best of them is shorter by `WORTH`. `solve` looks for plans with objectives below the given seconds.
    Objectives count offload as exposed, steps overlap it, so steps decide.

    The result is `refined` if no such plan is taken. It is also refined before the steps are compared if narrower
    searches may find a plan on the devices alone that is so fast that offload would no longer be worth it; only plans
    that take less than the given seconds are looked for then."""
    offloading = _offloading(request)
    if offloading is None or cancelled() or not offload_may_win(request, result):
        return refined(result, math.inf)
    if by := reached():
        return result.cut_short(by)
    cutoff = result.plans[0].bounded * (1 - WORTH)
    try:
        found = solve(offloading, cutoff)
    except LimitError as error:
        return result.cut_short(error.by)
    except (InfeasibleError, RequestError):  # no plan is as fast, or a stage does not divide
        return refined(result, math.inf)
    if not offload_of(found.plan).stores or not _pays(found, result.plans[0].seconds):
        return refined(result, math.inf)
    if not _pays(found, least_of_narrower(result)):
        result = refined(result, found.plans[0].seconds / (1 - WORTH))
        if not _pays(found, result.plans[0].seconds):
            return result
    return replace(found, statistics=together(result.statistics, found.statistics), on_devices_alone=result.plans[0])


def offload_may_win(request: SearchRequest, result: SearchResult) -> bool:
    """Whether offload was left to the search, and the price of memory says that it may shorten the step of a result by
    `WORTH`."""
    if result.statistics.stopped or not exact(request) or request.top > 1 or request.certify:
        return False
    best = result.plans[0]
    if offload_of(best.plan).stores:  # as nothing fits otherwise
        return False
    return may_save(best) >= WORTH * best.bounded and _offloading(request) is not None


def _pays(found: SearchResult, seconds: Seconds) -> bool:
    """Whether the step of a result with offload is shorter than this by `WORTH`."""
    return found.plans[0].seconds < seconds * (1 - WORTH)


def may_save(ranked: Ranked) -> Seconds:
    """An upper bound on the seconds of a step that are saved if no device holds optimizer states, by the price of
    memory."""
    return ranked.memory_price * dict(ranked.plan.prediction.memory).get(STATES, 0.0)


def decided_as(request: SearchRequest, plan: Plan) -> SearchRequest:
    """The request, with its offload decided as in this plan of it."""
    if request.pinned.offload is not None:
        return request
    offload = ANYTHING if offload_of(plan).stores else NOTHING
    return replace(request, pinned=replace(request.pinned, offload=offload))


def bounds_with_offload(
    request: SearchRequest, known: Sequence[tuple[SearchRequest, SearchResult]]
) -> Mapping[Configuration, float]:
    """Lower bounds on the step time of configurations of a request that may offload anything, from the `known` result
    of the same request without offload; empty if that is not known. Where memory is free, offload saves nothing: to be
    fetched and stored takes time, and nothing else gets faster."""
    if request.pinned.offload != ANYTHING or request.fp8:
        return {}
    alone = replace(request, pinned=replace(request.pinned, offload=None))
    return next((found.bounds_with_any_memory for asked, found in known if asked == alone), {})


def _offloading(request: SearchRequest) -> SearchRequest | None:
    """The request with offload of anything to hosts allowed; None if something else was decided, or hosts can hold
    nothing. CPUs have the host's memory: what they offload frees nothing."""
    if request.pinned.offload is not None or request.space is not None or request.alternatives:
        return None
    if device_type_of(request.cluster) == "cpu":
        return None
    try:
        return replace(request, pinned=replace(request.pinned, offload=ANYTHING))
    except (RequestError, HardwareProfileError):
        return None
