"""One rank of a plan of any size in this process: tensors without data, and no other ranks.

    plan for 1,024 devices ─> rank 517: the training step that it would run there, on fake tensors and a fake
                                        process group, which contains all other ranks in name only

The code that runs is the runtime itself, operator by operator and collective by collective, but nothing is computed or
sent (`FakeTensorMode` and the fake backend of PyTorch). No weights are needed: the graph knows their types.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import RequestError
from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.plan.binding.bind import bind
from planner.plan.plan import Plan
from planner.sharding.padded_batch import SAMPLE_WEIGHTS
from runtime.comm.device_mesh import rank_mesh
from runtime.offload.storage import Outside
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.parameters.fused import in_module
from runtime.step.inputs import InputPieces, Inputs
from runtime.step.step import RankStep


@contextmanager
def imitated_step(
    plan: Plan, traced: OperatorGraph, batch: int, rank: int, *, fused: bool = False
) -> Iterator[RankStep]:
    """The training step of one rank of `plan`, on fake tensors, inside the modes that make them.

    `traced` is the graph of the plan's model on `batch` samples; `fused`: one kernel updates all weights, as on an
    accelerator. Raises RequestError where this process is part of a real group already, and what `runtime.parallelize`
    raises for the plan.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RequestError("this process belongs to a process group; audit in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=plan.cluster.devices, store=FakeStore())
    try:
        with FakeTensorMode():
            place = rank_mesh(plan.mesh, torch.device("cpu"), plan.pipeline)
            bound = bind(plan, traced, batch)
            module, settings = _Imitation(bound.whole), OptimizerSettings(fused=fused)
            batched, outside = traced.batched_inputs(batch), Outside(pretended=True)
            step = RankStep(module, bound, place, settings, batched, check_layouts=False, outside=outside)
            step.pipeline.has_gone = lambda _: True  # the fake backend waits for nothing and never reports it
            step.pipeline.paired = frozenset()  # these modes are of one thread; what is sent and computed is the same
            yield step
    finally:
        dist.destroy_process_group()


def imitated_inputs(step: RankStep, traced: OperatorGraph, batch: int) -> Inputs:
    """This rank's pieces of a global batch without data, for an imitated step; call it inside the step's modes."""
    graph, samples = step.bound.whole, step.bound.plan.training.global_batch
    batched = traced.batched_inputs(batch)
    given = {
        name: _like(replace(tensor, shape=(samples, *tensor.shape[1:])) if name in batched else tensor)
        for name, tensor in ((name, graph.types[name]) for name in graph.inputs if name != SAMPLE_WEIGHTS)
    }
    return InputPieces(bound=step.bound, place=step.place, batched=batched, reads=step.reads).of_whole(given)


class _Imitation(nn.Module):
    """A module that has only the parameters and buffers of a graph, under their names."""

    def __init__(self, graph: OperatorGraph) -> None:
        super().__init__()
        parts = {p.name: _like(graph.types[p.name]) for p in graph.parameters}
        trained = {p.in_module for p in graph.parameters if p.trainable}
        self._weights = {
            name: nn.Parameter(whole, name in trained) for name, whole in in_module(parts, graph.cuts).items()
        }
        self._held = {name: _like(graph.types[name]) for name in graph.buffers}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._weights.items()

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._held.items()


def _like(tensor: TensorType) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return torch.empty(tensor.shape, dtype=dtype)
