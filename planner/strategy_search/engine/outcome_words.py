"""What a search says of configurations, and where nothing fits."""

import math

from costmodels import peak_memory, planned_memory, reserved_memory
from hardware_profiles import Cluster, MixedCluster
from hardware_profiles.units import bytes_text
from planner.errors import InfeasibleError, LimitError
from planner.limits import more_of
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.request.limit_words import NO_PLAN
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration


def configuration_words(configuration: Configuration) -> str:
    """`pipeline 8 of 1 stages, mesh 2x4, 32 micro-batches`."""
    c = configuration
    roles = f" ({', '.join(c.roles)})" if c.roles else ""
    virtual = f" of {c.virtual_stages} stages" if c.virtual_stages > 1 else ""
    mesh = "x".join(map(str, c.mesh)) or "1"
    groups = f", groups {'-'.join(str(group + 1) for group in c.order)}" if c.order else ""
    return f"pipeline {c.pipeline}{virtual}, mesh {mesh}{roles}, {c.micro_batches} micro-batches{groups}"


def fate_words(outcome: Outcome, cutoff: float) -> str:
    """What came of a configuration that was evaluated."""
    if outcome.ranks:
        return f"objective {outcome.seconds:.4g} s found, lower bound {outcome.bound:.4g} s"
    if outcome.bound < math.inf:
        return f"cut off: lower bound {outcome.bound:.4g} s, and only plans below {cutoff:.4g} s are wanted"
    least = f", {bytes_text(outcome.least)} would be needed" if outcome.least < math.inf else ""
    return f"does not fit{least}"


def nothing_fits(
    request: SearchRequest,
    least: float,
    fullest: tuple[int, int],
    group: Cluster,
    *,
    stopped: bool,
    host: float = math.inf,
) -> InfeasibleError:
    """The error of a search that found nothing: the leanest plan needs so many bytes at this rank of so many, which is
    on this group of devices, beside which a plan may use `host` bytes of the host's memory, if any; LimitError where
    the user `stopped` it."""
    device = group.device
    if stopped:
        return LimitError(f"{NO_PLAN}; {more_of('interrupt')}", by="interrupt")
    needed = float(peak_memory(least, 0.0, request.cluster.software.buffers, device, group.software))
    memory = planned_memory(device, group.software)
    there, reserved = "available", reserved_memory(device, group.software)
    if request.memory_limit is not None and request.memory_limit <= memory:
        memory = request.memory_limit
        if memory <= reserved:
            there = f"of the memory limit; a device reserves {_size(reserved)} before it holds any of the model"
    elif memory < device.memory:
        margin = device.memory / memory - 1
        there = f"that a margin of {margin:.1%} leaves of {_size(device.memory)} (--memory-margin)"
    where = _rank_words(*fullest) + (f" ({group.name})" if isinstance(request.cluster, MixedCluster) else "")
    if not memory < needed < math.inf:
        if host < math.inf:
            return InfeasibleError(
                f"{request.algorithm} found no plan of {request.model.reference} that fits on {request.cluster.devices}"
                f" x {request.cluster.name} and beside them, in the {bytes_text(host)} of the host's memory that each"
                " device has"
            )
        exact = request.algorithm == "dynamic_programming"
        other = "" if exact else "--search dynamic_programming, or "
        return InfeasibleError(
            f"{request.algorithm} found no plan of {request.model.reference} that fits on {request.cluster.devices}"
            f" x {request.cluster.name}, which does not prove that none fits; try {other}more memory"
        )
    return InfeasibleError(
        f"{request.model.reference} does not fit on {request.cluster.devices} x {request.cluster.name}: the "
        f"leanest plan evaluated needs {_size(needed)} per device{where}, {_size(needed - memory)} more"
        f" than the {_size(memory)} {there}",
        needed=needed,
        missing=needed - memory,
    )


def _rank_words(rank: int, ranks: int) -> str:
    return f" at pipeline rank {rank} of {ranks}" if ranks > 1 else ""


def _size(nbytes: float) -> str:
    """GiB, with as many digits as small numbers need; smaller units where these would be none."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    if nbytes >= 2**20:
        return f"{nbytes / 2**30:.3f} GiB"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes:.0f} bytes"
