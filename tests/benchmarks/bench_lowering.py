"""What an operator costs on the host: lowered programs, the general executor, DTensor and the plain module.

A Llama so narrow that its kernels take next to no time, in this one process: what a step takes is the work of the host.
Forward and backward pass of one micro-batch, with gradients added up; all four take turns, so that what else the
machine does falls on all alike. DTensor has the module's weights and inputs as replicas on a mesh of one device; it has
to look up and check layouts for every operator all the same, but for attention, of which it knows no kernel for CPUs
(2.13): that gets local tensors. Seconds are CPU seconds of this process.

`--figure FILE` draws them against the number of operators (needs matplotlib).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.experimental import implicit_replication

import planner
from hardware_profiles import load_profile
from planner.models.zoo import BuiltModel, build_model
from planner.strategy_search.request.space import Pinned
from runtime.data.datasets import synthetic_batches
from runtime.step.training_step import parallelize

NARROW = "llama-tiny+hidden_size=32+ffn_size=64+num_heads=4+num_kv_heads=2+vocab_size=64+sequence_length=16"
LAYERS = {"quick": (2, 8), "usual": (2, 4, 8, 16), "full": (2, 4, 8, 16, 32)}
ROUNDS = {"quick": 30, "usual": 100, "full": 200}
WARM_UP = 5
WAYS = ("plain module", "lowered programs", "general executor", "DTensor")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", default="usual")
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        print("forward and backward of a narrow Llama in one process; median CPU milliseconds, and per operator the")
        print("microseconds beyond those of the plain module")
        print(f"{'layers':>6} {'operators':>9}" + "".join(f"{way:>26}" for way in WAYS))
        found = {}
        for layers in LAYERS[asked.extent]:
            operators, seconds = measured(f"{NARROW}+num_layers={layers}", ROUNDS[asked.extent])
            found[operators] = seconds
            beyond = {way: (seconds[way] - seconds[WAYS[0]]) / operators * 1e6 for way in WAYS}
            row = "".join(f"{f'{seconds[way] * 1e3:.2f} ({beyond[way]:+.1f})':>26}" for way in WAYS)
            print(f"{layers:>6} {operators:>9}{row}", flush=True)
        dist.destroy_process_group()
    if asked.figure is not None:
        draw(found, asked.figure)


def measured(reference: str, rounds: int) -> tuple[int, dict[str, float]]:
    """The number of operators, and the median seconds of each way."""
    cluster = load_profile("cpu").with_devices(1)
    pinned = Pinned(micro_batches=1, recompute="none")
    plan = planner.search(reference, cluster, precision="fp32", global_batch=1, pinned=pinned).plan
    example = build_model(reference, dtype="float32", sequence_length=plan.model.sequence_length)
    example = replace(example, args=tuple(torch.zeros(a.shape, dtype=a.dtype) for a in example.args))
    batch = next(synthetic_batches(example, plan, 0)).args
    ways: dict[str, Callable[[], object]] = {}
    for way in WAYS[1:3]:
        step = parallelize(
            built(reference).module, plan, example=batch, check_layouts=False, lowered=way == "lowered programs"
        )
        ways[way] = lambda step=step: step.accumulate(*batch)
    plain, spread = built(reference).module, built(reference).module
    mesh = init_device_mesh("cpu", (1,))
    distribute_module(spread, mesh)
    replicas = [DTensor.from_local(given, mesh, [Replicate()]) for given in batch]

    def by_dtensor() -> None:
        with implicit_replication(), patch.object(F, "scaled_dot_product_attention", attention_on_local_tensors):
            spread(*replicas).backward()

    ways["plain module"], ways["DTensor"] = lambda: plain(*batch).backward(), by_dtensor
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + WARM_UP):
        for way in WAYS:
            before = time.process_time()
            ways[way]()
            if number >= WARM_UP:
                seconds[way].append(time.process_time() - before)
    return len(step.rank.bound.operators), {way: statistics.median(seconds[way]) for way in WAYS}


attention = F.scaled_dot_product_attention


def attention_on_local_tensors(query: DTensor, *others: DTensor, **settings: Any) -> DTensor:
    local = (given.to_local() for given in (query, *others))
    return DTensor.from_local(attention(*local, **settings), query.device_mesh, query.placements, run_check=False)


def built(reference: str) -> BuiltModel:
    torch.manual_seed(0)
    return build_model(reference, dtype="float32", device="cpu")


def draw(found: dict[int, dict[str, float]], path: Path) -> None:
    """A picture of the milliseconds of each way against the number of operators."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "bench_lowering"  # the same file for the same figures
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for way in WAYS:
        axes.plot(list(found), [seconds[way] * 1e3 for seconds in found.values()], marker="o", label=way)
    axes.set_xlabel("operators of the graph")
    axes.set_ylabel("CPU milliseconds, forward and backward")
    axes.set_title(f"Work of the host, torch {torch.__version__.partition('+')[0]}, one of {os.cpu_count()} cores")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
