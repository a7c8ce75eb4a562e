"""What the workers do in the tests of the peak of a process."""

import gc
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import planner
from hardware_profiles import load_profile
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.llama import Llama
from planner.plan.binding.bind import bind
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict
from runtime.checkpoint.saving import Checkpoints
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.step.training_step import parallelize
from tests.distributed import plans
from tests.distributed.allocated import Allocated
from tests.distributed.tasks import CPU, known

WORDS, LENGTH = 2048, 512
CONFIG = replace(plans.LLAMA, hidden_size=128, ffn_size=256, vocab_size=WORDS, sequence_length=LENGTH)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Llama(CONFIG)


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(WORDS, (samples, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@cache
def graph() -> OperatorGraph:
    with torch.device("meta"):
        module = Llama(CONFIG)
    return trace(module, tuple(part.to("meta") for part in batch(plans.BATCH)))


def peak_of(sizes: tuple[int, ...], seed: int, settings: dict[str, object], check: bool) -> tuple[int, int, float]:
    """Most bytes of tensors that a random plan has allocated at once in a first step, which is checked or not, and a
    checkpoint; the same with a second step; and what is predicted at most, without what Python takes."""
    return _peak(plans.random_plan("llama", plans.mesh_of(*sizes), seed, graph=graph(), **settings), check)


def peak_of_searched(zero: int) -> tuple[int, int, float]:
    """The same of the best plan with a stage of ZeRO, checked."""
    cluster = load_profile("cpu").with_devices(dist.get_world_size())
    pinned = {"zero": zero, "tensor": 1, "pipeline": 1, "context": 1}
    found = planner.search(graph(), cluster, batch=plans.BATCH, global_batch=plans.BATCH, pinned=pinned)
    return _peak(found.plan, True)


def _peak(plan: Plan, check: bool) -> tuple[int, int, float]:
    cluster = load_profile("cpu").with_devices(plan.cluster.devices)
    bound = bind(plan, graph(), plans.BATCH)
    predicted = (predict(bound, cluster).peak_bytes - cluster.device.reserved) * cluster.software.peak_high
    module, inputs = model(), batch(plan.training.global_batch)
    gc.collect()
    with Allocated() as allocated, tempfile.TemporaryDirectory() as folder:
        step = parallelize(module, plan, optimizer=OptimizerSettings(), traced=graph(), device=CPU, known=known())
        step.prepare(*inputs)
        step.rank.check_layouts = check
        step(*inputs)
        shared = [folder]
        dist.broadcast_object_list(shared)
        checkpoints = Checkpoints(Path(shared[0]), asynchronous=False)
        checkpoints.save(step)
        checkpoints.close()
        dist.barrier()
        first = allocated.most
        step(*inputs)
    return first, allocated.most, predicted
