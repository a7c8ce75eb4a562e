"""How the step time of a plan depends on the given quantities: each one is increased and decreased.

    links of a level     bandwidth doubled and halved
    link to the host     likewise, for plans that keep something there or on servers
    launches             half the host time per launch
    memory               10% more and less on every device
    batch, sequence      doubled and halved
    devices              doubled and halved

With several kinds of devices, the links are those of each group and those between groups; everything else changes in
all groups.

Each change is answered twice. First with the plan kept: its choices are priced again; a larger batch means more
micro-batches, and more devices a longer data-parallel axis. Then with a new search and nothing decided. That search
starts from the kept plan, and ends if no other plan is more than `TOLERANCE` faster, so bounds exclude most
configurations. Changes of memory or batch alone share their cost tables.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from costmodels import CostModelError, planned_memory
from hardware_profiles import BytesPerSecond, Cluster, HardwareProfileError, Level, Machine, MixedCluster, parts_of
from hardware_profiles.units import bytes_text
from planner.errors import PlannerError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.compare.explanation import Outcome, Sensitivity
from planner.plan.compare.repricing import repriced
from planner.plan.plan import ModelReference, Plan, Prediction
from planner.strategy_search.analysis.around import request_for, searched
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.objectives import Listener, Stop

TOLERANCE = 0.01
"""A new plan must have an objective that is smaller by this share."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The given quantities: a plan or its choices, the traced model, and the machine."""

    plan: Plan
    graph: OperatorGraph
    batch: int
    cluster: Machine


Traced = tuple[ModelReference, OperatorGraph, int]

_AS_IT_IS, _MEMORY, _BATCH = "as it is", "memory", "global batch"
_ALIKE = (_AS_IT_IS, _MEMORY, _BATCH)
"""Worlds that differ in memory or batch alone, so that their searches share cost tables."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How to search again: `begins` returns whether there is time for another search, `cancelled` whether everything is
    to end, and `on_progress` receives the progress of a search."""

    begins: Callable[[], bool]
    on_progress: Listener = lambda _: None
    cancelled: Stop = lambda: False


def sensitivities(
    world: World,
    retrace: Callable[[int], Traced],
    search: Search,
    on_change: Callable[[str], None] = lambda _: None,
    on_kept: Callable[[tuple[Sensitivity, ...]], None] = lambda _: None,
) -> Iterator[Sensitivity]:
    """Every change, one after the other. If `search` is cancelled, what is known by then.

    `retrace` traces the model for sequences of another length; `on_change` receives the change in progress. Changes of
    the machine or the batch with the plan kept need neither a search nor a trace: they come first, together, to
    `on_kept`.
    """
    known: dict[tuple[str, str], Sensitivity] = {}
    shared = Shared()
    for name, change, other in _worlds(world, None):
        if search.cancelled():
            break
        on_change(f"{name} {change}".rstrip())
        known[name, change] = _sensitivity(world, name, change, other)
    if known:
        on_kept(tuple(known.values()))
    if search.cancelled():
        yield from known.values()
        return
    for name, change, other in _worlds(world, retrace):
        if search.cancelled():
            yield from known.values()
            return
        on_change(f"{name} {change}".rstrip())
        row = known.pop((name, change), None) or _sensitivity(world, name, change, other)
        if not isinstance(other, str) and search.begins():
            same = shared if name in _ALIKE else None
            row = replace(row, searched=_searched(other, row.kept, search, same))
        yield row


def _sensitivity(world: World, name: str, change: str, other: World | str) -> Sensitivity:
    """A change with the plan kept."""
    then = world if isinstance(other, str) else other
    return Sensitivity(
        name=name,
        change=change,
        kept=other if isinstance(other, str) else _kept(other),
        searched=None,
        devices=then.cluster.devices,
        tokens=then.plan.model.sequence_length,
    )


def _searched(world: World, kept: Outcome, search: Search, shared: Shared | None) -> Outcome | None:
    """The best plan of a world: the kept plan, if it fits and no plan is found that is more than `TOLERANCE` faster.
    None if the search was cancelled or reached a limit."""
    request = replace(request_for(world.plan, world.graph, world.batch, world.cluster), tolerance=TOLERANCE)
    rival = kept if isinstance(kept, Prediction) and _has_room(kept, world.cluster) else None
    cutoff = math.inf if rival is None else rival.objective_seconds * (1 - TOLERANCE)
    found = searched(request, search.on_progress, search.cancelled, cutoff, shared)
    if found is None or rival is None:
        return found
    return found if isinstance(found, Prediction) and found.step_seconds < rival.step_seconds else rival


def _has_room(found: Prediction, machine: Machine) -> bool:
    """Whether a plan leaves the margin of memory that a search leaves."""
    return all(found.peak_bytes <= planned_memory(part.device, part.software) for part in parts_of(machine))


def _kept(world: World) -> Outcome:
    try:
        found = repriced(world.plan, world.graph, world.batch, world.cluster).plan.prediction
    except (PlannerError, HardwareProfileError, CostModelError) as error:
        return str(error)
    missing = found.peak_bytes - found.capacity_bytes
    if missing > found.capacity_bytes * 1e-9:
        return f"does not fit: {bytes_text(missing)} too much"
    return found


