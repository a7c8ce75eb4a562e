"""Ways to gather weights for their use that a request leaves open (`planner.sharding.update.Update.gathers`)."""

from dataclasses import replace

from hardware_profiles import device_type_of
from planner.plan.schedule_checks import gathers_fault
from planner.sharding.update import AHEAD, AUTO_GATHERS, BLOCK, EACH
from planner.strategy_search.request.checks import runs_here
from planner.strategy_search.request.request import SearchRequest

_TRIED = (AHEAD, EACH, BLOCK)
"""In this order: what takes the least time, what takes the least memory, what lies between. On CPUs nothing comes
ahead: their messages take the cores that compute."""


def ways_to_gather(request: SearchRequest, blocks: int) -> tuple[str, ...]:
    """The one that is asked for, or those that the request allows for a model of so many repeated blocks. Other
    software than ours gathers as it does, and without blocks nothing goes together."""
    asked = request.update.gathers
    if asked != AUTO_GATHERS:
        return (asked,)
    cluster = request.cluster
    if not runs_here(cluster) or cluster.devices == 1 or blocks < 2 or "device" not in request.offload.saved:
        return (EACH,)
    interleave = request.pinned.interleave or 1
    tried = _TRIED[1:] if device_type_of(cluster) == "cpu" else _TRIED
    return tuple(way for way in tried if gathers_fault(replace(request.update, gathers=way), interleave) is None)
