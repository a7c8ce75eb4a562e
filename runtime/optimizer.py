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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from planner.plan.bind import BoundPlan
from planner.plan.once import gathering_buckets
from planner.plan.plan import ASYNCHRONOUS
from planner.sharding.redistribute import COLLECTIVES, redistribution
from runtime.device_mesh import RankMesh
from runtime.flight import Flight
from runtime.norms import clip, global_norm, whole_squares
from runtime.optimizers import OptimizerSettings, make_optimizer, wide_dtype
from runtime.parameters import LocalParameter
from runtime.redistribute import apply_steps, convert
from runtime.reduction import Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Master:
    """This rank's piece of a weight in the layout of the state, and whether it is a view of the kept weight."""

    parameter: LocalParameter
    weight: torch.Tensor
    view: bool


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

    def states(self) -> tuple[torch.Tensor, ...]:
        """What is kept between steps beside the weights: masters that are no views of them, and what the optimizer
        keeps for each element. Complete after the first step."""
        masters = [master.weight for master in self._masters if not master.view]
        kept = self._optimizer.state.values() if self._optimizer is not None else ()
        moments = [value for state in kept for value in state.values() if isinstance(value, torch.Tensor)]
        return (*masters, *(moment for moment in moments if moment.dim()))

    @property
    def norm(self) -> float | None:
        """The global norm of the gradients of the last step before they were clipped; None where nothing is clipped."""
        return None if self._norm is None else float(self._norm)

    def set_learning_rate(self, rate: float) -> None:
        """The learning rate from the next step on."""
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group["lr"] = rate

    @torch.no_grad()
    def step(self, accept: Callable[[Iterable[torch.Tensor]], bool] = lambda gradients: True) -> bool:
        """Reduce the gradients, clip them, update, bring the new weights to the layout in which they are kept, and drop
        the gradients. Where `accept`, which is collective, does not take the reduced gradients, they are dropped and
        nothing else happens; returns whether it took them."""
        gradients = self.reduction.finish()
        if not accept(gradients.values()):
            return False
        if self._update.clip_norm is not None:
            norm = global_norm(gradients, self._trainable, self._place)
            clip(gradients, norm, self._update.clip_norm)
            self._norm = norm
        for master in self._masters:
            gradient = gradients.pop(master.parameter.name)
            master.weight.grad = gradient.to(wide_dtype(master.weight.dtype))
        if self._optimizer is not None:
            self._optimizer.step()
        for master in self._masters:
            master.weight.grad = None
        self._publish()
        return True

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
    stored, piece = parameter.stored, parameter.piece.detach()
    steps = redistribution(parameter.shape, place.mesh, stored.weight, stored.state)
    weight = apply_steps(piece, steps, place)
    wide = wide_dtype(weight.dtype) if widened else weight.dtype
    view = not apart and wide == weight.dtype and not any(step.kind in COLLECTIVES for step in steps)
    weight = weight.detach() if view else weight.to(wide, copy=True).contiguous()
    weight.grad_dtype = wide_dtype(weight.dtype)
    return _Master(parameter=parameter, weight=weight, view=view)


def _publish(master: _Master, place: RankMesh) -> None:
    """Write one updated master into the kept weight of every rank."""
    parameter = master.parameter
    stored, piece = parameter.stored, parameter.piece.detach()
    if master.view and stored.state == stored.weight:
        return
    piece.copy_(convert(master.weight.to(piece.dtype), parameter.shape, stored.state, stored.weight, place))
