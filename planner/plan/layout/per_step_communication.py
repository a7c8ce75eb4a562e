"""Once-a-step communication of a pipeline rank that belongs to no single parameter: buckets, and norms over all
parameters.

    reduce bucket 0, 1, ..  ──>  norm of the gradients  ──>  optimizer (norms of LAMB)  ──>  gather bucket 0, 1, ..

The objective of the search adds up shares of parameters: each message of a bucket counts as its part of a full bucket.
A bucket that is less full takes longer for each byte, so these shares are a lower bound. Buckets that end at positions,
or have names, have no known size before all layouts are chosen: every message then counts as part of one so long that
latency is nothing. Otherwise a bucket would look no better than single messages, and with one micro-batch nothing would
go in buckets. `OnceCost` has the difference to what is really sent. Norms, a few messages of some bytes, cost every
plan of a mesh about the same, so the objective leaves them out.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from costmodels import collective_time
from hardware_profiles import Cluster, Machine, links_of_all
from planner.graph.fp8 import read_in_fp8, scales_of, travelling_scales
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.parameter_owners import Owner, broadcasts_of, owners_of, pushes_of, weight_bytes
from planner.plan.layout.shared_parameters import shared_parameters
from planner.pricing import Pricers
from planner.pricing.bucket_size import room_of
from planner.pricing.message import Message, bucket_messages, message_seconds
from planner.pricing.narrow_weights import maxima_seconds
from planner.pricing.parameter_price import summed
from planner.sharding.buckets import (
    Bucket,
    Starts,
    Traveller,
    arrival_order,
    in_buckets,
    in_room,
    moves_of,
    trainable_positions,
    traveller,
)
from planner.sharding.update import NO_BUCKETS

NORM_BYTES = 4.0
"""Bytes of a sum of squares: one fp32 number."""


@dataclass(kw_only=True)
class OnceCost:
    """Seconds beyond those in the objective, and messages, by the part of the time; bytes that buckets take while they
    are sent; and the seconds of each bucket of gradients that starts in the backward pass."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    messages: Counter[tuple[str, Message]] = field(default_factory=Counter)
    flat: float = 0.0
    early: list[tuple[Bucket, float]] = field(default_factory=list)

    def add(self, part: str, message: Message, seconds: float) -> None:
        self.seconds[part] += seconds
        self.messages[part, message] += 1


def once_of(bound: BoundPlan, held: Collection[str], cluster: Cluster, pricers: Pricers, machine: Machine) -> OnceCost:
    """The once-a-step communication of a pipeline rank on a `cluster` that holds these parameters; other ranks may be
    on other clusters of the `machine`."""
    plan, training = bound.plan, bound.plan.training
    key = ("once a step", training.update, training.optimizer, plan.stages, frozenset(held), id(cluster), id(machine))
    cost, *_ = bound.once(key, lambda: (_once_of(bound, held, cluster, pricers, machine), cluster, machine))
    return cost


