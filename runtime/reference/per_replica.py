"""The unsharded model for plans with per-replica operators, on one device: its graph, run as it is.

A module that is called sees whole batches. So where a plan has operators that each replica computes on its own samples,
it is compared with its graph on a mesh of one device: one operator after the other, and per-replica operators are
called once for each replica, on its samples. Nothing is sharded, moved or recomputed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.graph.forward_only import evaluating
from planner.graph.operator_graph import OperatorGraph
from planner.graph.tracing.constants import held_tensor
from planner.plan.binding.bind import BoundOperator, prepare
from planner.plan.plan import Plan
from planner.sharding.discover import with_rules
from planner.sharding.mesh import Mesh
from planner.sharding.per_replica import prepared_batch
from planner.sharding.rescale import rescale_batch
from planner.sharding.rule import derive_layouts
from planner.sharding.rules import rule_of
from runtime.comm.device_mesh import RankMesh
from runtime.ops.local.local_ops import LocalCall, local_call
from runtime.ops.randomness import Draw

Forward = Callable[[tuple[Any, ...], Mapping[str, Any], Draw], torch.Tensor]
"""Computes the loss of one micro-batch. In training mode buffers change."""


def forward_per_replica(
    module: nn.Module, plan: Plan, traced: OperatorGraph, batch: int, names: Sequence[str], place: RankMesh
) -> Forward | None:
    """A function that computes a micro-batch of the model. Its graph was traced with `batch` samples and has inputs of
    these `names` in the order of its arguments. None where every operator of the plan sees the whole batch."""
    update = plan.training.update
    if not update.per_replica:
        return None
    ruled = with_rules(traced, plan.rules)
    graph, _ = prepare(ruled, fp8=plan.training.fp8, replicated=update, batch=batch)
    whole = rescale_batch(graph, prepared_batch(update, batch), plan.training.part)
    trained, evaluated = _Program(graph=whole, place=place), _Program(graph=evaluating(whole), place=place)

    def forward(args: tuple[Any, ...], kwargs: Mapping[str, Any], draw: Draw) -> torch.Tensor:
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        program = trained if module.training else evaluated
        return program.loss(module, dict(zip(names, tensors, strict=True)), draw)

    return forward


@dataclass(kw_only=True)
class _Program:
    """A graph on one device."""

    graph: OperatorGraph
    place: RankMesh

    def __post_init__(self) -> None:
        known, device = self.place.known, self.place.device
        one = RankMesh(mesh=Mesh(axes=()), rank=0, device=device, groups=(), stage=0, stages=1, known=known)
        self._calls = [self._call(at, one) for at in range(len(self.graph.operators))]

    def _call(self, at: int, one: RankMesh) -> LocalCall:
        op = self.graph.operators[at]
        rule = rule_of(self.graph, op)
        bound = BoundOperator(operator=op, rule=rule, strategy=(), layouts=derive_layouts(rule, ()))
        return local_call(self.graph, bound, one)

    def loss(self, module: nn.Module, inputs: Mapping[str, torch.Tensor], draw: Draw) -> torch.Tensor:
        """Run it on a micro-batch."""
        buffers = {name: held_tensor(module, name, self.graph.constants) for name in self.graph.buffers}
        before = {name: tensor.to(self.place.device, copy=True) for name, tensor in buffers.items()}
        values = {**before, **dict(module.named_parameters()), **inputs}
        for op, call in zip(self.graph.operators, self._calls, strict=True):
            results = call([values[name] for name in op.operands], draw)
            values.update((name, made) for name, made in zip(op.results, results, strict=False) if name is not None)
        with torch.no_grad():
            for buffer, content in self.graph.updates:
                buffers[buffer].copy_(values[content])
        return values[self.graph.loss]
