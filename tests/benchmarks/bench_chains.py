"""What chains that `torch.compile` fuses save: a step of a Llama with and without `compiled=True`, in this one process.

Forward and backward pass of one micro-batch on one thread, with gradients added up; both ways take turns, so that what
else the machine does falls on both alike. Seconds are CPU seconds of this process, and seconds on the wall. Compiling
is timed by itself: the second pass over a batch less a later one, with an empty cache of `torch.compile`, and what was
in it when another process had run before.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch

import planner
from hardware_profiles import load_profile
from planner.models.zoo import build_model
from planner.strategy_search.request.space import Pinned
from runtime.data.datasets import synthetic_batches
from runtime.step.training_step import parallelize

LAYERS = 4
SHAPES = {  # hidden size, ffn size, tokens of a sequence, dtype
    "quick": ((512, 1536, 256, "float32"),),
    "usual": ((128, 384, 64, "float32"), (512, 1536, 256, "float32"), (768, 2048, 512, "float32")),
    "full": (
        (128, 384, 64, "float32"),
        (512, 1536, 256, "float32"),
        (768, 2048, 512, "float32"),
        (512, 1536, 256, "bfloat16"),
    ),
}
WARM_UP = 2
ROUNDS = {"quick": 10, "usual": 20, "full": 50}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", default="usual")
    parser.add_argument("--shape", type=int)
    asked = parser.parse_args()
    if asked.shape is not None:
        measured(*SHAPES[asked.extent][asked.shape], rounds=ROUNDS[asked.extent])
        return
    print(f"forward and backward of a Llama of {LAYERS} layers, one thread of {os.cpu_count()} cores, torch")
    print(f"{torch.__version__}; median seconds, and what compiling takes once, anew and from the cache")
    print(f"{'hidden':>6} {'tokens':>6} {'dtype':>9} {'chains':>6} {'operators':>12} {'compiling s':>12}", end="")
    print(f"{'CPU s without':>14} {'with':>7} {'ratio':>6} {'wall s without':>15} {'with':>7} {'ratio':>6}", flush=True)
    for number in range(len(SHAPES[asked.extent])):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, f"--extent={asked.extent}", f"--shape={number}"]
            for _ in range(2):
                subprocess.run(command, check=True, env=environment)


def measured(hidden: int, ffn: int, tokens: int, dtype: str, rounds: int) -> None:
    torch.set_num_threads(1)
    heads = f"num_heads={hidden // 64}+num_kv_heads={hidden // 64}"
    reference = f"llama-tiny+hidden_size={hidden}+ffn_size={ffn}+{heads}+vocab_size=2048+sequence_length={tokens}"
    reference += f"+num_layers={LAYERS}"
    pinned = Pinned(micro_batches=1, recompute="none")
    precision = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    cluster = load_profile("cpu").with_devices(1)
    plan = planner.search(reference, cluster, precision=precision, global_batch=2, pinned=pinned).plan
    example = build_model(reference, dtype=dtype, sequence_length=tokens)
    example = replace(example, args=tuple(torch.zeros(a.shape, dtype=a.dtype) for a in example.args))
    batch = next(synthetic_batches(example, plan, 0)).args
    ways = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build_model(reference, dtype=dtype, device="cpu").module
        ways[compiled] = parallelize(model, plan, example=batch, check_layouts=False, compiled=compiled)
        ways[compiled].accumulate(*batch)  # watched, operator by operator
    before = time.perf_counter()
    ways[True].accumulate(*batch)
    compiling = time.perf_counter() - before
    cpu: dict[bool, list[float]] = {way: [] for way in ways}
    wall: dict[bool, list[float]] = {way: [] for way in ways}
    for number in range(rounds + WARM_UP):
        for way, step in ways.items():
            before, busy = time.perf_counter(), time.process_time()
            step.accumulate(*batch)
            if number >= WARM_UP:
                cpu[way].append(time.process_time() - busy)
                wall[way].append(time.perf_counter() - before)
    chains = ways[True].rank.programs.compiled
    operators = f"{LAYERS * sum(chains.operators.values())} of {len(ways[True].rank.bound.operators)}"
    without, fused, wall_without, wall_fused = (statistics.median(each[way]) for each in (cpu, wall) for way in ways)
    print(
        f"{hidden:>6} {tokens:>6} {dtype:>9} {len(chains.texts):>6} {operators:>12} {compiling - wall_fused:>11.1f}",
        end="",
    )
    print(f"{without:>14.3f} {fused:>7.3f} {fused / without:>6.2f}", end="")
    print(f"{wall_without:>16.3f} {wall_fused:>7.3f} {wall_fused / wall_without:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
