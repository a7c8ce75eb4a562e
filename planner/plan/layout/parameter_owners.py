"""Optimizer states shared out by whole parameters: one of the data-parallel replicas of a weight owns its state.

    gradients   g g g g    all-reduced, as without ZeRO
    states      . A . .    the owner of a parameter updates it ...
    weights     w w w w    ... and broadcasts the new weight along every axis that has copies

ZeRO-1 cuts a state along a dim that the devices divide, and gathers the pieces of new weights; here nothing has to
divide (`ZeroRedundancyOptimizer` of PyTorch, OSS of fairscale). It applies to parameters
whose state is cut like the weight, on the axes where both are whole and the gradient is a sum (`R`, `P`, `R`); states
that are cut finer stay as they are cut.

Owners are chosen for each pipeline rank: parameters in order of size, the largest first, go to the device with the
least so far (Graham 1969, longest processing time first: the fullest device has at most 4/3 of the optimum). Then
places are swapped, axis by axis, so that the fullest device is the one in the middle of the mesh, which stands for all
devices in the memory account. O(P D) for P parameters and D devices of a stage.

Where owners are parameter servers (`Update.served`) they keep state and master weight on the host of their device, and
a gradient is reduced to its owner alone:

    gradients   g g g g    pushed: a reduce along every axis that has copies, to the device of the server ...
    states      . A . .    ... and over its link to the host, where the server updates the parameter ...
    weights     w w w w    ... whose new weight is pulled: over the link back, and broadcast as above

A parameter that several pipeline ranks hold has its server at the same place in all of them, in the middle of the mesh,
because only there are the sums of its gradients when the ranks add them up.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hardware_profiles import Seconds
from planner.errors import PlanFileError
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.shared_parameters import shared_parameters
from planner.pricing.message import Message
from planner.sharding.buckets import arrival_order, bucket_place, trainable_positions
from planner.sharding.layout import Layout, local_share
from planner.sharding.redistribute import Step
from planner.sharding.stored import owned_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of the state of a parameter: the devices at these coordinates of these axes of the mesh."""

    axes: tuple[int, ...]
    place: tuple[int, ...]

    def at(self, coordinate: Sequence[int]) -> bool:
        """Whether the device at a coordinate of the mesh is an owner."""
        return all(coordinate[axis] == place for axis, place in zip(self.axes, self.place, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """New weights of one owner that share a message: their names, their dtype, and the bytes of the message, which is
    sent along one axis of the owner after the other."""

    owner: Owner
    names: tuple[str, ...]
    dtype: str
    nbytes: float

    @property
    def flat(self) -> float:
        """Bytes of the buffer for several weights; a single one is sent from where it lies."""
        return self.nbytes if len(self.names) > 1 else 0.0

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(Message(kind="broadcast", axis=axis, nbytes=self.nbytes) for axis in self.owner.axes)


def owners_of(bound: BoundPlan, held: Collection[str]) -> Mapping[str, Owner]:
    """Owners of the parameters of a pipeline rank whose states are shared out whole, the same on every rank; empty
    where the plan has none."""
    if not bound.plan.training.update.owned:
        return {}
    axes = {name: _axes(bound, name) for name in arrival_order(bound.graph) if name in held}
    shared = {name: own for name, own in axes.items() if own}
    if not shared:
        return {}
    mesh = bound.plan.mesh
    middle = mesh.coordinate(mesh.size // 2)
    fixed = shared_parameters(bound) & shared.keys() if bound.plan.training.update.served else frozenset()
    numel = {name: _numel(bound, name) for name in shared}
    loads = np.zeros(mesh.sizes)
    places: dict[str, tuple[int, ...]] = {}
    for name in sorted(shared, key=lambda name: (name not in fixed, -numel[name])):
        others = tuple(axis for axis in range(len(mesh.sizes)) if axis not in shared[name])
        fullest = loads.max(axis=others) if others else loads
        place = tuple(int(at) for at in np.unravel_index(int(fullest.argmin()), fullest.shape))
        places[name] = tuple(middle[axis] for axis in shared[name]) if name in fixed else place
        whole = dict(zip(shared[name], places[name], strict=True))
        loads[tuple(whole.get(axis, slice(None)) for axis in range(len(mesh.sizes)))] += numel[name]
    full = np.unravel_index(int(loads.argmax()), loads.shape)
    swaps = [{int(one): other, other: int(one)} for one, other in zip(full, middle, strict=True)]
    return {
        name: Owner(
            axes=own,
            place=places[name]
            if name in fixed
            else tuple(swaps[axis].get(at, at) for axis, at in zip(own, places[name], strict=True)),
        )
        for name, own in shared.items()
    }


def longest_wait(
    owners: Mapping[str, Owner], seconds: Mapping[str, Seconds], sizes: Sequence[int], coordinate: Sequence[int]
) -> Seconds:
    """How long the device at a coordinate of the mesh waits for the one whose updates take longest, given the seconds
    of each update."""
    taken = np.zeros(tuple(sizes))
    for name, owner in owners.items():
        place = dict(zip(owner.axes, owner.place, strict=True))
        taken[tuple(place.get(axis, slice(None)) for axis in range(len(sizes)))] += seconds[name]
    return float(taken.max() - taken[tuple(coordinate)])


def pushes_of(bound: BoundPlan, name: str, owner: Owner) -> tuple[Step, ...]:
    """The redistribution of a gradient to the server that owns its parameter."""
    share = _share(bound, name, bound.parameters[name].weight)
    return tuple(
        Step(kind="reduce", axis=axis, fraction=share, root=place)
        for axis, place in zip(owner.axes, owner.place, strict=True)
    )


def broadcasts_of(bound: BoundPlan, owners: Mapping[str, Owner]) -> tuple[Broadcast, ...]:
    """The messages of new weights: those of one owner in the buckets of the plan, or each weight by itself."""
    buckets, positions = bound.plan.training.update.buckets, trainable_positions(bound.graph)
    size = buckets if isinstance(buckets, int) else math.inf
    found: list[Broadcast] = []
    open_: dict[object, list[str]] = {}
    filled: dict[object, float] = {}

    def close(key: object) -> None:
        names = tuple(open_.pop(key))
        dtype = bound.graph.types[names[0]].dtype
        found.append(Broadcast(owner=owners[names[0]], names=names, dtype=dtype, nbytes=filled.pop(key)))

    for name, owner in owners.items():
        tensor = bound.graph.types[name]
        nbytes = weight_bytes(bound, name)
        place = bucket_place(name, buckets, positions[name]) if buckets != "none" else None
        key: object = (owner, tensor.dtype, name if place is None else (place,))
        if key in open_ and filled[key] + nbytes > size:
            close(key)
        open_.setdefault(key, []).append(name)
        filled[key] = filled.get(key, 0.0) + nbytes
    for key in list(open_):
        close(key)
    return tuple(found)


def weight_bytes(bound: BoundPlan, name: str) -> float:
    """Bytes of a weight on a device."""
    return bound.graph.types[name].nbytes * _share(bound, name, bound.parameters[name].weight)


def _axes(bound: BoundPlan, name: str) -> tuple[int, ...]:
    """The axes along which the state of a parameter has one owner."""
    update = bound.plan.training.update
    if update.is_local(name) or name not in bound.graph.consumers:
        return ()
    return owned_axes(bound.parameters[name], bound.plan.mesh.sizes)


def _numel(bound: BoundPlan, name: str) -> float:
    return bound.graph.types[name].numel * _share(bound, name, bound.parameters[name].state)


def _share(bound: BoundPlan, name: str, layout: Layout) -> float:
    return local_share(bound.graph.types[name].shape, layout, bound.plan.mesh.sizes)


def check_owners(bound: BoundPlan) -> None:
    """Raise PlanFileError where owners of whole parameters own none, or a plan offloads states that servers have."""
    update = bound.plan.training.update
    if not update.owned:
        return
    for name, stored in bound.parameters.items():
        if update.served and stored.offloaded:
            raise PlanFileError(
                f"parameter '{name}': its state is kept on the {stored.state_home}, and training.zero_by 'servers' has"
                " states on hosts already; set its state_home to device, or zero_by to slices"
            )
    if not owners_of(bound, bound.parameters):
        raise PlanFileError(
            f"training.zero_by: '{update.zero_by}' applies to no parameter: none has copies of weight and state on an"
            " axis that sums its gradient (weight R, gradient P, state R); set zero_by to slices, or change the layouts"
        )
