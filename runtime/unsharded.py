"""The plain model on one device, trained the way a plan is: what a distributed run is compared with.

Same micro-batches, same optimizer, same float32 master weights, but no graph, no layouts and no communication: the
module itself is called. It needs the memory of the whole model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.graph.returned import loss_in
from planner.plan.plan import Training
from runtime.optimizer import OptimizerSettings, make_optimizer


class UnshardedStep:
    """One training step of the plain module per call; `batched` has the positions of the inputs that have a sample
    dim."""

    def __init__(
        self, module: nn.Module, training: Training, settings: OptimizerSettings, batched: frozenset[int]
    ) -> None:
        self._module = module
        self._parts = training.micro_batches
        self._batched = batched
        self._weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._gradients: list[torch.Tensor | None] = [None] * len(self._weights)
        self._masters = [
            weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True) for weight in self._weights
        ]
        self._optimizer = make_optimizer(training.optimizer, self._masters, settings)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """The mean loss of the micro-batches, before the update."""
        total = 0.0
        for part in range(self._parts):
            part_args, part_kwargs = self._part((args, dict(kwargs)), part)
            loss = loss_in(self._module(*part_args, **part_kwargs)) / self._parts
            torch.autograd.backward(loss, torch.ones_like(loss))
            self._accumulate()
            total += float(loss.detach())
        self._update()
        return total

    def _part(self, arguments: Any, part: int) -> Any:
        leaves, spec = pytree.tree_flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for number, place in enumerate(places):
            if number in self._batched:
                leaves[place] = leaves[place].chunk(self._parts)[part]
        return pytree.tree_unflatten(leaves, spec)

    def _accumulate(self) -> None:
        for index, (weight, master) in enumerate(zip(self._weights, self._masters, strict=True)):
            if weight.grad is not None:
                new = weight.grad.to(master.dtype)
                known = self._gradients[index]
                self._gradients[index] = new if known is None else known + new
                weight.grad = None

    @torch.no_grad()
    def _update(self) -> None:
        for master, total in zip(self._masters, self._gradients, strict=True):
            master.grad = torch.zeros_like(master) if total is None else total
        self._optimizer.step()
        self._gradients = [None] * len(self._weights)
        for weight, updated in zip(self._weights, self._masters, strict=True):
            weight.copy_(updated)
