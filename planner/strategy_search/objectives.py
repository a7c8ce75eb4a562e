"""Objectives besides time: memory, cost, and the fronts between time and these.

memory   the lowest peak at which anything fits, by bisection of the limit; then the fastest plan within it
cost     device-seconds of a step: the fastest plan on every number of devices that divides the given number
front    memory: the fastest plan, then the fastest within a little less memory than that took, and so on
         cost: the fastest plan on every number of devices that divides the given number, if it is cheaper
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from costmodels import peak_memory
from hardware_profiles import Bytes, Machine, Seconds, TopologyError, of_one_kind
from hardware_profiles.units import bytes_text
from planner.errors import InfeasibleError, LimitError, PlannerError, RequestError, StoppedBy
from planner.limits import ended_by, limited, reading, seconds_after, seconds_left, sharing
from planner.nearest import divisors
from planner.sharding.update import AUTO_ZERO_BY
from planner.strategy_search.candidates import with_candidates
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.refinement.around import exact, told
from planner.strategy_search.refinement.narrower import with_halves, with_narrower
from planner.strategy_search.refinement.neighbours import with_neighbours
from planner.strategy_search.refinement.offloading import (
    bounds_with_offload,
    decided_as,
    offload_may_win,
    with_faster_offload,
    with_offload,
)
from planner.strategy_search.refinement.placing import with_placing
from planner.strategy_search.refinement.rings import with_rings, with_rings_around_best
from planner.strategy_search.refinement.simplicity import with_simplicity
from planner.strategy_search.refinement.unequal import with_unequal_stages
from planner.strategy_search.request.limit_words import check_begin
from planner.strategy_search.request.offload import NOTHING, offload_of
from planner.strategy_search.request.request import AUTO, SearchRequest
from planner.strategy_search.result import Progress, SearchResult
from planner.strategy_search.variants import BeatenError, best_of_variants
from planner.strategy_search.within import anything_fits, best_plans

PRECISION = 0.01
"""Relative accuracy of the memory limit in the bisection."""

FRONT_STEP = 0.9
"""Each point of the front may take this share of the memory of the point before, without the reserved memory."""

Listener = Callable[[Progress], None]
Stop = Callable[[], bool]


def plan_for(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> SearchResult:
    """The best plans by the objective of the request. Tables on the host are as the request has them. The first plan is
    the simplest of those that are nearly the fastest. The result also has numbers of samples and devices nearby that do
    better if those of the request divide badly, and decides who owns states and what is padded if the request leaves
    that open.

    Raises RequestError if the request asks for servers, and the best plan has nothing for them.
    """
    score = {"memory": _peak, "cost": _cost}.get(request.objective, _step)
    with limited(request.time_limit):
        check_begin(request)
        rivals: list[Ranked] = []
        found = best_of_variants(request, lambda one: _plan_for(one, on_progress, cancelled, rivals), score)
        found = found.cut_short("interrupt" if cancelled() else None)
    if request.update.served and not found.plan.training.update.served:
        raise RequestError(
            "zero_by = servers: the best plan that was found has no data parallel copies of weights, so that servers"
            " would have nothing to keep; set data to 2 or more, or leave zero_by out"
        )
    return found


def _plan_for(request: SearchRequest, on_progress: Listener, cancelled: Stop, rivals: list[Ranked]) -> SearchResult:
    """The best plans of a variant of the request. `rivals` has the fastest plan of each variant before it, as searched,
    and grows by that of this one: only faster plans are looked for on the devices alone. Raises BeatenError if there is
    none."""
    own: list[Ranked] = []
    rival = min(rivals, key=lambda one: one.seconds, default=None)
    engines: dict[object, Shared] = {}
    later: list[Callable[[SearchResult, Seconds], SearchResult]] = []  # searches around a plan that offload may beat
    known: list[tuple[SearchRequest, SearchResult]] = []

    def fastest(one: SearchRequest, on_progress: Listener, cancelled: Stop, cutoff: float = math.inf) -> SearchResult:
        on_devices = engines.get((one.update.placed, NOTHING)) if one.offload != NOTHING else None
        shared = engines[one.update.placed, one.offload] = Shared(alone=on_devices)

        def best(asked: SearchRequest) -> SearchResult:
            def refined(found: SearchResult, cutoff: Seconds = math.inf) -> SearchResult:
                found = with_narrower(asked, found, shared, on_progress, cancelled, cutoff)
                found = with_halves(asked, found, shared, on_progress, cancelled)
                return with_rings_around_best(asked, found, shared, on_progress, cancelled, cutoff)

            bounds = bounds_with_offload(asked, known)
            beaten = rival if asked.offload == NOTHING and cutoff == math.inf else None
            found = best_plans(asked, on_progress, cancelled, cutoff, shared, bounds, beaten)
            if beaten is not None and found.plans[0].seconds >= beaten.seconds:
                raise BeatenError
            own.append(found.plans[0])
            known.append((asked, found))
            found = with_unequal_stages(asked, found, shared, on_progress, cancelled)
            alone = request.placing != AUTO and one.update.placed == request.update.placed  # compared with no others
            if request.objective == "time" and alone and offload_may_win(asked, found):
                later.append(refined)
                return found
            return refined(found)

        ringed = any(asked.pinned.context_by != request.pinned.context_by for asked, _ in known)
        # with a cutoff, that nothing is found does not say that nothing fits
        return with_rings(one, best, cancelled) if cutoff == math.inf or ringed else best(one)

    solve, score = {"memory": (least_memory, _peak), "cost": (least_cost, _cost)}.get(
        request.objective, (fastest, _time)
    )
    result = with_offload(
        request,
        lambda asked: with_placing(asked, lambda one: solve(one, on_progress, cancelled), score, cancelled),
        cancelled,
    )
    if request.objective == "time":

        def faster(asked: SearchRequest, cutoff: float) -> SearchResult:
            listener = told(on_progress, result, "trying offload")
            return with_placing(asked, lambda one: fastest(one, listener, cancelled, cutoff), score, cancelled)

        result = with_faster_offload(request, result, faster, cancelled, *later)
    found = settled(request, result)
    whole = with_neighbours(found, result, on_progress, cancelled)
    shared = engines.get((found.update.placed, found.offload), Shared())
    if found.fp8 != request.fp8:  # they belong to another graph
        shared = Shared()
    if _is_alone(request, result):
        rivals.append(own[0])
    return with_candidates(request, with_simplicity(found, whole, shared, on_progress, cancelled))


def _is_alone(request: SearchRequest, result: SearchResult) -> bool:
    """Whether other variants of a request are of interest only if they are faster than its result: the fastest plan is
    asked for, everything was searched, and nothing had to leave the devices."""
    wanted = request.objective == "time" and request.top == 1 and request.space is None and not request.certify
    done = exact(request) and seconds_left() == math.inf and not result.statistics.stopped
    decided = not request.fp8 and request.placing != AUTO
    return wanted and done and decided and not offload_of(result.plan).stores


def settled(request: SearchRequest, result: SearchResult) -> SearchRequest:
    """A request with tables, offload and other open choices decided as in a result of it."""
    plan = result.plan.training.update
    given, update = decided_as(request, result.plan), request.update
    if update.zero_by == AUTO_ZERO_BY:
        update = replace(update, zero_by=plan.zero_by)
    if request.padding == "auto":
        update = replace(update, padded=plan.padded, padding_samples=plan.padding_samples)
    alltoall = request.alltoall if request.alltoall != AUTO else result.plan.links_with_alltoall
    placed = replace(update, placed=plan.placed)
    fp8 = replace(request.fp8, gathered=result.plan.training.fp8.gathered)
    return replace(given, placing="given", padding="given", alltoall=alltoall, update=placed, fp8=fp8)


def _peak(result: SearchResult) -> float:
    return result.plan.prediction.peak_bytes


def _cost(result: SearchResult) -> float:
    return result.plans[0].bounded * result.plan.cluster.devices


def _step(result: SearchResult) -> float:
    return result.plan.prediction.step_seconds


def _time(result: SearchResult) -> float:
    return result.plans[0].bounded


def least_memory(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> SearchResult:
    """The fastest plan within the least memory, to `PRECISION`, in which any plan was found to fit."""
    return with_rings(request, lambda asked: _least_memory(asked, on_progress, cancelled), cancelled)


def _least_memory(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> SearchResult:
    shared = Shared()
    with sharing(3):
        found = best_plans(request, _named(on_progress, "for any plan"), cancelled, shared=shared)
    most = high = found.plan.prediction.peak_bytes
    low = _reserved(request)
    by: StoppedBy | None = None
    try:
        with sharing(2):
            while high - low > PRECISION * high and not cancelled():
                middle = (low + high) / 2
                on_progress(_bisecting(low, high))
                if anything_fits(replace(request, memory_limit=middle), cancelled, shared):
                    high = middle
                else:
                    low = middle
    except LimitError as error:
        by = error.by
    try:
        if not by or high < most:
            told = _named(on_progress, f"within {bytes_text(high)}")
            found = best_plans(replace(request, memory_limit=high), told, cancelled, shared=shared)
    except LimitError as error:
        by = error.by
    except InfeasibleError as error:  # plans predict more than bounds count, such as prefetched weights
        found, by = _within(request, found, high, error.needed, on_progress, cancelled, shared)
    return found.cut_short(by)


def _within(
    request: SearchRequest,
    found: SearchResult,
    low: Bytes,
    needed: Bytes | None,
    on_progress: Listener,
    cancelled: Stop,
    shared: Shared,
) -> tuple[SearchResult, StoppedBy | None]:
    """`least_memory` between a limit within which no plan was found and the peak of a plan that was found, by whole
    searches. The first of them is within what a plan `needed`, if one was made. Returns also the limit
    of the planner that ended them, if one did."""
    high = found.plan.prediction.peak_bytes
    try:
        while high - low > PRECISION * high and not cancelled():
            middle = needed if needed is not None and low < needed < high else (low + high) / 2
            needed = None
            told = _named(on_progress, f"within {bytes_text(middle)}")
            try:
                with sharing(2):
                    found = best_plans(replace(request, memory_limit=middle), told, cancelled, shared=shared)
                high = found.plan.prediction.peak_bytes
            except LimitError:
                raise
            except InfeasibleError:
                low = middle
    except LimitError as error:
        return found, error.by
    return found, None


def _named(on_progress: Listener, what: str) -> Listener:
    """Reports one of several searches, by its purpose."""
    return lambda progress: on_progress(replace(progress, phase=f"{progress.phase} {what}"))


def _bisecting(low: float, high: float) -> Progress:
    phase = f"narrowing the least memory: {bytes_text(low)} to {bytes_text(high)}"
    return Progress(total=0, done=0, best_seconds=math.inf, bound_seconds=0.0, phase=phase)


def least_cost(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> SearchResult:
    """The plans with the fewest device-seconds, on all devices or on fewer."""
    return with_rings(request, lambda asked: _least_cost(asked, on_progress, cancelled), cancelled)


def _least_cost(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> SearchResult:

    def best(one: SearchRequest, told: Listener, cutoff: float) -> SearchResult:
        return best_plans(one, told, cancelled, cutoff)

    found = _cheaper_and_cheaper(request, best, on_progress, cancelled)
    return found[-1] if found else best_plans(request, on_progress, cancelled)  # raises with what is missing


def _cheaper_and_cheaper(
    request: SearchRequest,
    best: Callable[[SearchRequest, Listener, float], SearchResult],
    on_progress: Listener,
    cancelled: Stop,
) -> list[SearchResult]:
    """The best plans on all devices, then on fewer, each if it takes fewer device-seconds than those before. `best`
    searches plans below a number of seconds."""
    found: list[SearchResult] = []
    cost, quickest = math.inf, math.inf
    by: StoppedBy | None = None
    clusters = list(_parts(request.cluster))
    for place, cluster in enumerate(clusters):
        devices = cluster.devices
        began = reading()
        if found and seconds_left() + seconds_after() < quickest:
            by = by or "time"
            break
        try:
            told = _named(on_progress, f"on {devices} devices")
            with sharing(len(clusters) - place):
                result = best(replace(request, cluster=cluster), told, cost / devices)
        except PlannerError as error:  # too little memory, no division, or not legal on this machine
            if devices == request.cluster.devices and not isinstance(error, InfeasibleError):
                raise
            by = by or (error.by if isinstance(error, LimitError) else None)
            if ended_by(cancelled):
                break
            continue
        by, quickest = by or result.statistics.stopped_by, min(quickest, reading() - began)
        if result.plans[0].bounded * devices < cost:
            cost = result.plans[0].bounded * devices
            found.append(result)
        if cancelled():
            break
    return [*found[:-1], found[-1].cut_short(by)] if found else found


def _parts(cluster: Machine) -> Iterator[Machine]:
    """The cluster with every number of devices that divides its own, all devices first; without numbers that do not
    fill whole nodes."""
    for devices in reversed(divisors(cluster.devices)):
        with contextlib.suppress(TopologyError):
            yield cluster.with_devices(devices)


def front(
    request: SearchRequest, on_progress: Listener = lambda _: None, cancelled: Stop = lambda: False
) -> tuple[SearchResult, ...]:
    """The Pareto front of time against memory, or against cost if that is the objective, fastest first. Each plan is
    the fastest found within less memory, or with fewer device-seconds. Empty if it was cancelled before there was a
    plan."""
    with limited(request.time_limit):
        if cancelled():
            return ()
        check_begin(request)
        by_cost = request.objective == "cost"
        if not by_cost:
            of_one_kind(request.cluster, "search by memory")  # before the first search
        request = _with_choices_made(request, on_progress, cancelled)
        of_kind = _front_of_cost if by_cost else _front_of_memory
        return of_kind(request, on_progress, cancelled)


def _with_choices_made(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> SearchRequest:
    """The request with the choices of its fastest plan, where it leaves open where tables are, what is padded, who owns
    states, or where the all-to-all is."""
    open_words = (request.padding, request.update.zero_by, request.alltoall)
    if request.placing == "given" and AUTO not in open_words:
        return request
    alone = replace(request, objective="time", top=1, simplicity=0.0)
    with sharing(2):  # shared with the points
        return settled(request, plan_for(alone, on_progress, cancelled))


def _front_of_cost(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> tuple[SearchResult, ...]:
    def best(one: SearchRequest, told: Listener, cutoff: float) -> SearchResult:
        def solve(asked: SearchRequest) -> SearchResult:
            return best_plans(replace(asked, top=1), told, cancelled, cutoff)

        def first(asked: SearchRequest) -> SearchResult:  # later there is a plan, and nothing else may be cheaper
            return with_rings(asked, solve, cancelled) if cutoff == math.inf else solve(asked)

        return with_offload(one, first, cancelled)

    found = _cheaper_and_cheaper(request, best, on_progress, cancelled)
    if not found:
        found = [best(request, on_progress, math.inf)]  # raises with what is missing
    costs = [one.plans[0].seconds * one.plan.cluster.devices for one in found]  # in steps; the search compared bounds
    return _faster_than_later([one for place, one in enumerate(found) if costs[place] <= min(costs[: place + 1])])


def _faster_than_later(found: Sequence[SearchResult]) -> tuple[SearchResult, ...]:
    """Those that are faster than every later one."""
    points = list[SearchResult]()
    for one in found:
        points = [*(point for point in points if point.plans[0].seconds < one.plans[0].seconds), one]
    return tuple(points)


def _front_of_memory(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> tuple[SearchResult, ...]:
    points, shared = list[SearchResult](), dict[object, Shared]()
    limit, reserved = request.memory_limit, _reserved(request)
    while not cancelled():
        try:
            told = on_progress if limit is None else _named(on_progress, f"within {bytes_text(limit)}")

            def solve(one: SearchRequest, told: Listener = told, limit: float | None = limit) -> SearchResult:
                asked, own = replace(one, memory_limit=limit, top=1), shared.setdefault(one.offload, Shared())
                return with_rings(asked, lambda each: best_plans(each, told, cancelled, shared=own), cancelled)

            with sharing(2):  # shared with the next point
                found = solve(request) if points else with_offload(request, solve, cancelled)
            request = decided_as(request, found.plan)
        except InfeasibleError as error:
            if limit == request.memory_limit:
                raise
            if isinstance(error, LimitError):
                points[-1] = points[-1].cut_short(error.by)
            break
        points.append(found)
        limit = reserved + (found.plan.prediction.peak_bytes - reserved) * FRONT_STEP
    # with less memory other plans contend, and the schedule of one of them may be faster
    return _faster_than_later(points)


def _reserved(request: SearchRequest) -> float:
    """Bytes of a device that no plan can use."""
    cluster = of_one_kind(request.cluster, "search by memory")
    return float(peak_memory(0.0, 0.0, 0.0, cluster.device, cluster.software))
