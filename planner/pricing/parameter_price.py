"""Seconds and bytes of one parameter under many stored layouts at once, (K,) each.

Once a step, the accumulated gradient is brought into the layout of the state (reduced over the axes where it is
partial), the optimizer updates its shard, and the new weights are brought back into their stored layout:

    gradient layout --(fp32)--> state layout --update--> state layout --(compute dtype)--> weight layout

For every micro-batch, its gradient in the compute dtype is added to the accumulated one in fp32. This reads both and
writes one: a pass over the parameters that software with fused weight gradients saves (`Software.accumulates`); the
runtime does not fuse. Where autograd accumulates, sums have the compute dtype (`Software.sums_narrow`).

ZeRO-1 has states that are sharded finer than the weight. ZeRO-2 also shards the gradient, and reduce-scatters it after
every use. ZeRO-3 also shards the weight, and gathers it for every use. Both are priced with the use. The padding of
shards (`planner.sharding.layout.PaddedShape`) is included.

If states are sharded by whole parameters (`Update.owned`), one of the replicas of a weight has the state and broadcasts
the updated weight. Which one depends on all parameters together: `share` is the part of a state that a device has; by
default it is the mean over the devices. If owners are parameter servers (`Update.served`), gradients are reduced to
them alone, and state, master weight and update are on their hosts (`costmodels.dense_servers`).

Matrices that Muon updates are also made orthogonal (`planner.pricing.matrix_update`): `optimizer` is the one that
updates this parameter (`planner.sharding.matrices.optimizer_of`).

Collectives in buckets are priced as a share of a full bucket, which is a lower bound.
`planner.plan.layout.per_step_communication` computes the time of a plan's real buckets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from costmodels import (
    offloaded_bytes,
    operator_time,
    optimizer_time,
    optimizer_traffic,
    parameter_bytes,
    served_update_time,
    visit_pace,
    visit_seconds,
)
from hardware_profiles import PYTORCH, TRAINED, Bytes, Cluster, Home, Seconds, Software
from planner.graph.operator_graph import TensorType
from planner.pricing.matrix_update import matrix_seconds
from planner.pricing.redistribution_price import Pricers, RedistributionPricer
from planner.sharding.layout import Layout, local_share, whole_shape
from planner.sharding.matrices import MUON
from planner.sharding.stored import StoredParameter, owned_axes
from planner.sharding.update import PLAIN, Update

Array = NDArray[np.float64]
_FP32 = 4  # bytes

_PRECISION = {dtype.weights: name for name, dtype in TRAINED.items() if not dtype.operands}
"""Precisions by the dtype of their weights."""

UPDATED = 0.5
"""Host time per parameter in an update of our runtime, in units of an operator that it launches: the host finds the
gradient, passes it to the optimizer, which lists it, and finds the weight to write. Measured on a CPU with the update
kernels left out: 0.48 (GPT), 0.51 (BERT) and 0.54 (Llama), 24 blocks each, with `tests/benchmarks/bench_host.py`.
Nothing overlaps with it: a step reads its loss before it updates anything."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterPrices:
    """Prices of one parameter, (K,) each.

    Attributes:
        accumulation: seconds per micro-batch of the kernels that accumulate gradients.
        launches: seconds per micro-batch in which a host launches these kernels.
        synchronisation: seconds per step of gradient reduction.
        copied: the part of these for copies into and out of buckets.
        update: seconds per step of the update.
        gather: seconds per step to gather new weights.
        weight, gradient, state: bytes kept on the device; without an offloaded weight or state.
        offloaded: bytes of a state that is offloaded.
        fetch, store: seconds to fetch and write back that state if it is alone.
        offload: seconds by which the update takes longer in a sequence of such states, with overlapping transfers.
        weight_offloaded: bytes of a weight that is offloaded.
        weight_fetch: seconds to fetch it for one pass through its block.
        fetches: seconds per micro-batch to fetch it, for its forward and, in training, its backward pass.
        weight_store: seconds per step to write back the new weight.
        served: bytes of a state that a parameter server keeps on the device's host, and of the sum of its gradients;
            all sums exist before any update.
        hosted: bytes of weight and state on the device's host.
    """

    accumulation: Array
    launches: Array
    synchronisation: Array
    copied: Array
    update: Array
    gather: Array
    weight: Array
    gradient: Array
    state: Array
    offloaded: Array
    fetch: Array
    store: Array
    offload: Array
    weight_offloaded: Array
    weight_fetch: Array
    fetches: Array
    weight_store: Array
    served: Array
    hosted: Array

    @property
    def late(self) -> Array:
        """Seconds in which kernels that accumulate gradients wait for their launches, if the host does not launch
        ahead."""
        return np.maximum(self.launches - self.accumulation, 0.0)

    @property
    def visiting(self) -> Array:
        """Bytes on the device of an offloaded weight while its block runs, together with those of the next block."""
        return offloaded_bytes(self.weight_offloaded)

    @property
    def transient(self) -> Array:
        """Bytes on the device through which offloaded states pass."""
        return offloaded_bytes(self.offloaded)


