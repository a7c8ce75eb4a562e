"""Time of a collective in the alpha-beta model: the fastest of the algorithms that communication libraries choose from.

A group is a hierarchy of spans, innermost first. Take k devices in each of q nodes. Each device drives its own network
port, so the outer level carries the traffic of a node k times as fast as that of one device:

    node 0          node 1                 inner: devices in one unit of the level below      (1 for the first level)
    d0 ======port== d0     one port        Q:     such units in the whole group, n / inner
    d1 ======port== d1     per device      B, e:  bandwidth per device and direction, and the share of it achieved

Each algorithm on each protocol is one affine function of the message, a + b S. `a` adds the latencies of its steps. `b`
is the largest load of its levels, because libraries cut messages into chunks that flow through all levels at once. The
time is the least of these functions, so it is concave, piecewise linear and increasing in S. In a group of one it is 0.

    algorithm      load of a level, per byte of message      steps
    ring           p (n-1)/n / (inner B e)   + own           p (n-1), along one ring through all devices
    hierarchical   2 (Q-1)/Q / (inner B e)   + own           2 (count-1) of each level: reduce-scatter, all-gather back
                                                             (HCCL has it, NCCL has not)
    tree           2 / (inner B e), 1 where Q = 2   + own    2 (count-1) in a bounded level, 2 log2(count) in another
    in-network     1 / (inner B e) where switches reduce     count-1, one for each further member; other levels: tree
    direct         (n-inner)/n / (B e)   + own               all-to-all, count-1 of each level
    broadcast      1 / (inner B e)                           n-1 along a ring, or the depth of a tree; a reduce the same
                                                             (NCCL has no tree for either: tuning.cc)
    neighbours     1 / (B e) of the outermost level          one: send and receive

p is 2 for an all-reduce and 1 for an all-gather or a reduce-scatter. `own` applies where inner = 1: a further k/n / (B
e), as if the 1/n of the message that a device keeps cost k times a sent one. Measured: the time per byte rises more
slowly from 2 to 4 to 8 devices than (n-1)/n, by a term in 1/n. That this is the copy of the own part is our reading;
where a fit finds k > 1 the copy cannot be all of it. Trees are double binary trees between nodes and chains inside
(NCCL). In-network is NCCL's NVLS where all devices share the switch. Beyond one switch it is NCCL's NVLS tree, with
double binary trees between the nodes. So a long NCCL all-reduce over three or more nodes takes as long as a
reduce-scatter and an all-gather, which use rings: the ring's (n-1)/n is nearly the tree's load. NCCL's tuning.cc
chooses by factors on bandwidth (0.92 for a tree, less for middle sizes). Here the fastest algorithm is taken, at the
efficiencies of the profile.

Not good for: libraries that pick a slower protocol, as they do near the sizes where they switch; collectives of
different axes at the same time (for shared links see `hardware_profiles.cluster`); networks whose switches reduce for
NCCL (CollNet, off by default), unless their level says so. One pass over the table costs O(kinds x protocols x levels),
once per kind and group; after that a price is a few multiply-adds.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1),
2005; Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009 (ring);
Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing
35(12), 2009; Hu et al., "Demystifying NCCL", arXiv 2507.04786, 2025 (protocols, chunks); NCCL src/graph/tuning.cc at
5067397c (which algorithms an all-reduce has, steps of each); HCCL user guide of CANN 8.1, hcclug_000005 (an AllReduce
is a ReduceScatter in the server, an AllReduce between servers and an AllGather in the server).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias, overload

import numpy as np

from costmodels.errors import CostModelError
from costmodels.units import Array, Quantity, Seconds
from hardware_profiles import Group, Protocol, Span

Affine: TypeAlias = tuple[Seconds, float]
"""(a, b): a seconds plus b seconds per byte of message."""

Algorithm: TypeAlias = Callable[[Group, int], Affine | None]
"""Takes a group and the index of a protocol, returns the affine time; None where the group cannot run the algorithm."""


def _protocol(span: Span, index: int) -> Protocol:
    return span.level.protocols[index]


def _inner_sizes(group: Group) -> list[int]:
    """For each span, the devices in one unit of the level below it."""
    sizes, size = [], 1
    for span in group.spans:
        sizes.append(size)
        size *= span.count
    return sizes


def _rate(span: Span, index: int) -> float:
    return span.bandwidth * _protocol(span, index).efficiency


def _own(group: Group, index: int, inner: int) -> float:
    """Cost of the 1/n of the message that a device keeps, as a share of sending the whole message through its own
    ports."""
    return _protocol(group.spans[0], index).own / group.size if inner == 1 else 0.0


def _ring_hops(group: Group, index: int) -> Seconds:
    """Latency of n-1 hops along the ring: n/inner - n/(inner count) of them cross a level."""
    hops = 0.0
    for span, inner in zip(group.spans, _inner_sizes(group), strict=True):
        hops += (group.size // inner - group.size // (inner * span.count)) * _protocol(span, index).latency
    return hops


def _level_steps(group: Group, index: int) -> Seconds:
    """Latency of count-1 steps over each level."""
    return math.fsum((span.count - 1) * _protocol(span, index).latency for span in group.spans)


def _depth(span: Span, index: int) -> Seconds:
    """Latency from leaf to root: a chain in a bounded level, a binary tree over the unbounded one."""
    steps = math.ceil(math.log2(span.count)) if span.level.fan_out is None else span.count - 1
    return steps * _protocol(span, index).latency


def _tree_depth(group: Group, index: int) -> Seconds:
    return math.fsum(_depth(span, index) for span in group.spans)


def _setup(group: Group, index: int) -> Seconds:
    return _protocol(group.spans[-1], index).setup


def _ring(passes: int) -> Algorithm:
    def ring(group: Group, index: int) -> Affine:
        share = passes * (group.size - 1) / group.size
        load = max(
            (share + _own(group, index, inner)) / (inner * _rate(span, index))
            for span, inner in zip(group.spans, _inner_sizes(group), strict=True)
        )
        return _setup(group, index) + passes * _ring_hops(group, index), load

    return ring


def _nccl(group: Group, index: int) -> bool:
    """Whether the protocol is for NCCL's rings and trees alone (NCCL has other kernels for sends between peers)."""
    return _protocol(group.spans[0], index).serves == "rings"


