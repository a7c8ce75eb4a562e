"""One rank that times the steps of many plans, for bench_calibration: `-m calibration_runs FOLDER --rounds N`.

All plans are set up first and then take turns, a step each, so that what else the machine does falls on all of them
alike. Rank 0 prints a line of JSON per plan: its name, and the seconds of each step from barrier to barrier.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from throttle import throttle

from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.file import load_plan
from planner.plan.plan import PRECISIONS
from runtime.comm.device_mesh import Communicators, current_device, local_rank, start_processes
from runtime.data.datasets import synthetic_batch
from runtime.processes.rank import be_a_rank
from runtime.step.arguments import Arguments
from runtime.step.training_step import parallelize


def steps_of(folder: Path) -> dict[str, Callable[[], float]]:
    """A training step of each plan in the folder, by name. All are for one model."""
    device, known = current_device(local_rank()), Communicators()
    plans = {path.stem: load_plan(path) for path in sorted(folder.glob("*.json"))}
    steps: dict[str, Callable[[], float]] = {}
    graph = None
    for name, plan in plans.items():
        torch.manual_seed(0)
        model = plan.model
        dtype = PRECISIONS[plan.training.precision]
        built = build_model(model.reference, dtype=dtype, device="cpu", sequence_length=model.sequence_length)
        graph = graph or trace(built.module, built.args, built.kwargs)
        step = parallelize(built.module, plan, traced=graph, device=device, known=known)
        example = Arguments(args=tuple(built.args), kwargs=built.kwargs)
        batch = synthetic_batch(
            example.tensors(), batch=built.batch, samples=plan.training.global_batch,
            bounds=built.bounds, seed=0, step=0,
        )  # fmt: skip
        steps[name] = lambda step=step, batch=batch: step(*batch)  # type: ignore[misc]
    return steps


def run(folder: Path, rounds: int) -> int:
    start_processes(current_device(local_rank()))
    steps = steps_of(folder)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        order = list(steps.items())
        random.Random(number).shuffle(order)
        for name, step in order:
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            if number:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - started)
        if dist.get_rank() == 0:
            print(json.dumps({"round": number}), flush=True)
    if dist.get_rank() == 0:
        for name, taken in seconds.items():
            print(json.dumps({"plan": name, "seconds": taken}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, default=0.0, help="of the link, bytes a second; 0 as it is")
    parser.add_argument("--notes")
    given = parser.parse_args()
    if given.bandwidth:
        throttle(given.bandwidth)
    return be_a_rank(lambda at, joined: run(given.folder, given.rounds), given.notes)


if __name__ == "__main__":
    sys.exit(main())