def price_parameter(
    tensor: TensorType,
    trainable: bool,
    stored: Sequence[StoredParameter],
    precision: str,
    optimizer: str,
    pricers: Pricers,
    update: Update = PLAIN,
    local: bool = False,
    share: float | None = None,
    *,
    trains: bool = True,
) -> ParameterPrices:
    """Prices of a parameter of this type in each of the given stored layouts; a `local` one needs no gradient
    reduction. `share` is the part that the device has of a state with a single owner: 1, 0, or by default the mean.
    `trains` says whether there are backward passes, which fetch offloaded weights again."""
    cluster, sizes = pricers.parameters.cluster, pricers.parameters.mesh.sizes
    software, precision = cluster.software, precision_of(tensor, precision)
    per = parameter_bytes(precision, optimizer, software, update.variant)
    each = weight_bytes(tensor, per.weight)
    weight = _weight_bytes(tensor, stored, sizes, each, copied=trainable and each > tensor.element_bytes)
    weight += _shares(tensor, [s.weight for s in stored], sizes) * tensor.numel * software.stored.beside
    apart = np.array([one.weight_home != "device" for one in stored])
    weight_fetch, weight_store = _visits(weight, [one.weight_home for one in stored], cluster)
    zeros = np.zeros(len(stored))
    held = replace(
        _nothing(zeros),
        weight=np.where(apart, 0.0, weight),
        weight_offloaded=np.where(apart, weight, 0.0),
        hosted=np.where([one.weight_home == "host" for one in stored], weight, 0.0),
        weight_fetch=weight_fetch,
        fetches=(2 if trains else 1) * weight_fetch,
    )
    if not trainable:
        return held
    owners = _Owners.of(stored, sizes, update, owned=update.owned and not local, share=share)
    whole = _shares(tensor, [s.state for s in stored], sizes) * tensor.numel  # of a device that has a share
    state = whole * owners.share
    gradient = _shares(tensor, [s.gradient for s in stored], sizes) * tensor.numel
    accumulated, served = summed(tensor, update), owners.served
    copies = _copies(tensor, stored, apart | served, pricers, update)
    kept = state * (per.state + tensor.element_bytes * copies)
    updated = _update_seconds(tensor, stored, whole, precision, optimizer, pricers, update, owners)
    updated = updated + _passes_apart(tensor, state, gradient * per.gradient, precision, cluster)
    summing, copied = zeros, zeros
    if not local:
        routes = pricers.sums.pairs(accumulated, [s.gradient for s in stored], [s.state for s in stored])
        summing, copied = routes.seconds, routes.copies
    if served.any():
        summing = np.where(served, _messages("reduce", accumulated, stored, owners.axes, pricers.sums), summing)
        copied = np.where(served, 0.0, copied)
    gather = pricers.updated.pairs(tensor, [s.state for s in stored], [s.weight for s in stored]).seconds
    away = np.array([one.state_home != "device" for one in stored])
    fetch, store = _visits(kept, [one.state_home for one in stored], cluster)
    accumulation, launches = _accumulation(tensor, accumulated, gradient, cluster)
    at_servers = np.where(served, kept + state * accumulated.element_bytes, 0.0)
    return replace(
        held,
        accumulation=accumulation,
        launches=launches,
        synchronisation=summing,
        copied=copied,
        update=updated,
        gather=gather + _messages("broadcast", tensor, stored, owners.axes, pricers.updated),
        gradient=gradient * per.gradient,
        state=np.where(away | served, 0.0, kept),
        offloaded=np.where(away, kept, 0.0),
        fetch=fetch,
        store=store,
        offload=np.where(away, visit_pace(fetch, updated, store) - updated, 0.0),
        weight_store=weight_store,
        served=at_servers,
        hosted=held.hosted + np.where([one.state_home == "host" for one in stored], kept, at_servers),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Owners:
    """Who has the state of a parameter in each stored layout: the `axes` along which one device does (none if all do),
    the `share` of it that this device has, and whether it is `served` by parameter servers."""

    axes: Sequence[Sequence[int]]
    share: Array
    served: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        stored: Sequence[StoredParameter],
        sizes: Sequence[int],
        update: Update,
        *,
        owned: bool,
        share: float | None,
    ) -> Self:
        axes = [owned_axes(s, sizes) for s in stored] if owned else [()] * len(stored)
        mean = np.array([1 / math.prod([sizes[axis] for axis in own]) if own else 1.0 for own in axes])
        single = np.array([bool(own) for own in axes])
        return cls(
            axes=axes,
            share=mean if share is None else np.where(single, share, 1.0),
            served=single & update.served,
        )


