"""One rank of bench_overlap: `overlap_runs.py FOLDER`, told by lines on stdin what to time next.

    stdin   NAME ROUNDS RATE      of a plan file, how often, and FLOP/s of the device; the end of it ends the rank
    stdout  {"plan": NAME, "seconds": [...]}      rank 0: seconds of each step from barrier to barrier

All plans are set up first, and are for one model. "NAME!" times a plan without reductions under the backward pass, and
without receives that are posted ahead. Where the folder has `by_hand`, "by hand" is the step that somebody would write
with DTensor, FSDP2 and DistributedDataParallel (`overhead_runs`): {"way": ..., "tensor": ..., "data": ...}.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import INTERFACE
from overhead_runs import by_hand
from slow_device import SlowDevice

from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.file import load_plan
from planner.plan.plan import PRECISIONS
from runtime.comm.device_mesh import Communicators, current_device, local_rank, start_processes
from runtime.data.datasets import synthetic_batch
from runtime.step.arguments import Arguments
from runtime.step.receiving import Line
from runtime.step.training_step import TrainingStep, parallelize

WAITING = "!"
"""Behind a name: gradients are reduced when the backward pass is over, stages receive when they need what comes."""


BY_HAND = "by_hand"

TIMED = -15
"""Niceness of a rank that is set up: it sleeps most of the time, and what else the machine does is not to hold up its
bytes."""

Step = Callable[..., Any]


def prepared(folder: Path) -> dict[str, tuple[Step, list[torch.Tensor]]]:
    """The step of each plan in a folder, of what is written by hand, and its batch."""
    device, known, graph = current_device(local_rank()), Communicators(), None
    found: dict[str, tuple[Step, list[torch.Tensor]]] = {}
    for path in sorted(folder.glob("*.json")):
        plan = load_plan(path)
        torch.manual_seed(0)
        model, dtype = plan.model, PRECISIONS[plan.training.precision]
        built = build_model(model.reference, dtype=dtype, device="cpu", sequence_length=model.sequence_length)
        graph = graph or trace(built.module, built.args, built.kwargs)
        step = parallelize(built.module, plan, traced=graph, device=device, known=known, check_layouts=False)
        step.prepare(*built.args, **built.kwargs)
        batch = synthetic_batch(
            Arguments(args=tuple(built.args), kwargs=built.kwargs).tensors(),
            batch=built.batch,
            samples=plan.training.global_batch,
            bounds=built.bounds,
            seed=0,
            step=0,
        )
        found[path.stem] = (step, batch)
    if (written := folder / BY_HAND).exists():
        found[BY_HAND] = (by_hand(plan, **json.loads(written.read_text(encoding="utf-8"))), batch)
    return found


def timed(step: Step, batch: list[torch.Tensor], rounds: int, device: SlowDevice) -> list[float]:
    """Seconds of some steps on a device."""
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        with device:
            step(*batch)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return seconds


@contextmanager
def waiting(step: TrainingStep) -> Iterator[None]:
    """What is waited for: reductions behind the backward pass, receives when they are needed."""
    reduction = step.rank.optimizer.reduction
    begin, take, post = reduction.begin, Line.take, Line.post

    def when_needed(line: Line) -> list[torch.Tensor]:
        post(line)
        return [line._landed(line.coming.popleft()) for _ in range(len(line.coming))]

    reduction.begin = _nothing  # type: ignore[method-assign]
    Line.take, Line.post = when_needed, _nothing  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        reduction.begin = begin  # type: ignore[method-assign]
        Line.take, Line.post = take, post  # type: ignore[method-assign]


def set_niceness(niceness: int) -> None:
    """Of all threads of this process."""
    for thread in os.listdir("/proc/self/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


def _nothing(*_: object) -> None:
    """No reduction starts early, and no receive is posted."""


def main() -> None:
    start_processes(current_device(local_rank()), listen=INTERFACE)
    steps = prepared(Path(sys.argv[1]))
    set_niceness(TIMED)
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"ready": sorted(steps)}), flush=True)
    for line in sys.stdin:
        name, rounds, rate = line.split()
        device = SlowDevice(float(rate))
        step, batch = steps[name.removesuffix(WAITING)]
        late = waiting(step) if name.endswith(WAITING) and isinstance(step, TrainingStep) else nullcontext()
        with late:
            found = timed(step, batch, int(rounds), device)
        if dist.get_rank() == 0:
            told = {"plan": name, "seconds": found, "products": device.seconds / len(found), "late": device.late}
            print(json.dumps(told | {"count": device.products}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
