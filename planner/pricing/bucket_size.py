"""The size of a bucket that fits a cluster: where starting a message is a small share of its time."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from costmodels import collective_time
from hardware_profiles import Bytes, Cluster
from hardware_profiles.units import KIB, MIB
from planner.graph.operator_graph import OperatorGraph
from planner.pricing.parameter_price import summed
from planner.sharding.buckets import bucket_place, trainable_positions
from planner.sharding.mesh import Mesh
from planner.sharding.update import AUTO_BUCKETS, NO_BUCKETS, Update

LATENCY_SHARE = 0.2
"""Of the time of a full bucket's all-reduce, at most this much is latency. Less would ask for buckets that hardly any
backward pass fills early enough to hide them: 5 percent means half a GiB on 8 devices of a fast node, 20 means 64 MiB,
and 2 MiB on a CPU. DistributedDataParallel takes 25 MiB whatever the links."""

_LARGE = 1024 * MIB  # bytes of a message of which hardly anything is latency
_LEAST, _MOST = 64 * KIB, 256 * MIB


def auto_bucket(mesh: Mesh, cluster: Cluster) -> int:
    """Bytes of a bucket on a mesh, a power of two.

        t(S) = a + b S                 the fastest algorithm for S bytes, piecewise (costmodels.collectives)
        b    = t(2 L) / L - t(L) / L   the slope for large messages, L = 1 GiB
        S    = least power of two with t(S) - b S <= share t(S), share = `LATENCY_SHARE`

    on the axis that asks for most, from 64 KiB to 256 MiB. In an alpha-beta model S is a/b (1 - share) / share, rounded
    up: 4 times what the link carries in the time that a message takes to start.
    """
    return max((_on_axis(axis.size, axis.stride, cluster) for axis in mesh.axes if axis.size > 1), default=_LEAST)


def sized(update: Update, mesh: Mesh, cluster: Cluster, gradients: Bytes = math.inf) -> Update:
    """The update with the size of its buckets, where that is left to the cluster, at most what is `filled` by all
    `gradients` of the model. Software that has buckets keeps its own; where a stage has one device nothing is sent."""
    if update.buckets != AUTO_BUCKETS:
        return update
    if cluster.software.has_buckets or mesh.size == 1:
        return replace(update, buckets=NO_BUCKETS)
    return filled(replace(update, buckets=auto_bucket(mesh, cluster)), gradients)


def filled(update: Update, gradients: Bytes) -> Update:
    """The update with buckets that all `gradients` of the model fill half: in a larger one a small model's only message
    would count as a part of one."""
    size = update.bucket_size
    while size // 2 >= max(gradients, _LEAST):
        size //= 2
    return update if size == update.bucket_size else replace(update, buckets=size)


def total_gradients(graph: OperatorGraph, update: Update, times: Callable[[str], int] = lambda _: 1) -> Bytes:
    """Of the gradients of all parameters of a model, as they are added up; a parameter of the graph stands for so many
    of the model."""
    types, trained = graph.types, graph.differentiable
    names = (one.name for one in graph.parameters if one.name in trained)
    return float(sum(summed(types[name], update).nbytes * times(name) for name in names))


def smaller(update: Update) -> Update:
    """The update with buckets of half the size, or with none where that is less than the least."""
    size = update.bucket_size // 2
    return replace(update, buckets=size if size >= _LEAST else NO_BUCKETS)


def room_of(size: int) -> float:
    """Bytes that buckets of a size may take while they travel: a flat copy, and as much that comes out of it."""
    return 2.0 * max(size, _LEAST)


def flat_bytes(graph: OperatorGraph, update: Update) -> float:
    """The most that buckets on their way can take: what a search sets aside.

    A bucket that ends at a size is no larger, and has all gradients at most. One that the user composed is at most all
    that can be in it, uncut. For those that are left to the search nothing is set aside: it sizes them by the room that
    its plans leave.
    """
    if update.bucket_size:
        return room_of(min(update.bucket_size, int(total_gradients(graph, update))))
    sums: Counter[object] = Counter()
    for name, position in trainable_positions(graph).items():
        place = bucket_place(name, update.buckets, position)
        if place is not None and not update.is_local(name):
            sums[place] += summed(graph.types[name], update).nbytes
    return 2.0 * max(sums.values(), default=0)


def _on_axis(size: int, stride: int, cluster: Cluster) -> int:
    group = cluster.group(size, stride)

    def seconds(nbytes: float) -> float:
        return float(collective_time("all_reduce", nbytes, group))

    slope = (seconds(2 * _LARGE) - seconds(_LARGE)) / _LARGE
    found = int(_LEAST)
    while found < _MOST and seconds(found) - slope * found > LATENCY_SHARE * seconds(found):
        found *= 2
    return found