def _copies(
    tensor: TensorType,
    stored: Sequence[StoredParameter],
    elsewhere: NDArray[np.bool_],
    pricers: Pricers,
    update: Update,
) -> Array:
    """The copies of a weight, 0 or 1, that its state holds in addition to its own bytes.

    An fp32 weight is its own master copy unless the state is sharded finer; then the shard of the state is a copy, as
    is that of a weight or a state `elsewhere`. FSDP keeps its shard beside a weight that stays gathered for long."""
    sizes, software = pricers.parameters.mesh.sizes, pricers.parameters.cluster.software
    if not (tensor.element_bytes == _FP32 or not update.master_weights) or software.offloaded:
        return np.zeros(len(stored))
    weights, states = [s.weight for s in stored], [s.state for s in stored]
    gathered = software.copies_out & (_shares(tensor, states, sizes) < _shares(tensor, weights, sizes))
    beside = elsewhere | _padded(tensor, stored, sizes) | gathered
    return np.where(beside, 1.0, pricers.parameters.pairs(tensor, weights, states).sends)


def _update_seconds(
    tensor: TensorType,
    stored: Sequence[StoredParameter],
    state: Array,
    precision: str,
    optimizer: str,
    pricers: Pricers,
    update: Update,
    owners: _Owners,
) -> Array:
    """Seconds per step in which the optimizer updates `state` elements, on the device or on servers; of these the share
    of the device, if a single one has them."""
    cluster = pricers.parameters.cluster
    foreach, widened = cluster.software.foreach, cluster.software.name == PYTORCH.name  # our kernels take fp32 alone
    updated = np.asarray(
        optimizer_time(state, precision, optimizer, cluster.device, update.variant, foreach=foreach, widened=widened)
    )
    if owners.served.any():
        traffic = optimizer_traffic(precision, optimizer, update.variant, widened=widened)
        there = _on_servers(state, summed(tensor, update), tensor, traffic, cluster)
        updated = np.where(owners.served, there, updated)
    launched = launch_seconds(cluster)
    updated = owners.share * (updated + np.where((state > 0) & ~owners.served, UPDATED * launched, 0.0))
    if optimizer == MUON:
        updated = updated + matrix_seconds(tensor, stored, owners.share, pricers, launched)
    return updated


def _passes_apart(tensor: TensorType, state: Array, gradient: Array, precision: str, cluster: Cluster) -> Array:
    """Seconds per step of passes beside the update (`Software.updates_apart`).

    Gradients, of `gradient` bytes, are set to zero. The fp32 gradients of `state` elements are read and written to
    scale them back, with loss scaling as in fp16; their masters are read again to round weights, which the update has
    as written.
    """
    if not cluster.software.updates_apart or tensor.element_bytes >= _FP32:
        return np.zeros(len(state))
    moved = gradient + state * _FP32 * (3 if precision == "fp16" else 1)
    return np.asarray(
        operator_time(op_class="optimizer", flops=0.0, bytes_moved=moved, dtype="fp32", device=cluster.device)
    )


def _accumulation(
    tensor: TensorType, accumulated: TensorType, gradient: Array, cluster: Cluster
) -> tuple[Array, Array]:
    """Seconds per micro-batch in which `gradient` elements are accumulated, and in which a host launches that."""
    kept_in = tensor if cluster.software.sums_narrow else accumulated
    moved = gradient * (tensor.element_bytes + 2 * kept_in.element_bytes)
    launched = launch_seconds(cluster) if accumulated.dtype != tensor.dtype else 0.0
    takes_turns = cluster.device.in_line or cluster.software.waits_for_kernels
    before_it, beside_it = (launched, 0.0) if takes_turns else (0.0, launched)
    zeros, seconds = np.zeros(len(gradient)), np.zeros(len(gradient))
    if cluster.software.accumulates:
        seconds = np.asarray(
            operator_time(op_class="copy", flops=0.0, bytes_moved=moved, dtype="fp32", device=cluster.device)
        )
    return seconds + before_it, zeros + beside_it


def _nothing(zeros: Array) -> ParameterPrices:
    """A parameter that costs nothing."""
    return ParameterPrices(**{one.name: zeros for one in fields(ParameterPrices)})


def _shares(tensor: TensorType, layouts: Sequence[Layout], sizes: Sequence[int]) -> Array:
    """The share of a tensor that a device holds in each of these layouts; many layouts are equal."""
    known = {layout: local_share(tensor.shape, layout, sizes) for layout in dict.fromkeys(layouts)}
    return np.array([known[layout] for layout in layouts])


