"""The optimizer on the pieces of its state that one rank keeps.

Once a step, for every parameter:

    gradient layout ──sum, cut──> state layout ──update──> state layout ──gather──> weight layout

A parameter that several pipeline stages use has its gradients summed over them before the update.

The update is that of `torch.optim`, element by element, so it is exact on pieces. What it updates is the *master*:
the weight in the layout of the state and in float32. Where the weight is float32 and the state just cuts it finer
(or not at all), the master is a view of the weight and costs no memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from planner.errors import RequestError, unknown_name
from planner.sharding.redistribute import COLLECTIVES, redistribution
from runtime.collectives import all_reduce
from runtime.device_mesh import RankMesh
from runtime.parameters import LocalParameter
from runtime.redistribute import apply_steps, convert


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Hyperparameters; the defaults are those of torch.optim.AdamW. `momentum` is that of SGD."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    momentum: float = 0.9


def _adamw(weights: Sequence[torch.Tensor], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        list(weights),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )


def _sgd(weights: Sequence[torch.Tensor], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        list(weights), lr=settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


OPTIMIZERS: Mapping[str, Callable[[Sequence[torch.Tensor], OptimizerSettings], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}


def make_optimizer(name: str, weights: Sequence[torch.Tensor], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """torch's optimizer of that name over these tensors. Raises RequestError for a name that is not in `OPTIMIZERS`."""
    if name not in OPTIMIZERS:
        raise RequestError(unknown_name("optimizer", name, OPTIMIZERS))
    return OPTIMIZERS[name](weights, settings)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of all that an optimizer updates, from its next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Master:
    """This rank's piece of a weight in the layout of the state, and whether it is a view of the kept weight."""

    parameter: LocalParameter
    weight: torch.Tensor
    view: bool


class ShardedOptimizer:
    """Updates the trainable parameters of one rank. Building it and `step` are collective."""

    def __init__(
        self, name: str, parameters: Sequence[LocalParameter], settings: OptimizerSettings, place: RankMesh
    ) -> None:
        self._place = place
        self._masters = [_master(p, place) for p in parameters if p.trainable]
        weights = [master.weight for master in self._masters]
        self._optimizer = make_optimizer(name, weights, settings) if weights else None

    def states(self) -> tuple[torch.Tensor, ...]:
        """What is kept between steps beside the weights: masters that are no views of them, and what the optimizer
        keeps for each element. Complete after the first step."""
        masters = [master.weight for master in self._masters if not master.view]
        kept = self._optimizer.state.values() if self._optimizer is not None else ()
        moments = [value for state in kept for value in state.values() if isinstance(value, torch.Tensor)]
        return (*masters, *(moment for moment in moments if moment.dim()))

    def set_learning_rate(self, rate: float) -> None:
        """The learning rate from the next step on."""
        if self._optimizer is not None:
            set_learning_rate(self._optimizer, rate)

    @torch.no_grad()
    def step(self) -> None:
        """Reduce the gradients, update, bring the new weights to the layout in which they are kept, and drop the
        gradients."""
        for master in self._masters:
            parameter = master.parameter
            gradient = convert(
                parameter.local_gradient(),
                parameter.shape,
                parameter.stored.gradient,
                parameter.stored.state,
                self._place,
            )
            parameter.gradient = None
            if parameter.twins is not None:
                gradient = all_reduce(gradient, parameter.twins)
            master.weight.grad = gradient.to(master.weight.dtype)
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        for master in self._masters:
            _publish(master, self._place)


def _master(parameter: LocalParameter, place: RankMesh) -> _Master:
    stored, piece = parameter.stored, parameter.piece.detach()
    steps = redistribution(parameter.shape, place.mesh, stored.weight, stored.state)
    weight = apply_steps(piece, steps, place)
    wide = torch.promote_types(weight.dtype, torch.float32)
    view = wide == weight.dtype and not any(step.kind in COLLECTIVES for step in steps)
    return _Master(parameter=parameter, weight=weight if view else weight.to(wide, copy=True).contiguous(), view=view)


def _publish(master: _Master, place: RankMesh) -> None:
    """Write the updated master into the kept weight of every rank."""
    parameter = master.parameter
    stored, piece = parameter.stored, parameter.piece.detach()
    if master.view and stored.state == stored.weight:
        return
    piece.copy_(convert(master.weight.to(piece.dtype), parameter.shape, stored.state, stored.weight, place))
