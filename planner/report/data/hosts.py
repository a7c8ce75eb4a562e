"""Which rank is on which host, and what it is there: devices are numbered as the cluster has them, node by node.

host 0    rank 0  rank 1  rank 2 ...       rank = stage x devices of a stage + place in the mesh
host 1    rank 8  ...
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hardware_profiles import Cluster, Machine
from planner.plan.plan import Plan

MOST = 64
"""Hosts that are shown; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process: its number, its pipeline rank, and its place on each axis of the mesh."""

    number: int
    stage: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Devices that are joined by the innermost level of the network."""

    number: int
    profile: str
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The first hosts, and how many there are; `level` is the name of what joins their devices."""

    hosts: tuple[Host, ...]
    count: int
    level: str
    axes: tuple[str, ...]


def hosts_of(plan: Plan, machine: Machine) -> Hosts:
    """Where the ranks of a plan are."""
    groups = (machine,) if isinstance(machine, Cluster) else machine.groups
    found = list(_hosts(plan, groups))
    return Hosts(
        hosts=tuple(found[:MOST]),
        count=len(found),
        level=groups[0].levels[0].name,
        axes=tuple(axis.name for axis in plan.mesh.axes),
    )


def _hosts(plan: Plan, groups: tuple[Cluster, ...]) -> Iterator[Host]:
    first, number = 0, 0
    for group in groups:
        size = group.levels[0].fan_out or group.devices
        for begin in range(first, first + group.devices, size):
            end = min(begin + size, first + group.devices)
            yield Host(number=number, profile=group.name, ranks=tuple(_rank(plan, at) for at in range(begin, end)))
            number += 1
        first += group.devices


def _rank(plan: Plan, number: int) -> Rank:
    stage, place = divmod(number, plan.mesh.size)
    return Rank(number=number, stage=stage, places=plan.mesh.coordinate(place))
