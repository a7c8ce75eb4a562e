"""The size of gradient buckets for a cluster: large enough that latency is a small share of a collective's time."""

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
"""The largest share of latency in the all-reduce of a full bucket. A smaller share needs buckets that hardly any
backward pass fills early enough to overlap them: 5 percent means half a GiB on 8 devices of a fast node, 20 percent
means 64 MiB, and 2 MiB on a CPU. DistributedDataParallel uses 25 MiB for all links."""

_LARGE = 1024 * MIB  # bytes of a collective with hardly any latency
_LEAST, _MOST = 64 * KIB, 256 * MIB


def auto_bucket(mesh: Mesh, cluster: Cluster) -> int:
    """Bytes of a bucket on a mesh, a power of two.

        t(S) = a + b S                 the fastest algorithm for S bytes, piecewise (costmodels.collectives)
        b    = t(2 L) / L - t(L) / L   the slope for large collectives, L = 1 GiB
        S    = least power of two with t(S) - b S <= share t(S), share = `LATENCY_SHARE`

    for the axis that needs the largest bucket, from 64 KiB to 256 MiB. In an alpha-beta model S is a/b (1 - share) /
    share, rounded up: 4 times the bytes that the link carries during the latency.
    """
    return max((_on_axis(axis.size, axis.stride, cluster) for axis in mesh.axes if axis.size > 1), default=_LEAST)


def sized(update: Update, mesh: Mesh, cluster: Cluster, gradients: Bytes = math.inf) -> Update:
    """The update with a bucket size, if that depends on the cluster: at most what all `gradients` of the model have
    `filled`. Software with its own buckets keeps them. Where a stage has one device nothing is sent, so there are no
    buckets."""
    if update.buckets != AUTO_BUCKETS:
        return update
    if cluster.software.has_buckets or mesh.size == 1:
        return replace(update, buckets=NO_BUCKETS)
    return filled(replace(update, buckets=auto_bucket(mesh, cluster)), gradients)


def filled(update: Update, gradients: Bytes) -> Update:
    """The update with buckets of which all `gradients` of the model fill at least half. In a larger bucket, the only
    collective of a small model would be priced as a small part of one."""
    size = update.bucket_size
    while size // 2 >= max(gradients, _LEAST):
        size //= 2
    return update if size == update.bucket_size else replace(update, buckets=size)


def total_gradients(graph: OperatorGraph, update: Update, times: Callable[[str], int] = lambda _: 1) -> Bytes:
    """Bytes of the accumulated gradients of all parameters of a model. `times` says how many parameters of the model a
    parameter of the graph stands for."""
    types, trained = graph.types, graph.differentiable
    names = (one.name for one in graph.parameters if one.name in trained)
    return float(sum(summed(types[name], update).nbytes * times(name) for name in names))


def smaller(update: Update) -> Update:
    """The update with buckets of half the size, or without buckets if that is less than the least size."""
    size = update.bucket_size // 2
    return replace(update, buckets=size if size >= _LEAST else NO_BUCKETS)


def room_of(size: int) -> float:
    """Bytes that buckets of a size may take during their collectives: a flat copy of the input, and an output of that
    size."""
    return 2.0 * max(size, _LEAST)


def flat_bytes(graph: OperatorGraph, update: Update) -> float:
    """The most bytes that buckets can take during their collectives, which a search sets aside.

    A bucket with a size limit is no larger than the limit, and has at most all gradients. A bucket composed by the user
    has at most everything that can be in it, unsharded. Nothing is set aside for buckets that are left to the search:
    it sizes them by the memory that its plans leave.
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
