"""One rank that times the steps of plans and of hand-written PyTorch, for bench_overhead and bench_defaults:
`-m overhead_runs FOLDER`.

Plans stand beside the same model under `parallelize_module` over their tensor axis and `fully_shard` or
DistributedDataParallel over their data axis; `pairs` says which plans, and which of these ways by hand:

    parallel   column and row parallel, sequence parallel, parallel loss; every layer under `fully_shard` (ZeRO-3)
    mlp        the MLP alone column and row parallel; `fully_shard` that keeps gathered weights, so that gradients are
               scattered and weights are gathered once a step, as under ZeRO-1
    local      the MLP alone cut by hand, one all-reduce forward and one backward, without DTensors;
               DistributedDataParallel, and ZeroRedundancyOptimizer (ZeRO-1)
    ddp        DistributedDataParallel

All start from the same weights, get the same batches, and take turns, a step each, so that what else the machine does
falls on all alike. Rank 0 prints a line of JSON per pair.
"""

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from planner.models.zoo import BuiltModel, build_model
from planner.plan.file import load_plan
from planner.plan.plan import Plan
from runtime.comm.device_mesh import Communicators, current_device, local_rank, start_processes
from runtime.data.datasets import synthetic_batches
from runtime.processes.rank import be_a_rank
from runtime.step.training_step import parallelize

Step = Callable[[torch.Tensor, torch.Tensor], float]


def built(plan: Plan) -> BuiltModel:
    torch.manual_seed(0)
    return build_model(plan.model.reference, dtype="float32", device="cpu", sequence_length=plan.model.sequence_length)


def by_hand(plan: Plan, tensor: int, data: int, way: str) -> Step:
    """The step that somebody would write for a Llama or, without tensor parallelism, for any model with layers."""
    module: nn.Module = built(plan).module
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        {"parallel": _cut, "mlp": _cut_mlp, "local": _cut_locally}[way](module, mesh["tensor"])
    if way in ("ddp", "local"):
        replicas = mesh["data"].get_group()
        module = DistributedDataParallel(module, process_group=replicas, gradient_as_bucket_view=way == "local")
    elif data > 1:
        for layer in max((one for one in module.modules() if isinstance(one, nn.ModuleList)), key=len):
            fully_shard(layer, mesh=mesh["data"], reshard_after_forward=way != "mlp")
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=way != "mlp")
    optimizer: torch.optim.Optimizer = (
        ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, process_group=mesh["data"].get_group())
        if way == "local"
        else torch.optim.AdamW(module.parameters())
    )
    place = mesh["data"].get_local_rank()

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        own = [batch.chunk(data)[place] for batch in (tokens, labels)]
        with loss_parallel() if tensor > 1 and way == "parallel" else contextlib.nullcontext():
            loss = module(*own)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach() / data
        dist.all_reduce(mean, group=mesh["data"].get_group())
        return float(mean)

    return step


def _cut(module: nn.Module, mesh: DeviceMesh) -> None:
    """Megatron's cuts with sequence parallelism, as PyTorch's tutorial on tensor parallelism has them."""
    outer = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, mesh, outer)
    whole, cut = (Replicate(), None, None), (Shard(1), None, None)
    inner = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in module.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, inner)


def _cut_mlp(module: nn.Module, mesh: DeviceMesh) -> None:
    """The MLP alone, everything else whole on every device of the tensor axis."""
    inner = {**{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}, "mlp.down_proj": RowwiseParallel()}
    for layer in module.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, inner)


class _Summed(torch.autograd.Function):
    """The sum over a group forward, and the gradient as it is; or the other way round."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup, backward: bool) -> torch.Tensor:
        ctx.group, ctx.backward = group, backward
        if not backward:
            dist.all_reduce(value, group=group)
            ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.backward:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


def _cut_locally(module: nn.Module, mesh: DeviceMesh) -> None:
    """The MLP alone, its pieces plain tensors."""
    group, place, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    for layer in module.model.layers:  # type: ignore[union-attr]
        for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
            linear = layer.mlp.get_submodule(f"{name}_proj")  # type: ignore[union-attr]
            linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim)[place].clone())
        layer.mlp.register_forward_pre_hook(lambda _, args: (_Summed.apply(args[0], group, True),))  # type: ignore[union-attr]
        layer.mlp.register_forward_hook(lambda _, args, found: _Summed.apply(found, group, False))  # type: ignore[union-attr]


def run(folder: Path, rounds: int) -> int:
    start_processes(current_device(local_rank()))
    known = Communicators()
    steps: dict[int, tuple[Plan, dict[str, Step]]] = {}
    for number, pair in enumerate(json.loads((folder / "pairs").read_text(encoding="utf-8"))):
        plans = {who: load_plan(folder / f"{number}.{who}.json") for who in pair["plans"]}
        plan = next(iter(plans.values()))
        found: dict[str, Step] = {who: parallelize(built(plan).module, one, known=known) for who, one in plans.items()}
        steps[number] = (plan, {**found, "by hand": by_hand(plan, pair["tensor"], pair["data"], pair["by_hand"])})
    seconds = {name: {who: [] for who in pair} for name, (_, pair) in steps.items()}
    busy = {name: {who: [] for who in pair} for name, (_, pair) in steps.items()}
    losses = {name: {who: [] for who in pair} for name, (_, pair) in steps.items()}
    for number in range(rounds + 2):
        for name, (plan, pair) in steps.items():
            batch = next(synthetic_batches(built_example(plan), plan, number))
            order = list(pair.items())
            random.Random(number).shuffle(order)
            for who, step in order:
                dist.barrier()
                started, before = time.perf_counter(), time.process_time()
                losses[name][who].append(step(*batch.args))
                dist.barrier()
                if number > 1:  # the first ones are a warm-up
                    seconds[name][who].append(time.perf_counter() - started)
                    busy[name][who].append(_of_all_ranks(time.process_time() - before))
    if dist.get_rank() == 0:
        for name in steps:
            found = {"wall": seconds[name], "cpu": busy[name], "losses": losses[name]}
            print(json.dumps({"pair": name, **found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _of_all_ranks(seconds: float) -> float:
    total = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def built_example(plan: Plan) -> BuiltModel:
    """The example of the model, without its weights."""
    found = build_model(plan.model.reference, dtype="float32", sequence_length=plan.model.sequence_length)
    return replace(found, args=tuple(torch.zeros(argument.shape, dtype=argument.dtype) for argument in found.args))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--notes")
    given = parser.parse_args()
    return be_a_rank(lambda at, joined: run(given.folder, given.rounds), given.notes)


if __name__ == "__main__":
    sys.exit(main())
