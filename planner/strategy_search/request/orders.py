"""Groups of different devices along a pipeline: the possible pipelines, and the order of the groups.

    h100:32, a100:32    4 ranks of 16     h h a a     a a h h         the ranks of a group are consecutive
                        2 ranks of 32     h a         a h

A stage lies within one group, and all stages have the same number of devices, so a group has as many ranks as its
devices allow. The order of the groups matters: early stages hold more micro-batches in flight, and the last one
computes the loss. Orders that separate the ranks of a group would cross the network between groups more often, and are
not tried; to get one, name the group twice.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hardware_profiles import Machine, MixedCluster
from planner.faults import Fault
from planner.strategy_search.request.space import Configuration


def in_orders(found: Iterable[Configuration], cluster: Machine) -> Iterator[Configuration]:
    """The configurations whose stages lie within groups, once for every order of the groups; unchanged if all devices
    are of one kind."""
    if not isinstance(cluster, MixedCluster):
        yield from found
        return
    known = orders(cluster)
    for configuration in found:
        if groups_fault(cluster, configuration.pipeline) is None and configuration.virtual_stages == 1:
            yield from (replace(configuration, order=order) for order in known)


def orders(cluster: MixedCluster) -> tuple[tuple[int, ...], ...]:
    """All orders of the groups; orders that differ only in equal groups count once."""
    every = itertools.permutations(range(len(cluster.groups)))
    alike = {tuple(cluster.groups[at] for at in order): order for order in reversed(list(every))}
    return tuple(sorted(alike.values()))


def groups_fault(cluster: MixedCluster, pipeline: int) -> Fault | None:
    """Why this number of pipeline ranks does not fit the groups; None if it does."""
    sizes = [group.devices for group in cluster.groups]
    if cluster.devices % pipeline == 0 and all(size % (cluster.devices // pipeline) == 0 for size in sizes):
        return None
    most = math.gcd(*sizes)
    return Fault(
        option="pipeline",
        value=f"{pipeline}",
        reason=f": every stage lies within one group of {cluster.name}, and all have equally many devices, at most"
        f" {most}",
        numbers=("pipeline",),
    )
