"""Which rank is on which host, with its pipeline rank: devices are numbered node by node.

host 0    rank 0  rank 1  rank 2 ...       rank = stage x devices of a stage + place in the mesh
host 1    rank 8  ...
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hardware_profiles import Cluster, Machine
from planner.plan.plan import Plan

MOST = 64
"""Maximum number of hosts that are shown; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process: its rank, its pipeline rank, and its place on each mesh axis."""

    number: int
    stage: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The devices joined by the innermost network level."""

    number: int
    profile: str
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The first hosts and their total; `level` is the network level inside a host."""

    hosts: tuple[Host, ...]
    count: int
    level: str
    axes: tuple[str, ...]


def hosts_of(plan: Plan, machine: Machine) -> Hosts:
    """The hosts of the ranks of a plan."""
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
