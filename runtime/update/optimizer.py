"""The optimizer on one rank's pieces of its state.

Once per step, for every parameter:

    gradient layout ──sum, cut──> state layout ──update──> state layout ──gather──> weight layout

The gradients of a parameter that several pipeline stages use are summed over the stages before the update.
`runtime.update.reduction` has the reduction of gradients, `runtime.update.norms` their clipping.

The update is that of `runtime.optimizers.optimizers`: element by element, with norms of whole weights, or on gathered
whole matrices, so it is exact on pieces. It updates the *master*: the weight in the layout of the state and in float32,
or in the weight's own dtype if the plan has no master weights. Where the weight is float32 and the state only cuts it
finer (or not at all), the master is a view of the weight and costs no memory. An offloaded weight has a separate
master, and is written to its offload storage (`runtime.offload.weights`).

Where states are sharded by whole parameters (`planner.plan.layout.parameter_owners`) only the owner of a parameter has
its master and moments. It updates the weight, and broadcasts it to the replicas after all of its updates. Gradients are
all-reduced as without owners, so norms, and code that reads gradients, do not change. If the owners are parameter
servers, gradient, master and moments are on their hosts, which update them.

Offloaded states are fetched one after the other, each for its update and the gather of its weight
(`runtime.offload.optimizer_states`); states on the device are updated while the first of them are fetched.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.matrix_groups import MatrixGroup, matrix_groups
from planner.plan.layout.narrow_updates import updated_in_chunks
from planner.plan.layout.offloaded import visiting_order
from planner.plan.layout.parameter_owners import Broadcast, broadcasts_of, owners_of
from planner.plan.layout.per_step_communication import gathering_buckets
from planner.sharding.buckets import Bucket
from planner.sharding.matrices import optimizer_of
from planner.sharding.redistribute import COLLECTIVES, Step, redistribution
from runtime.comm.async_collectives import Flight
from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import apply_steps, convert
from runtime.offload.optimizer_states import MASTER, OffloadedStates
from runtime.offload.storage import Outside, on_host
from runtime.offload.weights import OffloadedWeights
from runtime.optimizers.muon import Together, iterated_dtype
from runtime.optimizers.narrow import wide_dtype
from runtime.optimizers.optimizers import (
    OptimizerSettings,
    every_moment,
    kept_of,
    make_optimizer,
    moments_of,
    start_moments,
    updates_at_once,
)
from runtime.parameters.shards import LocalParameter
from runtime.update.norms import clip, global_norm, norm_dtype, whole_squares
from runtime.update.reduction import Reduction
from runtime.waiting import waiting_for


@dataclass(frozen=True, slots=True, kw_only=True)
class _Master:
    """This rank's piece of a weight in the layout of the state, whether it is a view of the kept weight, and whether it
    is on the host (for parameter servers)."""

    parameter: LocalParameter
    weight: torch.Tensor
    view: bool
    hosted: bool = False

    @property
    def derived(self) -> bool:
        """Whether it can be computed from the kept weight without loss."""
        return self.weight.dtype == self.parameter.piece.dtype

    @property
    def stays(self) -> bool:
        """Whether it only has to be rounded to become the kept weight, on the same device."""
        parameter, stored = self.parameter, self.parameter.stored
        apart = self.hosted or self.view or parameter.offloaded is not None
        return not apart and stored.state == stored.weight


class ShardedOptimizer:
    """Updates the trainable parameters of one rank. Building it and `step` are collective."""

    def __init__(
        self,
        bound: BoundPlan,
        parameters: Mapping[str, LocalParameter],
        settings: OptimizerSettings,
        place: RankMesh,
        arrivals: Mapping[str, int],
        outside: Outside | None = None,
        weight_offload: OffloadedWeights | None = None,
    ) -> None:
        training = bound.plan.training
        self._place, self._update = place, training.update
        self._trainable = {name: parameter for name, parameter in parameters.items() if parameter.trainable}
        self.reduction = Reduction(bound, self._trainable, place, arrivals)
        self._norm: torch.Tensor | None = None
        self._norm_dtype = norm_dtype(bound.graph)
        self._renews = not bound.plan.schedule_kind.flushes  # the old weight is still in use
        self.moments = every_moment(training.optimizer, settings)  # optimizer states per element, after an update
        self._moment_dtype = training.update.moment_dtype
        self._chunked = {name for name in self._trainable if updated_in_chunks(bound, name)}
        self._moments = {
            name: moments_of(optimizer_of(bound.graph, training.optimizer, name), settings) for name in self._trainable
        }
        self.updates = 0  # number of completed updates
        self._offloaded = OffloadedStates(
            self.moments, place.device, outside or Outside(), training.update.moment_dtype
        )
        self._outward = weight_offload  # writes new weights to their offload storage
        self._at_once = updates_at_once(training.optimizer, place.device.type, settings)
        self._visiting = visiting_order(bound, self._trainable)
        owners, servers = owners_of(bound, self._trainable), self.reduction.servers
        self._broadcasts = broadcasts_of(bound, owners)
        own = [p for n, p in self._trainable.items() if n not in owners or owners[n].at(place.coordinate)]
        self._masters = [
            _master(p, place, training.update.master_weights, apart=self._renews, hosted=p.name in servers)
            for p in own
            if not p.stored.offloaded
        ]
        self._visitors = {name: self._offload(self._trainable[name], bound, settings) for name in self._visiting}
        self._gathered = gathering_buckets(bound, self._trainable.keys())
        weights = [master.weight for master in self._masters]
        names = [master.parameter.name for master in self._masters]
        total = whole_squares(own, place)
        groups = matrix_groups(bound, self._trainable.keys(), place.coordinate)
        places = {name: at for at, name in enumerate(names)}
        together = [_together(group, self._trainable, places, place) for group in groups]
        self._optimizer = (
            make_optimizer(training.optimizer, weights, settings, total, names, together, self._moment_dtype)
            if weights
            else None
        )

    def _offload(self, parameter: LocalParameter, bound: BoundPlan, settings: OptimizerSettings) -> _Master:
        """A master whose state is offloaded at once, so that two of them are never on the device together."""
        training, stored = bound.plan.training, parameter.stored
        master = _master(parameter, self._place, training.update.master_weights, apart=self._renews)
        optimizer = make_optimizer(
            training.optimizer, [master.weight], settings, names=[parameter.name], moment_dtype=self._moment_dtype
        )
        self._offloaded.offload(parameter.name, master.weight, optimizer, stored.state_home, own=not master.view)
        return master

    def states(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the device between steps beside the weights: masters that are no views of them, and the
        optimizer's states. Complete after the first step."""
        return self._states(hosted=False)

    def _states(self, *, hosted: bool) -> tuple[torch.Tensor, ...]:
        masters = [master for master in self._masters if master.hosted == hosted]
        kept = [] if self._optimizer is None else kept_of(self._optimizer)
        moments = [
            value
            for master, state in zip(self._masters, kept, strict=False)
            if master.hosted == hosted
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        ]
        return (*(master.weight for master in masters if not master.view), *moments)

    def kept(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The same with kind and parameter name, including offloaded tensors at their location; only masters that are
        wider than their weights, because others can be computed from the weights."""
        for master in self._masters:
            if not master.derived:
                yield "master", master.parameter.name, master.weight
        if self.updates and self._optimizer is not None:
            for master, kept in zip(self._masters, kept_of(self._optimizer), strict=True):
                name = master.parameter.name
                yield from ((kind, name, kept[kind]) for kind in self._moments[name])
        for name, visitor in self._visitors.items():
            for kind, tensor in self._offloaded.parts(name).items():
                if not visitor.derived if kind == MASTER else self.updates:
                    yield kind, name, tensor

    def start(self, updates: int) -> None:
        """Allocate the states after `updates` updates."""
        self.updates = updates
        if self._optimizer is not None:
            weights = [master.weight for master in self._masters]
            moments = [self._moments[master.parameter.name] for master in self._masters]
            start_moments(self._optimizer, weights, moments, updates, self._moment_dtype)
        self._offloaded.start(updates)

    @torch.no_grad()
    def settle(self, every: bool = False) -> None:
        """Compute masters from their weights, which have been written: those that can be computed without loss, or
        every one."""
        for master in self._masters:
            if (every or master.derived) and not master.view:
                master.weight.copy_(_in_layout_of_state(master.parameter, self._place))
        for name, visitor in self._visitors.items():
            own = self._offloaded.parts(name).get(MASTER)
            if (every or visitor.derived) and own is not None:
                own.copy_(_in_layout_of_state(visitor.parameter, self._place))

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """What is kept off the device: bytes of offloaded states, and the states of parameter servers."""
        return (*self._offloaded.rows, *self._states(hosted=True))

    @property
    def norm(self) -> float | None:
        """The global norm of the gradients of the last step, before clipping; None where nothing is clipped."""
        return None if self._norm is None else float(self._norm)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate from the next step on."""
        own = () if self._optimizer is None else (self._optimizer,)
        for optimizer in (*own, *self._offloaded.optimizers):
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _read(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient in the form that the update reads: contiguous for a fused kernel."""
        if name not in self._chunked:
            gradient = gradient.to(wide_dtype(self._trainable[name].piece.dtype))
        return gradient.contiguous() if self._at_once else gradient

    @torch.no_grad()
    def step(self, accept: Callable[[Iterable[torch.Tensor]], bool] = lambda gradients: True) -> bool:
        """Reduce the gradients, clip them, update, bring the new weights to their stored layout, and drop the
        gradients. If `accept`, which is collective, rejects the reduced gradients, they are dropped and nothing else
        happens; returns whether it accepted them."""
        gradients = self.reduction.finish()
        if not accept(gradients.values()):
            return False
        if self._update.clip_norm is not None:
            norm = global_norm(gradients, self._trainable, self._place, self.reduction.servers, self._norm_dtype)
            clip(gradients, norm, self._update.clip_norm)
            self._norm = norm
        self.updates += 1
        if self._renews:
            for parameter in self._trainable.values():
                parameter.renew()
        publication = _Publication(self._gathered, self._place, self._outward, self.reduction.cross)

        def stayed() -> None:
            for master in self._masters:
                name = master.parameter.name
                master.weight.grad = self._read(name, gradients.pop(name))
            if self._optimizer is not None:
                self._optimizer.step()
            for master in self._masters:
                master.weight.grad = None

        if not self._offloaded:
            stayed()
        else:
            wide = {name: lambda name=name: self._read(name, gradients.pop(name)) for name in self._visiting}
            self._offloaded.step(self._visiting, wide, lambda name: publication.visited(self._visitors[name]), stayed)
        publication.end(self._masters)
        for broadcast in self._broadcasts:
            _send(broadcast, [self._trainable[name].piece.detach() for name in broadcast.names], self._place)
        return True


class _Publication:
    """Copies the updated masters into the kept weights of every rank: those of a bucket together, the others one by
    one. Collective, in the same order on every rank."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        place: RankMesh,
        outward: OffloadedWeights | None,
        pulled: Callable[[str, torch.Tensor], None],
    ) -> None:
        self._place, self._outward, self._pulled = place, outward, pulled
        self._waiting = {name: bucket for bucket in buckets for name in bucket.names}
        self._updated: dict[str, tuple[_Master, torch.Tensor]] = {}
        self._landed: set[str] = set()

    def visited(self, master: _Master) -> None:
        """Publish a master that will soon be offloaded again."""
        bucket = self._waiting.get(master.parameter.name)
        if bucket is None:
            self._alone(master)
            return
        self._give(master, copied=True)
        if all(name in self._updated for name in bucket.names):
            self._land(bucket)

    def end(self, masters: Sequence[_Master]) -> None:
        """Publish the masters on the device, and finish."""
        for master in masters:
            if master.parameter.name in self._waiting:
                self._give(master, copied=False)
        for bucket in dict.fromkeys(self._waiting.values()):
            self._land(bucket)
        alone = [master for master in masters if master.parameter.name not in self._landed]
        written = [master for master in alone if master.stays]
        if written:  # few kernels for all of them
            torch._foreach_copy_(
                [master.parameter.piece.detach() for master in written], [master.weight for master in written]
            )
        for master in alone:
            if not master.stays:
                self._alone(master)
        if self._outward is not None:
            self._outward.let_go()

    def _alone(self, master: _Master) -> None:
        """Write one updated master into the kept weight of every rank."""
        parameter, stored = master.parameter, master.parameter.stored
        if master.view and stored.state == stored.weight:
            return
        updated = master.weight.to(parameter.piece.dtype, copy=parameter.offloaded is not None)
        if master.hosted:
            self._pulled(parameter.name, updated)
        self._write(parameter, convert(updated, parameter.shape, stored.state, stored.weight, self._place))

    def _write(self, parameter: LocalParameter, weight: torch.Tensor) -> None:
        if parameter.offloaded is None:
            parameter.piece.detach().copy_(weight)
        else:
            assert self._outward is not None, parameter.name
            self._outward.write(parameter.offloaded, weight.contiguous())

    def _give(self, master: _Master, *, copied: bool) -> None:
        self._updated[master.parameter.name] = master, master.weight.to(master.parameter.piece.dtype, copy=copied)

    def _land(self, bucket: Bucket) -> None:
        masters = [self._updated[name][0] for name in bucket.names]
        pieces = [self._updated.pop(name)[1] for name in bucket.names]
        steps = [member.steps for member in bucket.members]
        whole = Flight(steps, pieces, self._place, self._place.groups).land()  # frees the pieces after this call
        for master, weight in zip(masters, whole, strict=True):
            self._write(master.parameter, weight)
            del self._waiting[master.parameter.name]
            self._landed.add(master.parameter.name)


def _send(broadcast: Broadcast, weights: Sequence[torch.Tensor], place: RankMesh) -> None:
    """Broadcast the owner's contents of these weights to all replicas, in place, axis by axis: after the last axis
    every device has the owner's contents, whatever ranks that are not on the owner's lines have sent before.
    Collective."""
    lone = len(weights) == 1
    sent = weights[0] if lone else torch.cat([weight.reshape(-1) for weight in weights])
    for axis, source in zip(broadcast.owner.axes, broadcast.owner.place, strict=True):
        waiting_for(partial(dist.broadcast, sent, group=place.group(axis), group_src=source))
    if not lone:
        for weight, new in zip(weights, torch.split(sent, [weight.numel() for weight in weights]), strict=True):
            weight.copy_(new.view(weight.shape))


def _master(parameter: LocalParameter, place: RankMesh, widened: bool, *, apart: bool, hosted: bool = False) -> _Master:
    weight, steps = _in_layout_of_state(parameter, place), _to_state(parameter, place)
    wide = wide_dtype(weight.dtype) if widened else weight.dtype
    apart = apart or hosted or parameter.offloaded is not None
    own = any(step.kind in COLLECTIVES or step.padding for step in steps)  # then on all ranks alike
    view = not apart and wide == weight.dtype and not own
    weight = weight.detach() if view else weight.to(wide, copy=True).contiguous()
    weight = on_host(weight) if hosted else weight
    weight.grad_dtype = None  # as it is reduced, or float32
    return _Master(parameter=parameter, weight=weight, view=view, hosted=hosted)


def _together(
    group: MatrixGroup, parameters: Mapping[str, LocalParameter], places: Mapping[str, int], place: RankMesh
) -> Together:
    """A group of weights that Muon updates together, by their `places` among all weights of this rank."""
    stack, own = group.stack, [parameters[name] for name in group.names]
    shape = stack.tensor.shape
    return Together(
        places=tuple(places[name] for name in group.names),
        shapes=tuple((one.own_shape[-2], one.own_shape[-1]) for one in own),
        dtype=iterated_dtype(own[0].piece.dtype),
        size=stack.size,
        gather=lambda pieces: convert(pieces, shape, stack.pieces, stack.wholes, place),
        cut=lambda whole: convert(whole, shape, stack.wholes, stack.pieces, place),
    )


def _to_state(parameter: LocalParameter, place: RankMesh) -> tuple[Step, ...]:
    stored = parameter.stored
    return redistribution(parameter.shape, place.mesh, stored.weight, stored.state)


def _in_layout_of_state(parameter: LocalParameter, place: RankMesh) -> torch.Tensor:
    """This rank's piece of the weight in the layout of the state; may be a view of it."""
    return apply_steps(parameter.present, _to_state(parameter, place), place)
