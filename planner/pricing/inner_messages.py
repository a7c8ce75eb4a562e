"""Messages of an operator's own implementation (rings, exchanges of rows, edges of halos): how much they send, how long
they take, and what of that is exposed."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from costmodels import collective_time, once_share
from hardware_profiles import Bytes, Cluster, Group
from planner.pricing.message import Message, message_seconds
from planner.sharding.mesh import Mesh
from planner.sharding.rule import InnerCollective, Rule, Strategy, local_extents, loop_extents, ring_axis

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerMessage:
    """A message of the operator's own implementation, and how often it is sent forward and backward.

    `comes_round`: whether it circulates in a ring. `home`: whether the last one backward returns a result to its owner.
    An exchange along several axes is a message on each axis, one after the other. If the devices of these axes are
    contiguous, `line` has the size and stride of all of them for the outermost axis, and those of one device for the
    other axes: software may exchange all at once. `beside` has the axes whose devices exchange the same rows, as each
    has a part of the width of the experts."""

    message: Message
    forward: int
    backward: int
    comes_round: bool = False
    home: bool = False
    line: tuple[int, int] | None = None
    beside: tuple[int, ...] = ()


def inner_messages(
    rule: Rule, strategy: Strategy, mesh: Mesh, graded: Collection[int] | None = None
) -> tuple[InnerMessage, ...]:
    """The messages of the operator's own implementation, on every axis that splits the factor of an inner collective,
    if gradients of the operands `graded` are needed; by default of all operands."""
    if not rule.inner:
        return ()
    exchanged = {inner.factor for inner in rule.inner if inner.kind == "all_to_all"}
    exchanging = [at for at, choice in enumerate(strategy) if choice in exchanged and mesh.sizes[at] > 1]
    outermost, line = exchanging[0] if exchanging else -1, _line(exchanging, mesh)
    return tuple(
        one
        for inner in rule.inner
        for axis, choice in enumerate(strategy)
        if choice == inner.factor and mesh.sizes[axis] > 1 and (axis == outermost or not inner.outermost)
        if not inner.blocks or _has_parts(rule, strategy, mesh, inner)
        for one in _by_hops(
            _message(rule, strategy, mesh, inner, axis, graded, outermost=axis == outermost, line=line),
            inner.rows,
            local_extents(rule, strategy, mesh)[rule.factors[inner.factor].parts[0]] if inner.rows else 0,
        )
    )


def _line(axes: Sequence[int], mesh: Mesh) -> tuple[int, int] | None:
    """Size and stride of the devices of several axes, if they are contiguous; else None, and None for a single axis."""
    lines = [mesh.axes[axis] for axis in axes]
    beside = all(outer.stride == inner.size * inner.stride for outer, inner in pairwise(lines))
    return (math.prod(one.size for one in lines), lines[-1].stride) if len(lines) > 1 and beside else None


def _by_hops(one: InnerMessage, rows: int, piece: int) -> Iterator[InnerMessage]:
    """The messages for the edge of a halo with this many rows, each of which is `one`, if pieces have `piece` rows: a
    whole piece from each neighbour that is read completely, and the rest. Without an edge, just the message itself."""
    if not rows:
        yield one
        return
    for each, times in ((piece, rows // piece), (rows % piece, 1)):
        if each and times:
            message = replace(one.message, nbytes=each * one.message.nbytes)
            yield replace(one, message=message, forward=times * one.forward, backward=times * one.backward)


def _has_parts(rule: Rule, strategy: Strategy, mesh: Mesh, inner: InnerCollective) -> bool:
    """Whether devices have only parts of blocks of a factor."""
    chunks = 1
    for axis in mesh.zigzag:
        chunks *= 2 if inner.ordered and strategy[axis] == inner.factor else 1
    return bool(local_extents(rule, strategy, mesh)[inner.factor] % (chunks * inner.blocks))


def joined_bytes(rule: Rule, strategy: Strategy, mesh: Mesh) -> Bytes:
    """Bytes that the messages of an operator receive to be joined to its first operand (`Rule.joined`)."""
    return sum(one.message.nbytes * one.forward for one in inner_messages(rule, strategy, mesh)) if rule.joined else 0.0


def inner_hidden(rule: Rule, cluster: Cluster) -> float:
    """The share of the messages of an operator's own implementation, except those of a ring, that overlaps with
    computation."""
    hidden = cluster.software.hidden
    return hidden.exchange if rule.op_class == "experts" else hidden.tensor


def inner_seconds(rule: Rule, inner: InnerMessage, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of such a message. A dispatcher may send a token once to each of n devices or nodes that have some of its
    k chosen experts: n counts the units of the outermost network that they cross, whose bandwidth decides. Or all
    devices gather all tokens, and reduce-scatter the results of their experts: each pass has one of either, so that a
    message takes the mean (`MoEAllGatherTokenDispatcher` of Megatron-Core).

    Devices that have parts of the width of the same experts may exchange each a part of the rows, and gather them
    afterwards (`MoEAlltoAllTokenDispatcher`), of the k rows of a token those beyond the one that the plan gathers."""
    message = inner.message
    if message.axis is None:
        return message_seconds(message, mesh, cluster)
    axis = mesh.axes[message.axis]
    at_once = cluster.software.exchanges_at_once and inner.line is not None
    size, stride = inner.line if at_once and inner.line is not None else (axis.size, axis.stride)
    if size == 1:
        return 0.0  # sent with the message along the outermost axis
    group, nbytes, gathering = cluster.group(size, stride), message.nbytes, 0.0
    if rule.op_class == "experts":
        chosen = rule.factors[rule.index["k"]].extent if "k" in rule.index else 1
        if cluster.software.exchanges_parts and cluster.software.dispatcher != "allgather":
            for at in inner.beside:
                beside = mesh.axes[at]
                gathering += (1 - 1 / chosen) * _gathered_seconds(nbytes, cluster.group(beside.size, beside.stride))
                nbytes /= beside.size
        if cluster.software.dispatcher == "once":
            nbytes *= once_share(chosen, group.spans[-1].count)
        if cluster.software.dispatcher == "allgather" and message.kind == "all_to_all":
            return _gathered_seconds(size * nbytes / chosen, group)
    return gathering + float(collective_time(message.kind, nbytes, group))