def _once_of(bound: BoundPlan, held: Collection[str], cluster: Cluster, pricers: Pricers, machine: Machine) -> OnceCost:
    starts, gathered = reduction_starts(bound, held), gathering_buckets(bound, held)
    cost = OnceCost(flat=max((starts.room, *(bucket.flat for bucket in gathered))))
    for part, buckets, pricer in (
        ("gradient reduction", starts.buckets, pricers.sums),
        ("weight gathering", gathered, pricers.updated),
    ):
        for place, bucket in enumerate(buckets):
            travels = 0.0
            for number, message in enumerate(bucket_messages(bucket)):
                assert message.axis is not None, "gradients and weights stay within a stage"
                whole = pricer.exposed * message_seconds(message, bound.plan.mesh, cluster)
                own = [member.nbytes[number] for member in bucket.members]
                taken = {one: pricer.sent_seconds(message.kind, message.axis, one) for one in dict.fromkeys(own)}
                cost.add(part, message, whole - sum([taken[one] for one in own]))
                travels += whole
            if part == "gradient reduction" and place < starts.early:
                cost.early.append((bucket, travels))
    for broadcast in broadcasts_of(bound, owners_of(bound, held)):
        cost.flat = max(cost.flat, broadcast.flat)
        for message in broadcast.messages:
            assert message.axis is not None, "weights stay within a stage"
            whole = pricers.updated.exposed * message_seconds(message, bound.plan.mesh, cluster)
            alone = (weight_bytes(bound, name) for name in broadcast.names)
            shares = (pricers.updated.sent_seconds(message.kind, message.axis, nbytes) for nbytes in alone)
            cost.add("weight gathering", message, whole - sum(shares))
    maxima = maxima_messages(bound, held)
    for message in (*norm_messages(bound), *trust_messages(bound, held), *scale_messages(bound, held), *maxima):
        cost.add("optimizer", message, _norm_seconds(bound, message, cluster, machine))
    for name in read_in_fp8(bound.graph):
        if name not in held:
            continue
        stored, sizes = bound.parameters[name].weight, bound.plan.mesh.sizes
        cost.seconds["optimizer"] += maxima_seconds(bound.graph.types[name], stored, sizes, cluster)
    return cost


def reduction_starts(bound: BoundPlan, held: Collection[str]) -> Starts:
    """Buckets of the gradients of a rank that holds these parameters, and which of them start in its backward pass.
    Buckets that the user composed get all the memory that they need."""
    size = bound.plan.training.update.bucket_size
    return in_room(_buckets(bound, held, gradients=True), bound.plan.mesh, room_of(size) if size else math.inf)


def gathering_buckets(bound: BoundPlan, held: Collection[str]) -> tuple[Bucket, ...]:
    """Buckets of the new weights, in the order in which gradients arrive."""
    return _buckets(bound, held, gradients=False)


def shares_buckets(bound: BoundPlan) -> bool:
    """Whether any two parameters share a bucket."""
    buckets = (*_buckets(bound, bound.parameters, gradients=True), *gathering_buckets(bound, bound.parameters))
    return any(len(bucket.members) > 1 for bucket in buckets)


def reduces_in_buckets(bound: BoundPlan) -> bool:
    """Whether any gradients are reduced once a step."""
    return bool(_buckets(bound, bound.parameters, gradients=True))


def _buckets(bound: BoundPlan, held: Collection[str], *, gradients: bool) -> tuple[Bucket, ...]:
    update = bound.plan.training.update
    if update.buckets == NO_BUCKETS:
        return ()
    key = ("buckets", update, bound.plan.stages, frozenset(held), gradients)
    return bound.once(key, lambda: _filled(bound, held, gradients=gradients))


def _filled(bound: BoundPlan, held: Collection[str], *, gradients: bool) -> tuple[Bucket, ...]:
    update = bound.plan.training.update
    wanted = [n for n in arrival_order(bound.graph) if n in held and n in bound.graph.consumers]
    ways: dict[object, Traveller] = {}
    servers = owners_of(bound, held) if gradients and update.served else {}
    local = {name for name in wanted if update.is_local(name)} if update.local_parameters else set[str]()
    travellers = []
    for name in wanted:
        if name not in local:
            known = None if servers else ways.get((id(bound.graph.types[name]), id(bound.parameters[name])))
            travellers.append(
                known.called(name) if known is not None else _traveller(bound, name, gradients, ways, servers.get(name))
            )
    positions = trainable_positions(bound.graph)
    return in_buckets(travellers, update.buckets, positions, shared_parameters(bound) if gradients else frozenset())


