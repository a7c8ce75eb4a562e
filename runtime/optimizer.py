"""The optimizer on the pieces of its state that one rank keeps.

Once a step, for every parameter:

    gradient layout ──sum, cut──> state layout ──update──> state layout ──gather──> weight layout

A parameter that several pipeline stages use has its gradients summed over them before the update. How gradients are
reduced says `runtime.reduction`, how they are clipped `runtime.norms`.

The update is that of `runtime.optimizers`, element by element, or by norms of whole weights, so it is exact on pieces.
What it updates is the *master*: the weight in the layout of the state and in float32, or, where the plan wants no
master weights, in its own dtype. Where the weight is float32 and the state just cuts it finer
(or not at all), the master is a view of the weight and costs no memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from planner.plan.bind import BoundPlan
from planner.plan.once import gathering_buckets
from planner.plan.plan import ASYNCHRONOUS
from planner.sharding.redistribute import COLLECTIVES, Step, redistribution
from runtime.device_mesh import RankMesh
from runtime.flight import Flight
from runtime.norms import clip, global_norm, whole_squares
from runtime.optimizers import OptimizerSettings, kept_of, make_optimizer, moments_of, start_moments, wide_dtype
from runtime.parameters import LocalParameter
from runtime.redistribute import apply_steps, convert
from runtime.reduction import Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Master:
    """This rank's piece of a weight in the layout of the state, and whether it is a view of the kept weight."""

    parameter: LocalParameter
    weight: torch.Tensor
    view: bool

    @property
    def derived(self) -> bool:
        """Whether the kept weight says all that it does."""
        return self.weight.dtype == self.parameter.piece.dtype


class ShardedOptimizer:
    """Updates the trainable parameters of one rank. Building it and `step` are collective."""

    def __init__(
        self,
        bound: BoundPlan,
        parameters: Mapping[str, LocalParameter],
        settings: OptimizerSettings,
        place: RankMesh,
        arrivals: Mapping[str, int],
    ) -> None:
        training = bound.plan.training
        self._place, self._update = place, training.update
        self._trainable = {name: parameter for name, parameter in parameters.items() if parameter.trainable}
        self.reduction = Reduction(bound, self._trainable, place, arrivals)
        self._norm: torch.Tensor | None = None
        self._renews = bound.plan.schedule in ASYNCHRONOUS  # somebody still computes with the weight from before
        self._masters = [
            _master(p, place, training.update.master_weights, apart=self._renews) for p in self._trainable.values()
        ]
        self._gathered = gathering_buckets(bound, self._trainable.keys())
        weights = [master.weight for master in self._masters]
        total = whole_squares(list(self._trainable.values()), place)
        self._optimizer = make_optimizer(training.optimizer, weights, settings, total) if weights else None
        self.moments = moments_of(training.optimizer, settings)  # what is kept of every element, after an update
        self.updates = 0  # that were made

    def states(self) -> tuple[torch.Tensor, ...]:
        """What is kept between steps beside the weights: masters that are no views of them, and what the optimizer
        keeps for each element. Complete after the first step."""
        masters = [master.weight for master in self._masters if not master.view]
        kept = self._optimizer.state.values() if self._optimizer is not None else ()
        moments = [value for state in kept for value in state.values() if isinstance(value, torch.Tensor)]
        return (*masters, *(moment for moment in moments if moment.dim()))

    def kept(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The same with what it is and the parameter that it belongs to; of the masters only those that are wider than
        their weights, as the others can be derived."""
        for master in self._masters:
            if not master.derived:
                yield "master", master.parameter.name, master.weight
        if self.updates and self._optimizer is not None:
            for master, kept in zip(self._masters, kept_of(self._optimizer), strict=True):
                yield from ((kind, master.parameter.name, kept[kind]) for kind in self.moments)

    def start(self, updates: int) -> None:
        """Make room for what is kept after so many updates."""
        self.updates = updates
        if self._optimizer is not None:
            weights = [master.weight for master in self._masters]
            start_moments(self._optimizer, weights, self.moments, updates)

    @torch.no_grad()
    def settle(self, every: bool = False) -> None:
        """Derive from their weights, which have been written, the masters that can be derived without loss, or every
        one."""
        for master in self._masters:
            if (every or master.derived) and not master.view:
                master.weight.copy_(_in_layout_of_state(master.parameter, self._place))

    @property
    def norm(self) -> float | None:
        """The global norm of the gradients of the last step before they were clipped; None where nothing is clipped."""
        return None if self._norm is None else float(self._norm)

    def set_learning_rate(self, rate: float) -> None:
        """The learning rate from the next step on."""
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group["lr"] = rate

    @torch.no_grad()
    def step(self) -> None:
        """Reduce the gradients, clip them, update, bring the new weights to the layout in which they are kept, and drop
        the gradients."""
        gradients = self.reduction.finish()
        if self._update.clip_norm is not None:
            norm = global_norm(gradients, self._trainable, self._place)
            clip(gradients, norm, self._update.clip_norm)
            self._norm = norm
        for master in self._masters:
            gradient = gradients.pop(master.parameter.name)
            master.weight.grad = gradient.to(wide_dtype(master.weight.dtype))
        if self._optimizer is not None:
            self._optimizer.step()
        self.updates += 1
        for master in self._masters:
            master.weight.grad = None
        self._publish()

    def _publish(self) -> None:
        """Write the updated masters into the kept weights of every rank."""
        if self._renews:
            for parameter in self._trainable.values():
                parameter.renew()
        masters = {master.parameter.name: master for master in self._masters}
        for bucket in self._gathered:
            members = [masters.pop(name) for name in bucket.names]
            updated = [member.weight.to(member.parameter.piece.dtype) for member in members]
            steps = [member.steps for member in bucket.members]
            whole = Flight(steps, updated, self._place, self._place.groups).land()
            for member, weight in zip(members, whole, strict=True):
                member.parameter.piece.detach().copy_(weight)
        for master in masters.values():
            _publish(master, self._place)


def _master(parameter: LocalParameter, place: RankMesh, widened: bool, *, apart: bool) -> _Master:
    weight, steps = _in_layout_of_state(parameter, place), _to_state(parameter, place)
    wide = wide_dtype(weight.dtype) if widened else weight.dtype
    view = not apart and wide == weight.dtype and not any(step.kind in COLLECTIVES for step in steps)
    weight = weight.detach() if view else weight.to(wide, copy=True).contiguous()
    weight.grad_dtype = wide_dtype(weight.dtype)
    return _Master(parameter=parameter, weight=weight, view=view)


def _to_state(parameter: LocalParameter, place: RankMesh) -> tuple[Step, ...]:
    stored = parameter.stored
    return redistribution(parameter.shape, place.mesh, stored.weight, stored.state)


def _in_layout_of_state(parameter: LocalParameter, place: RankMesh) -> torch.Tensor:
    """This rank's piece of the weight in the layout of the state; may be a view of it."""
    return apply_steps(parameter.piece.detach(), _to_state(parameter, place), place)


def _publish(master: _Master, place: RankMesh) -> None:
    """Write one updated master into the kept weight of every rank."""
    parameter = master.parameter
    stored, piece = parameter.stored, parameter.piece.detach()
    if master.view and stored.state == stored.weight:
        return
    piece.copy_(convert(master.weight.to(piece.dtype), parameter.shape, stored.state, stored.weight, place))