def _hierarchical(group: Group, index: int) -> Affine | None:
    """None under NCCL, whose all-reduce is a ring, a tree, NVLS or CollNet (src/graph/tuning.cc)."""
    if _nccl(group, index):
        return None
    load = 0.0
    for span, inner in zip(group.spans, _inner_sizes(group), strict=True):
        units = group.size // inner
        load = max(load, (2 * (units - 1) / units + _own(group, index, inner)) / (inner * _rate(span, index)))
    return _setup(group, index) + 2 * _level_steps(group, index), load


def _tree_load(group: Group, index: int, span: Span, inner: int) -> float:
    """Load of a level under double binary trees.

    A unit sends half of the message up and half of the sum down each of two trees, so 2 in all. With two units it is 1.
    Of three or more units, one is a leaf of one tree and has two children in the other.
    """
    sends = 1 if group.size == 2 * inner else 2
    return (sends + _own(group, index, inner)) / (inner * _rate(span, index))


def _tree(group: Group, index: int) -> Affine:
    load = max(
        _tree_load(group, index, span, inner) for span, inner in zip(group.spans, _inner_sizes(group), strict=True)
    )
    return _setup(group, index) + 2 * _tree_depth(group, index), load


def _in_network(group: Group, index: int) -> Affine | None:
    """NCCL's NVLS, or its NVLS tree where only some levels have switches that reduce; None where no level has any.

    The sums of the switches go up and down double binary trees. (tuning.cc gives the NVLS tree half of the bandwidth
    between three or more nodes, and 2 log2(nodes) steps.)
    """
    if all(span.level.in_network is None for span in group.spans):
        return None
    load, latency = 0.0, 0.0
    for span, inner in zip(group.spans, _inner_sizes(group), strict=True):
        switch = span.level.in_network
        if switch is not None:
            load = max(load, 1 / (inner * span.bandwidth * switch.efficiency))
            latency += switch.setup + (span.count - 1) * switch.latency
        else:
            load = max(load, _tree_load(group, index, span, inner))
            latency += 2 * _depth(span, index)
    return _setup(group, index) + latency, load


def _direct(group: Group, index: int) -> Affine:
    size = group.size
    load = max(
        ((size - inner) / size + _own(group, index, inner)) / _rate(span, index)
        for span, inner in zip(group.spans, _inner_sizes(group), strict=True)
    )
    return _setup(group, index) + _level_steps(group, index), load


def _pipelined_load(group: Group, index: int) -> float:
    return max(1 / (inner * _rate(span, index)) for span, inner in zip(group.spans, _inner_sizes(group), strict=True))


def _ring_broadcast(group: Group, index: int) -> Affine:
    return _setup(group, index) + _ring_hops(group, index), _pipelined_load(group, index)


