"""The nearest numbers of samples and of devices that divide better than those that the user asked for.

    global batch    the nearest number that shares a larger factor with the devices, such as 96 for 97 on 8 devices
    devices         the nearest by which more of the weights divides, such as 96 for 88, with as many samples on each

A number is offered if a plan found for it does more samples per second and device than the best plan for the request.
The search for it is not complete. It covers the conventional plan with which a search begins (see
`planner.strategy_search.engine.incumbent`) and, if that is no better, the best plan of the same configuration. So a
full search for this number finds a step as short or shorter. At most one number of each kind is tried, and none if the
user decided how devices or samples are divided.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from hardware_profiles import Cluster, HardwareProfileError
from planner.errors import InfeasibleError, RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.limits import ended_by
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import Neighbour, Progress, SearchResult
from planner.strategy_search.search import search

REACH = 0.15
"""Relative distance from the requested number within which a number may lie."""

LITTLE = 0.5
"""Devices divide badly if they cut the weights into at most this share of the possible pieces."""

WORTH = 0.02
"""Smaller relative gains in samples per second are not offered."""

Listener = Callable[[Progress], None]
Stop = Callable[[], bool]


def with_neighbours(
    request: SearchRequest,
    result: SearchResult,
    on_progress: Listener = lambda _: None,
    cancelled: Stop = lambda: False,
) -> SearchResult:
    """The result of a request, with the nearest numbers that do better if the requested ones divide badly."""
    if result.statistics.stopped or not _open(request):
        return result
    found = list[Neighbour]()
    for other in _others(request):
        if ended_by(cancelled):
            break
        with contextlib.suppress(InfeasibleError, RequestError, HardwareProfileError):
            neighbour = _compared(request, result, other, on_progress, cancelled)
            found += [neighbour] if neighbour is not None else []
    return replace(result, neighbours=tuple(found))


def better_batch(batch: int, devices: int) -> int | None:
    """The nearest number of samples, within `REACH`, that has the largest common factor with the devices; None if that
    of the requested number is as large."""
    reach = int(batch * REACH)
    near = range(max(1, batch - reach), batch + reach + 1)
    best = max(near, key=lambda one: (math.gcd(one, devices), -abs(one - batch), -one))
    return best if math.gcd(best, devices) > math.gcd(batch, devices) else None


def better_devices(graph: OperatorGraph, cluster: Cluster) -> Cluster | None:
    """The cluster with the nearest number of devices, within `REACH`, by which most of the weights divide; None if the
    devices in use divide well, or no near number does better."""
    own = divided(graph, cluster.devices)
    if own >= LITTLE:
        return None
    reach = int(cluster.devices * REACH)
    near: list[tuple[float, int, int, Cluster]] = []
    for devices in range(max(1, cluster.devices - reach), cluster.devices + reach + 1):
        with contextlib.suppress(HardwareProfileError):
            other = cluster.with_devices(devices)
            near.append((divided(graph, devices), -abs(devices - cluster.devices), -devices, other))
    share, *_, best = max(near, key=lambda one: one[:3])
    return best if share > own else None


def divided(graph: OperatorGraph, devices: int) -> float:
    """The number of pieces into which the weights can be cut, as a share of the devices; averaged over their elements.
    A weight is cut along all of its dims. So it is cut into as many pieces as the common factor of its elements and the
    devices."""
    weights = [graph.types[parameter.name].numel for parameter in graph.parameters]
    return sum(size * math.gcd(size, devices) for size in weights) / devices / max(1, sum(weights))


def _open(request: SearchRequest) -> bool:
    """Whether the user left open how devices and samples are divided, and the search covers everything."""
    pinned = request.pinned
    decided = (pinned.mesh, pinned.data, pinned.micro_batch, pinned.micro_batches)
    exact = request.algorithm == "dynamic_programming" and request.objective == "time" and request.prune
    exact = exact and request.space is None  # settings of engines are not tried for other numbers
    return exact and isinstance(request.cluster, Cluster) and all(one is None for one in decided)


def _others(request: SearchRequest) -> Iterator[SearchRequest]:
    """The same request with more, or fewer, samples; and with another number of devices."""
    cluster, asked = request.cluster, replace(request, top=1, certify=False)
    assert isinstance(cluster, Cluster)
    batch = better_batch(request.global_batch, cluster.devices)
    if batch is not None:
        yield replace(asked, global_batch=batch, update=replace(asked.update, padding_samples=0))
    other = better_devices(request.graph, cluster)
    if other is not None:
        even = replace(asked.update, padding_samples=0)
        yield replace(asked, cluster=other, global_batch=_as_many_each(request, other.devices), update=even)


def _as_many_each(request: SearchRequest, devices: int) -> int:
    """The global batch with as many samples for each of `devices` devices as in the request, if that is a whole
    number."""
    samples = request.global_batch * devices
    return request.global_batch if samples % request.cluster.devices else samples // request.cluster.devices


def _compared(
    request: SearchRequest, result: SearchResult, other: SearchRequest, on_progress: Listener, cancelled: Stop
) -> Neighbour | None:
    """The plan of another request as a neighbour, if it is better than the best plan for the request."""
    here = result.plan.prediction.samples_per_second / request.cluster.devices
    for found in _quickly(other, on_progress, cancelled):
        prediction = found.plan.prediction
        gain = prediction.samples_per_second / other.cluster.devices / here - 1
        if gain >= WORTH:
            return Neighbour(
                devices=other.cluster.devices,
                global_batch=other.global_batch,
                step_seconds=prediction.step_seconds,
                samples_per_second=prediction.samples_per_second,
                gain=gain,
            )
    return None


def _quickly(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> Iterator[SearchResult]:
    """The plan with which a search begins; then the best of its configuration, if that leaves more open."""
    known = False

    def note(progress: Progress) -> None:
        nonlocal known
        known = known or progress.best_seconds < math.inf
        on_progress(replace(progress, phase=f"looking at {request.global_batch} samples on {request.cluster.devices}"))

    first = search(request, note, lambda: known or cancelled())
    yield first
    configuration = first.plans[0].configuration
    if configuration.roles and not request.pinned.manual:
        pinned = replace(
            request.pinned,
            pipeline=configuration.pipeline,
            virtual_stages=1,
            mesh=configuration.mesh,
            micro_batches=configuration.micro_batches,
        )
        yield search(replace(request, pinned=pinned), cancelled=cancelled)