def _traveller(
    bound: BoundPlan, name: str, gradients: bool, known: dict[object, Traveller], server: Owner | None
) -> Traveller:
    """The redistribution of a parameter, shared by others of its kind in the blocks of a model; its gradient may go to
    a `server`."""
    stored, tensor, mesh = bound.parameters[name], bound.graph.types[name], bound.plan.mesh
    kind = (id(tensor), id(stored))
    if kind not in known:
        moved = summed(tensor, bound.plan.training.update) if gradients else tensor
        way = (stored.gradient, stored.state) if gradients else (stored.state, stored.weight)
        known[kind] = traveller(name, moved.shape, moved.dtype, moved.element_bytes, mesh, *way)
    one = known[kind]
    if server is None:
        return one.called(name)
    steps, whole = pushes_of(bound, name, server), summed(tensor, bound.plan.training.update).nbytes
    return Traveller(
        name=name,
        dtype=one.dtype,
        held=one.held,
        steps=steps,
        nbytes=tuple(step.fraction * whole for step in steps),
        moves=moves_of(steps),
        to=server.place,
    )


def norm_messages(bound: BoundPlan) -> tuple[Message, ...]:
    """The messages of the global norm: one number over each axis, then over the stages."""
    if bound.plan.training.update.clip_norm is None:
        return ()
    axes = [axis for axis, size in enumerate(bound.plan.mesh.sizes) if size > 1]
    stages = [None] if bound.plan.pipeline > 1 else []
    return tuple(Message(kind="all_reduce", axis=axis, nbytes=NORM_BYTES) for axis in (*axes, *stages))


def scale_messages(bound: BoundPlan, held: Collection[str]) -> tuple[Message, ...]:
    """The messages of delayed scales: the largest elements of all tensors that have one, over each axis. Before that,
    for weights that several stages share, messages over these stages."""
    types = bound.graph.types
    scales = {name: n for name, n in scales_of(bound.graph).items() if name in held}
    nbytes = {name: float(math.prod(shape) * max(4, types[name].element_bytes)) for name, shape in scales.items()}
    axes = [axis for axis, size in enumerate(bound.plan.mesh.sizes) if size > 1 and nbytes]
    shared = sorted(shared_parameters(bound).intersection(nbytes))
    return (
        *(Message(kind="all_reduce", axis=None, nbytes=nbytes[name]) for name in shared),
        *(Message(kind="all_reduce", axis=axis, nbytes=sum(nbytes.values())) for axis in axes),
    )


def axes_of_maxima(bound: BoundPlan, names: Collection[str]) -> list[int]:
    """The axes along which devices agree on the largest elements of these weights: those that cut any of them."""
    stored = [bound.parameters[name].weight for name in names]
    sizes = bound.plan.mesh.sizes
    return [axis for axis, size in enumerate(sizes) if size > 1 and any(layout[axis].is_shard for layout in stored)]


def maxima_messages(bound: BoundPlan, held: Collection[str]) -> tuple[Message, ...]:
    """The messages of the current largest elements of weights that are gathered in 8 bits: all of them together, over
    each axis that cuts any."""
    types = bound.graph.types
    scales = {name: n for name, n in travelling_scales(bound.graph).items() if name in held}
    nbytes = sum(math.prod(shape) * max(4, types[name].element_bytes) for name, shape in scales.items())
    return tuple(Message(kind="all_reduce", axis=axis, nbytes=float(nbytes)) for axis in axes_of_maxima(bound, scales))


def trust_messages(bound: BoundPlan, held: Collection[str]) -> tuple[Message, ...]:
    """The messages of LAMB: for each axis the sums of squares of weight and direction of every parameter whose state
    the axis cuts."""
    if bound.plan.training.optimizer != "lamb":
        return ()
    trainable = [
        bound.parameters[name] for name in bound.parameters if name in held and name in bound.graph.differentiable
    ]
    found = []
    for axis, size in enumerate(bound.plan.mesh.sizes):
        cut = sum(stored.state[axis].is_shard for stored in trainable)
        if size > 1 and cut:
            found.append(Message(kind="all_reduce", axis=axis, nbytes=2 * NORM_BYTES * cut))
    return tuple(found)


def _norm_seconds(bound: BoundPlan, message: Message, cluster: Cluster, machine: Machine) -> float:
    mesh = bound.plan.mesh
    if message.axis is not None:
        return message_seconds(message, mesh, cluster)
    links = links_of_all(machine, bound.plan.pipeline, mesh.size)
    return max(float(collective_time(message.kind, message.nbytes, group)) for group in links)
