"""The training step that a plan describes.

    step = parallelize(module, plan, (tokens, labels))
    loss = step(tokens, labels)              # the whole global batch, the same on every rank

With pipeline stages a rank computes its stage of every micro-batch in the 1F1B order (see `runtime.pipeline`).
One step: for each micro-batch take this rank's part of the inputs, run forward and backward, and add up gradients;
then reduce the gradients once, update, and bring the weights back to where they are kept. The loss is the mean of
the losses of the micro-batches.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.errors import RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.plan.bind import BoundPlan, bind
from planner.plan.plan import Plan
from planner.sharding.discover import prove, with_rules
from runtime.device_mesh import Communicators, RankMesh, current_device, rank_mesh
from runtime.executor import Executor, build_executor
from runtime.optimizer import OptimizerSettings, ShardedOptimizer
from runtime.parameters import local_parameters, unused_parameters, whole_buffers
from runtime.pipeline import build_pipeline, cut_stage, share_parameters
from runtime.redistribute import local_piece


class TrainingStep:
    """One rank's share of a training step. Make it with `parallelize`; every method is collective."""

    def __init__(
        self,
        module: nn.Module,
        bound: BoundPlan,
        place: RankMesh,
        settings: OptimizerSettings,
        batched: frozenset[str],
    ) -> None:
        self.bound = bound
        self.place = place
        self.batched = batched  # inputs whose leading dim is the samples
        self.cuts = tuple(cut_stage(bound, stage) for stage in range(place.stages))
        self.cut = self.cuts[place.stage]
        self.executor: Executor = build_executor(bound, place, self.cut)
        held = self.cut.parameters | (unused_parameters(bound) if place.stage == 0 else frozenset())
        self.parameters = local_parameters(module, bound, place, held)
        self.buffers = whole_buffers(module, bound.graph, place.device)
        self.pipeline = build_pipeline(bound, place, self.cut) if place.stages > 1 else None
        share_parameters(self.parameters, place, self.cuts)
        self.optimizer = ShardedOptimizer(
            bound.plan.training.optimizer, list(self.parameters.values()), settings, place
        )

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        """Train on one global batch, given in full on every rank as the arguments of the module; returns the mean
        loss."""
        loss = self.accumulate(*args, **kwargs)
        self.optimizer.step()
        return float(loss)

    def accumulate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of all micro-batches: adds to the gradients, changes no weight. Returns the mean
        loss."""
        parts = self.bound.plan.training.micro_batches
        inputs = self._micro_batches(args, kwargs)
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

    def _micro_batches(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[int], dict[str, torch.Tensor]]:
        """This rank's pieces of the inputs, by the number of the micro-batch."""
        graph, training = self.bound.graph, self.bound.plan.training
        given = dict(zip(graph.inputs, self._checked(tensors_of(args, kwargs)), strict=True))

        def inputs(part: int) -> dict[str, torch.Tensor]:
            found = {}
            for name, tensor in given.items():
                whole = _part(tensor, part, training.part) if name in self.batched else tensor
                found[name] = local_piece(whole, self.bound.inputs[name], self.place).to(self.place.device)
            return found

        return inputs

    def _checked(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        graph, training = self.bound.graph, self.bound.plan.training
        if len(given) != len(graph.inputs):
            raise RequestError(
                f"the model was traced with {len(graph.inputs)} input tensors, this batch has {len(given)}"
            )
        for name, tensor in zip(graph.inputs, given, strict=True):
            shape = graph.types[name].shape
            wanted = (training.global_batch, *shape[1:]) if name in self.batched else shape
            if tuple(tensor.shape) != wanted:
                raise RequestError(
                    f"input '{name}' has shape {tuple(tensor.shape)}; the plan takes {wanted}: a global batch of"
                    f" {training.global_batch} in {training.micro_batches} micro-batches of {training.part}"
                )
        return given


def parallelize(
    module: nn.Module,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch: int | None = None,
    traced: OperatorGraph | None = None,
    settings: OptimizerSettings | None = None,
    device: torch.device | None = None,
    known: Communicators | None = None,
) -> TrainingStep:
    """The training step of `plan` for `module`, whose real weights are taken over. Collective: every rank calls it.

    `args` and `kwargs` are the example inputs with which the module is traced, `batch` the samples in them (by
    default the leading dim of the first); `traced` is the graph where it is known already, `known` the process groups
    of an earlier step. The default process group must exist unless the plan is for one device.

    Raises RequestError for a plan for another number of devices or with virtual stages, PlanFileError for a plan for
    another model, RuleError for a rule of the plan that does not hold, ModelError for a model that cannot be traced or
    executed, PlannerError for one that cannot be cut into the stages of the plan.
    """
    if plan.virtual_stages > 1:
        raise RequestError(
            f"the plan has {plan.virtual_stages} virtual stages on each pipeline rank, which cannot be executed yet;"
            " plan with virtual_stages 1 to run it"
        )
    place = rank_mesh(plan.mesh, device or current_device(local_rank()), plan.pipeline, known)
    leading = tensors_of(args, kwargs or {})[0].shape[0] if batch is None else batch
    graph = trace(module, args, kwargs) if traced is None else traced
    batched = frozenset(name for name in graph.inputs if graph.types[name].shape[:1] == (leading,))
    bound = bind(plan, graph, leading)
    prove(with_rules(graph, plan.rules))
    return TrainingStep(module, bound, place, settings or OptimizerSettings(), batched)


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among nested arguments, in the order in which tracing numbers them."""
    return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]


def local_rank() -> int:
    """Number of this process on its node; 0 where nothing says otherwise."""
    return torch.distributed.get_node_local_rank(fallback_rank=0)


def _part(tensor: torch.Tensor, part: int, samples: int) -> torch.Tensor:
    """Micro-batch number `part`, of so many samples, of an input of the global batch."""
    return tensor.narrow(0, part * samples, samples)
