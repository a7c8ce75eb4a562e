"""One rank's share of the training step that a plan describes.

With pipeline stages a rank computes its stage of every micro-batch in the 1F1B order (see `runtime.pipeline`).
One step: for each micro-batch take this rank's part of the inputs, run forward and backward, and add up gradients;
then reduce the gradients once, update, and bring the weights back to where they are kept. The loss is the mean of
the losses of the micro-batches.
"""

import torch
from torch import nn

from planner.plan.bind import BoundPlan
from runtime.device_mesh import RankMesh
from runtime.executor import Executor, build_executor
from runtime.inputs import Inputs
from runtime.optimizer import OptimizerSettings, ShardedOptimizer
from runtime.parameters import local_parameters, unused_parameters, whole_buffers
from runtime.pipeline import build_pipeline, cut_stage, share_parameters


class RankStep:
    """What one rank computes in a step. Every method is collective."""

    def __init__(
        self,
        module: nn.Module,
        bound: BoundPlan,
        place: RankMesh,
        settings: OptimizerSettings,
    ) -> None:
        self.bound = bound
        self.place = place
        self.cuts = tuple(cut_stage(bound, stage) for stage in range(place.stages))
        self.cut = self.cuts[place.stage]
        self.executor: Executor = build_executor(bound, place, self.cut)
        held = self.cut.parameters | (unused_parameters(bound) if place.stage == 0 else frozenset())
        self.parameters = local_parameters(module, bound, place, held)
        self.buffers = whole_buffers(module, bound.graph, place.device)
        self.pipeline = build_pipeline(bound, place, self.cut) if place.stages > 1 else None
        self.reads = frozenset(
            name for at in self.cut.operators for name in bound.graph.operators[at].operands if name in bound.inputs
        )  # inputs that an operator of this stage reads
        share_parameters(self.parameters, place, self.cuts)
        self.optimizer = ShardedOptimizer(
            bound.plan.training.optimizer, list(self.parameters.values()), settings, place
        )

    def __call__(self, inputs: Inputs, learning_rate: float) -> float:
        """Train on one global batch, of which `inputs` gives the pieces of this rank; returns the mean loss."""
        loss = self.accumulate(inputs)
        self.optimizer.set_learning_rate(learning_rate)
        self.optimizer.step()
        return float(loss)

    def accumulate(self, inputs: Inputs) -> torch.Tensor:
        """Forward and backward of all micro-batches: adds to the gradients, changes no weight. Returns the mean
        loss."""
        parts = self.bound.plan.training.micro_batches
        if self.pipeline is not None:
            return self.pipeline.run(
                lambda part, received: self.executor(self.parameters, self.buffers, {**inputs(part), **received}), parts
            )
        total = torch.zeros((), dtype=torch.float32, device=self.place.device)
        for part in range(parts):
            loss = self.executor(self.parameters, self.buffers, inputs(part))[self.bound.graph.loss]
            if loss.requires_grad:
                torch.autograd.backward(loss, torch.full_like(loss, 1.0 / parts))
            total += loss.detach().float().reshape(()) / parts
        return total

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """The whole weights by name, gathered from all ranks; tied weights under their first name."""
        return self._everywhere({name: parameter.whole(self.place) for name, parameter in self.parameters.items()})

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradients of the trainable parameters accumulated since the last update, summed over all ranks."""
        trainable = {name: parameter for name, parameter in self.parameters.items() if parameter.trainable}
        return self._everywhere({name: parameter.whole_gradient(self.place) for name, parameter in trainable.items()})

    def _everywhere(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What each stage holds, on every rank."""
        if self.pipeline is None:
            return held
        every: list[dict[str, torch.Tensor]] = [{}] * self.place.stages
        cpu = {name: tensor.cpu() for name, tensor in held.items()}
        torch.distributed.all_gather_object(every, cpu, group=self.pipeline.neighbours.forward)
        return {name: tensor for stage in every for name, tensor in stage.items()}