def _worlds(world: World, retrace: Callable[[int], Traced] | None) -> Iterator[tuple[str, str, World | str]]:
    """All changes; without `retrace`, all but the length of sequences."""
    yield _AS_IT_IS, "", world
    for name, words, machine in _links(world.cluster):
        yield f"bandwidth of {name}", words, replace(world, cluster=machine)
    for words, cluster in _host_links(world):
        yield "link between host and device", words, replace(world, cluster=cluster)
    if any(part.device.host_latency for part in parts_of(world.cluster)):
        yield "launches of the host", "/ 2", replace(world, cluster=_of_each(world.cluster, _quicker_host))
    for factor, words in ((1.1, "+ 10%"), (0.9, "- 10%")):
        yield _MEMORY, words, replace(world, cluster=_of_each(world.cluster, partial(_roomier, factor=factor)))
    yield from _batches(world)
    yield from () if retrace is None else _lengths(world, retrace)
    for factor, words in ((2.0, "x 2"), (0.5, "/ 2")):
        yield "devices", words, _devices(world, factor)


def _of_each(machine: Machine, change: Callable[[Cluster], Cluster]) -> Machine:
    """The machine with every group changed."""
    if isinstance(machine, Cluster):
        return change(machine)
    return replace(machine, groups=tuple(change(group) for group in machine.groups))


def _quicker_host(cluster: Cluster) -> Cluster:
    return replace(cluster, device=replace(cluster.device, host_latency=cluster.device.host_latency / 2))


def _roomier(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory=int(cluster.device.memory * factor)))


def _links(machine: Machine) -> Iterator[tuple[str, str, Machine]]:
    """The machine with faster and slower links, for each level in use."""
    for factor, words in ((2.0, "x 2"), (0.5, "/ 2")):
        if isinstance(machine, MixedCluster) and machine.bandwidth is not None:
            yield "links between groups", words, replace(machine, bandwidth=machine.bandwidth * factor)
    for number, part in enumerate(parts_of(machine)):
        for place, level in enumerate(_used_levels(part)):
            for factor, words in ((2.0, "x 2"), (0.5, "/ 2")):
                faster = _with_bandwidth(part, place, level.bandwidth * factor)
                if isinstance(machine, Cluster):
                    yield level.name, words, faster
                else:
                    groups = (*machine.groups[:number], faster, *machine.groups[number + 1 :])
                    yield f"{level.name} of {part.name}", words, replace(machine, groups=groups)


def _host_links(world: World) -> Iterator[tuple[str, Cluster]]:
    """The machine with a faster and a slower link between hosts and devices, if the plan uses it."""
    plan, machine = world.plan, world.cluster
    used = plan.training.update.placed or plan.prediction.offloaded
    if used and isinstance(machine, Cluster) and machine.host is not None:
        for factor, words in ((2.0, "x 2"), (0.5, "/ 2")):
            yield words, replace(machine, host=replace(machine.host, link=machine.host.link * factor))


def _with_bandwidth(cluster: Cluster, place: int, bandwidth: BytesPerSecond) -> Cluster:
    levels = [*cluster.levels]
    levels[place] = replace(levels[place], bandwidth=bandwidth)
    return replace(cluster, levels=tuple(levels))


def _used_levels(cluster: Cluster) -> tuple[Level, ...]:
    """The levels over which the devices in use communicate."""
    found, within = [], 1
    for level in cluster.levels:
        if within < cluster.devices:
            found.append(level)
        within *= level.fan_out or cluster.devices
    return tuple(found)


def _batches(world: World) -> Iterator[tuple[str, str, World | str]]:
    training = world.plan.training
    parts, samples = training.micro_batches, training.global_batch
    whole = training.padded_batch
    for words, micro_batches, batch, padded in (
        ("x 2", 2 * parts, 2 * samples, 2 * whole),
        ("/ 2", parts // 2, samples // 2, whole // 2),
    ):
        if words == "/ 2" and parts % 2 and whole % 2:
            yield _BATCH, words, f"{samples} samples in {parts} micro-batches cannot be halved"
            continue
        halved = replace(
            training,
            global_batch=batch,
            micro_batches=parts if words == "/ 2" and parts % 2 else micro_batches,
            update=replace(training.update, padding_samples=padded - batch),
        )
        yield _BATCH, words, replace(world, plan=replace(world.plan, training=halved))


def _lengths(world: World, retrace: Callable[[int], Traced]) -> Iterator[tuple[str, str, World | str]]:
    length = world.plan.model.sequence_length
    for words, other in (("x 2", 2 * (length or 0)), ("/ 2", (length or 0) // 2)):
        if not other:
            continue
        try:
            model, graph, batch = retrace(other)
        except PlannerError as error:
            yield "sequence length", words, str(error)
            continue
        yield "sequence length", words, replace(world, plan=replace(world.plan, model=model), graph=graph, batch=batch)


def _devices(world: World, factor: float) -> World | str:
    counts = [part.devices for part in parts_of(world.cluster)]
    if any(count * factor < 1 for count in counts):
        return "there is one device"
    if odd := [count for count in counts if count * factor % 1]:
        return f"{odd[0]} devices cannot be halved"
    try:
        return replace(
            world, cluster=_of_each(world.cluster, lambda part: part.with_devices(int(part.devices * factor)))
        )
    except HardwareProfileError as error:
        return str(error)