def _tree_broadcast(group: Group, index: int) -> Affine | None:
    """None under NCCL: its kernels broadcast, and reduce to one device, along rings only (src/graph/tuning.cc, since
    2.6: `coll == ncclFuncBroadcast && a != NCCL_ALGO_RING`)."""
    if _nccl(group, index):
        return None
    return _setup(group, index) + _tree_depth(group, index), _pipelined_load(group, index)


def _neighbours(group: Group, index: int) -> Affine:
    pair = Span(level=group.spans[-1].level, count=2)
    return _setup(group, index) + _protocol(pair, index).latency, 1 / _rate(pair, index)


COLLECTIVES: dict[str, tuple[Algorithm, ...]] = {
    "all_gather": (_ring(1),),
    "all_reduce": (_ring(2), _hierarchical, _tree, _in_network),
    "all_to_all": (_direct,),
    "broadcast": (_ring_broadcast, _tree_broadcast),
    "reduce": (_ring_broadcast, _tree_broadcast),  # the same messages in the other direction
    "reduce_scatter": (_ring(1),),
    "send_recv": (_neighbours,),
}
"""Every kind of collective and the algorithms that compete for it."""

PEER_KINDS = frozenset({"all_to_all", "send_recv"})
"""Kinds that libraries run with their peer-to-peer kernels; all other kinds run along rings and trees."""


@lru_cache(maxsize=65536)
def affine_pieces(kind: str, group: Group) -> tuple[Affine, ...]:
    """The functions a + b S whose minimum is the time of a collective, without those that are never the minimum.

    Sorted by a; empty for a group of one. Raises `CostModelError` for an unknown kind.
    """
    return find_pieces(kind, group)


def find_pieces(kind: str, group: Group) -> tuple[Affine, ...]:
    """As `affine_pieces`, without its cache."""
    algorithms = COLLECTIVES.get(kind)
    if algorithms is None:
        raise CostModelError(f"unknown collective {kind!r}; known: {', '.join(COLLECTIVES)}")
    if group.size == 1:
        return ()
    served = ("all", "peers" if kind in PEER_KINDS else "rings")
    protocols = [index for index, one in enumerate(group.spans[0].level.protocols) if one.serves in served]
    found = sorted(
        piece for algorithm in algorithms for index in protocols if (piece := algorithm(group, index)) is not None
    )
    return _lower_envelope(found)


def _lower_envelope(pieces: list[Affine]) -> tuple[Affine, ...]:
    """The affine functions that are the least for some message; along them a rises and b falls. `pieces` must be
    sorted."""
    kept: list[Affine] = []
    for a, b in pieces:
        if kept and b >= kept[-1][1]:
            continue
        while len(kept) > 1:
            (first, slow), (middle, less) = kept[-2], kept[-1]
            if (middle - first) * (slow - b) < (a - first) * (slow - less):
                break
            kept.pop()  # the new one is already as fast where this one would overtake the one before
        kept.append((a, b))
    return tuple(kept)


@overload
def collective_time(kind: str, message: float, group: Group) -> float: ...
@overload
def collective_time(kind: str, message: Array, group: Group) -> Array: ...
@overload
def collective_time(kind: str, message: Quantity, group: Group) -> Quantity: ...
def collective_time(kind: str, message: Quantity, group: Group) -> Quantity:
    """Time of one collective over a group, while all parallel groups of the same axis run it too; element-wise over
    arrays.

    What `message` counts, in bytes:

        all_reduce      the buffer that each device holds, before and after
        all_gather      the gathered result
        reduce_scatter  the full input on each device
        all_to_all      the local buffer, the part that stays included
        broadcast       the buffer
        reduce          the buffer that each device holds
        send_recv       what one device sends to its neighbour at the outermost span

    An empty message costs 0, and so does any message in a group of one.

    Returns:
        Seconds, of the shape of `message`.

    Raises:
        CostModelError: an unknown kind, or a negative message.
    """
    pieces = affine_pieces(kind, group)
    if isinstance(message, np.ndarray):
        return _array_time(kind, message, pieces)
    if message < 0:
        raise CostModelError(f"{kind} of {message} bytes: a message is never negative")
    if not pieces or message == 0:
        return 0.0
    least = math.inf
    for a, b in pieces:  # twice as fast as min over a generator, and called for every price
        time = a + b * message
        if time < least:
            least = time
    return least


def _array_time(kind: str, message: Array, pieces: tuple[Affine, ...]) -> Array:
    if message.size and message.min() < 0:
        raise CostModelError(f"{kind} of {message.min()} bytes: a message is never negative")
    if not pieces:
        return np.zeros(message.shape)
    least, slope = pieces[0]
    time: Array = message * slope
    time += least
    for a, b in pieces[1:]:
        np.minimum(time, message * b + a, out=time)
    time *= message > 0
    return time
