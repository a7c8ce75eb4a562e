"""What would make an infeasible request fit: found by search, not by rule of thumb.

Each change is tried by itself: a decision of the user's given up, more devices (doubled until something fits), a
lighter optimizer, 16-bit compute. A trial stops at the first configuration that fits; the leanest are tried first
(recomputation, most micro-batches).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.search.request import SearchRequest
from planner.search.search import find_fitting
from planner.search.space import FREE

_MOST_DEVICES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change that makes a plan possible, in words."""

    text: str


def changes(request: SearchRequest) -> Iterator[Change]:
    """Changes to an infeasible request after which something fits."""
    yield from _given_up(request)
    devices = _enough_devices(request)
    if devices is not None:
        yield Change(text=f"{devices} devices (--devices {devices})")
    if request.optimizer != "sgd" and find_fitting(replace(request, optimizer="sgd")):
        yield Change(text="SGD with momentum, which keeps less state (--optimizer sgd)")
    if request.precision == "fp32" and find_fitting(replace(request, precision="bf16")):
        yield Change(text="16-bit compute (--precision bf16)")


def _given_up(request: SearchRequest) -> Iterator[Change]:
    """Decisions without which something fits."""
    pinned = request.pinned
    freed = {
        "recompute": replace(pinned, recompute=None),
        "micro_batch": replace(pinned, micro_batch=None),
        "micro_batches": replace(pinned, micro_batches=None),
    }
    without = {name: replace(request, pinned=free) for name, free in freed.items() if free != pinned}
    if request.memory_limit is not None:
        without["memory_limit"] = replace(request, memory_limit=None)
    found = [f"--{name.replace('_', '-')} left out" for name, freed in without.items() if find_fitting(freed)]
    stages = range((3 if pinned.zero is None else pinned.zero) + 1, 4)
    zero = next((z for z in stages if find_fitting(replace(request, pinned=replace(pinned, zero=z)))), None)
    if zero is not None:
        found.append(f"--zero {zero}")
    if not found and pinned != FREE and find_fitting(replace(request, pinned=FREE)):
        found.append("degrees, micro-batches and recomputation left to the search (plan --model ...)")
    yield from (Change(text=text) for text in found)


def _enough_devices(request: SearchRequest) -> int | None:
    """The smallest doubling of the devices that fits, by way of one whole node; None where none does."""
    devices = request.cluster.devices
    node = request.cluster.devices_per_node or 1
    while devices < _MOST_DEVICES:
        devices = devices * 2 if devices * 2 <= node or devices >= node else node
        if find_fitting(_with_devices(request, devices)):
            return devices
    return None


def _with_devices(request: SearchRequest, devices: int) -> SearchRequest:
    """The same request on more devices; the batch grows with them where it would not divide."""
    batch = max(request.global_batch, devices)
    return replace(request, cluster=request.cluster.with_devices(devices), global_batch=batch)