def _gathered_seconds(nbytes: Bytes, group: Group) -> float:
    """Seconds of rows that are gathered on the way to experts, and whose results are reduce-scattered on the way back:
    the mean of both."""
    both = [collective_time(kind, nbytes, group) for kind in ("all_gather", "reduce_scatter")]
    return float(sum(both) / len(both))


def _message(
    rule: Rule,
    strategy: Strategy,
    mesh: Mesh,
    inner: InnerCollective,
    axis: int,
    graded: Collection[int] | None,
    *,
    outermost: bool,
    line: tuple[int, int] | None,
) -> InnerMessage:
    comes_round = inner.factor in rule.rings
    passes_back = graded is None or bool(graded) or (rule.outside is not None and rule.outside.trained)
    asked = passes_back and (graded is None or inner.gradient_of is None or inner.gradient_of in graded)
    extents = (local_extents if comes_round else loop_extents)(rule, strategy, mesh)
    nbytes = float(round(math.prod(extents[factor] for factor in inner.factors) * inner.element_bytes))
    if inner.once is not None and outermost:
        one = inner.once
        share = once_share(one.chosen, mesh.sizes[axis], one.groups, one.chosen_groups)
        nbytes = float(one.row * round(nbytes / one.row * share))
    hops = mesh.sizes[axis] - 1 if comes_round else 1
    return InnerMessage(
        message=Message(kind=inner.kind, axis=axis, nbytes=nbytes),
        forward=inner.forward * hops,
        backward=inner.backward * hops + inner.home if asked else 0,
        comes_round=comes_round,
        home=inner.home,
        line=None if line is None or inner.kind != "all_to_all" else (line[0] if outermost else 1, line[1]),
        beside=_beside(rule, strategy, mesh) if inner.kind == "all_to_all" and inner.factors else (),
    )


def _beside(rule: Rule, strategy: Strategy, mesh: Mesh) -> tuple[int, ...]:
    """The axes that cut the width of experts."""
    if rule.op_class != "experts":
        return ()
    width = rule.index["f"]
    return tuple(axis for axis, choice in enumerate(strategy) if choice == width and mesh.sizes[axis] > 1)


def exposed_seconds(
    rule: Rule,
    strategies: Sequence[Strategy],
    mesh: Mesh,
    cluster: Cluster,
    work: tuple[Array, Array],
    graded: Collection[int],
) -> tuple[Array, Array]:
    """Exposed seconds of the inner messages, given those of the kernels, (K,) forward and backward."""
    forward, backward = np.zeros(len(strategies)), np.zeros(len(strategies))
    exposed = 1 - inner_hidden(rule, cluster)
    for row, strategy in enumerate(strategies if rule.inner else ()):
        hop, last = [0.0, 0.0], 0.0
        for inner in inner_messages(rule, strategy, mesh, graded):
            seconds = inner_seconds(rule, inner, mesh, cluster)
            if inner.comes_round:
                hop[0] += seconds * (inner.forward > 0)
                hop[1] += seconds
                last += seconds * inner.home
            else:
                forward[row] += seconds * exposed * inner.forward
                backward[row] += seconds * exposed * inner.backward
        axis = ring_axis(rule, strategy, mesh.sizes)
        if axis is not None:
            times = (float(work[0][row]), float(work[1][row]))
            waits = [_round(mesh.sizes[axis], t, w, cluster) for t, w in zip(hop, times, strict=True)]
            forward[row] += waits[0]
            backward[row] += waits[1] + last if times[1] else 0.0
    return forward, backward


def _round(size: int, hop: float, work: float, cluster: Cluster) -> float:
    """Exposed seconds of all hops of a ring but the first. Each hop overlaps with the computation on the previous
    piece, which takes a share of the `work` of the operator; so a hop takes the longer of the two."""
    return (size - 1) * (hop - cluster.software.hidden.ring * min(hop, work / size))