def _padded(tensor: TensorType, stored: Sequence[StoredParameter], sizes: Sequence[int]) -> NDArray[np.bool_]:
    """Where the shard of the state has padding that the shard of the weight does not have."""
    layouts = dict.fromkeys([layout for one in stored for layout in (one.weight, one.state)])
    whole = {layout: whole_shape(tensor.shape, layout, sizes) for layout in layouts}
    return np.array([whole[one.weight] != whole[one.state] for one in stored])


def _messages(
    kind: str,
    tensor: TensorType,
    stored: Sequence[StoredParameter],
    owned: Sequence[Sequence[int]],
    pricer: RedistributionPricer,
) -> Array:
    """Seconds in which a gradient is reduced to its owner along these axes, or a new weight is broadcast."""
    if not any(owned):
        return np.zeros(len(stored))
    shares = [local_share(tensor.shape, one.weight, pricer.mesh.sizes) for one in stored]
    return np.array(
        [
            sum(pricer.message_seconds(kind, axis, tensor.nbytes * share) for axis in axes)
            for share, axes in zip(shares, owned, strict=True)
        ]
    )


def _on_servers(parameters: Array, gradient: TensorType, weight: TensorType, traffic: float, cluster: Cluster) -> Array:
    """Seconds in which servers receive the gradients of this many parameters each, update them, and send new
    weights."""
    assert cluster.host is not None, "servers are refused where the profile has no host"
    latency = cluster.device.launch_latency
    return served_update_time(parameters, gradient.element_bytes, weight.element_bytes, traffic, cluster.host, latency)


def _weight_bytes(
    tensor: TensorType, stored: Sequence[StoredParameter], sizes: Sequence[int], each: float, *, copied: bool
) -> Array:
    """Bytes of a weight with `each` bytes per element. A weight that is stored in fp32 and computed with as a 16-bit
    copy has the layout of the state. If that is finer than the layout of the weight, the copy is held in addition
    (FSDP2 that does not reshard)."""
    weight = _shares(tensor, [s.weight for s in stored], sizes) * tensor.numel
    if not copied:
        return weight * each
    state = _shares(tensor, [s.state for s in stored], sizes) * tensor.numel
    apart = np.array([s.weight_home == "device" and s.weight != s.state for s in stored])
    return np.where(apart, weight * tensor.element_bytes + state * each, weight * each)


def _visits(nbytes: Array, homes: Sequence[Home], cluster: Cluster) -> tuple[Array, Array]:
    """Seconds to fetch and to write back this many bytes; zero where they are on the device."""
    fetch, store = np.zeros(len(homes)), np.zeros(len(homes))
    for home in dict.fromkeys(home for home in homes if home != "device"):
        here = np.array([one == home for one in homes])
        fetch[here], store[here] = visit_seconds(nbytes[here], cluster.store(home), cluster.device.launch_latency)
    return fetch, store


def gathered_at_once(software: Software, update: Update) -> int:
    """How many times the weights of a block take memory if the software or the plan gathers them together; 0 if each is
    gathered separately.

    With coalesced all-gathers of a plan: the weights, and the buffer of the all-gather; later their gradients, which
    wait for each other, and the buffer of their reduction, both in the dtype of the reduction. With prefetch: the
    weights of the block, the buffer of the next one, the gradients, and the buffer of the previous ones; or without the
    weights of the block, but with the buffer in which its gradients are reduced.
    """
    if not update.by_block:
        return software.ahead
    wide = update.gradient_dtype == "fp32"
    if update.ahead:
        return 6 if wide else 4
    return 5 if wide else 2


def launch_seconds(cluster: Cluster) -> Seconds:
    """Seconds in which a host launches an operator of an update, for software for which this is known."""
    software = cluster.software
    return cluster.device.host_latency * software.host if software.counts_gradients else 0.0


def precision_of(tensor: TensorType, precision: str) -> str:
    """The precision in whose way a parameter is kept and updated: that of the plan, or that of its own dtype where a
    model has parameters of several dtypes."""
    if tensor.dtype == TRAINED[precision].weights:
        return precision
    return _PRECISION.get(tensor.dtype, precision)


def weight_bytes(tensor: TensorType, each: Bytes) -> Bytes:
    """Bytes of an element of a weight, if a weight that is trained has `each`."""
    return each if tensor.dtype in _PRECISION else tensor.element_bytes


def summed(tensor: TensorType, update: Update) -> TensorType:
    """A parameter in the dtype in which its gradient is accumulated, and reduced once a step."""
    return replace(tensor, dtype=update.summed_in(tensor.dtype))


def reduced(tensor: TensorType, update: Update) -> TensorType:
    """A parameter in the dtype in which the gradient of one use is reduced in its micro-batch."""
    return replace(tensor, dtype=update.reduced_in(tensor.dtype))
