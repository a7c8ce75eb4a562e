"""Ways to gather weights for use that a request leaves open (`planner.sharding.update.Update.gathers`)."""

from dataclasses import replace

from costmodels import SCHEDULES
from planner.faults import Fault
from planner.graph.fp8 import GATHERED
from planner.graph.kinds import find_blocks
from planner.plan.schedule_checks import gathered_fault, gathers_fault, stale_fp8_fault
from planner.sharding.update import AHEAD, AUTO_GATHERS, BLOCK, EACH
from planner.strategy_search.request.checks import runs_here
from planner.strategy_search.request.offload import NOTHING
from planner.strategy_search.request.request import SearchRequest

_TRIED = (AHEAD, EACH, BLOCK)
"""In the order in which they are tried: the fastest, the one that takes least memory, and the one in between."""


def gathers_in_fp8_fault(request: SearchRequest, blocks: int) -> Fault | None:
    """Why the weights of a model with `blocks` repeated blocks cannot be gathered in fp8; None if they can."""
    if not request.fp8.gathered:
        return None
    offloaded, ways = request.offload.weights != NOTHING.weights, ways_to_gather(request, blocks)
    if request.update.gathers == AUTO_GATHERS and EACH in ways:
        reason = "is about what the repeated blocks of a model gather, on several devices, by our own runtime"
        return Fault(option="fp8_gathered", value="true", reason=reason, hint="leave it out")
    if not ways:
        turns = f"but {request.pinned.interleave} micro-batches take turns operator by operator"
        reason = f"casts the weights of a block before it begins, {turns}"
        return Fault(option="fp8_gathered", value="true", reason=reason, hint="leave it out, or set interleave to 1")
    schedule = request.pinned.schedule or "1f1b"
    stale = stale_fp8_fault(request.fp8, SCHEDULES[schedule], schedule) if schedule in SCHEDULES else None
    if stale is not None:
        return stale
    by_block = (replace(request.update, gathers=way) for way in ways)
    return next((fault for one in by_block if (fault := gathered_fault(request.fp8, one, offloaded))), None)


def gathering_in_fp8(request: SearchRequest) -> SearchRequest | None:
    """The request with weights gathered in fp8, if that is possible and not set already, and the search decides on
    layers."""
    space, blocks = request.space, find_blocks(request.graph).count
    if request.fp8.recipe not in (GATHERED if space is None else space.gathers) or request.fp8.gathered:
        return None
    gathered = replace(request, fp8=replace(request.fp8, gathered=True))
    if space is not None:  # an engine's space says how weights are gathered
        return gathered if request.cluster.devices > 1 and blocks > 1 else None
    return gathered if gathers_in_fp8_fault(gathered, blocks) is None else None


def ways_to_gather(request: SearchRequest, blocks: int) -> tuple[str, ...]:
    """The requested way, or all ways that the request allows for a model with `blocks` repeated blocks. Software other
    than our runtime has its own way, and a model without repeated blocks has no coalesced all-gathers."""
    asked = request.update.gathers
    if asked != AUTO_GATHERS:
        return (asked,)
    cluster = request.cluster
    if not runs_here(cluster) or cluster.devices == 1 or blocks < 2 or "device" not in request.offload.saved:
        return (EACH,)
    interleave = request.pinned.interleave or 1
    tried = tuple(way for way in _TRIED if way != EACH or not request.fp8.gathered)
    return tuple(way for way in tried if gathers_fault(replace(request.update, gathers=way), interleave) is None)
