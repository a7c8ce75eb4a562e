"""What the workers do in the tests of ranks that wait: one of them is stopped, and the report wakes it up again."""

import os
import signal
import threading
from collections.abc import Callable

import torch.distributed as dist

from runtime.processes.hang import HangWatch, Store
from runtime.step.training_step import TrainingStep
from tests.distributed import plans
from tests.distributed.tasks_saving import Settings, plan_for, step_of

TIMEOUT = 3.0
"""Seconds without progress: long enough for the others to get to where they wait, on a busy machine too."""


def reported(
    kind: int | str, sizes: tuple[int, ...], settings: Settings, victim: int, when: str, path: str
) -> list[str]:
    """The report of a step in which a rank is stopped before its forward pass, its backward pass or its update, where
    this rank makes it; the step goes on after that."""
    step = step_of("llama4", plan_for("llama4", kind, sizes, settings), settings)
    samples = step.plan.training.global_batch
    batch = plans.inputs("llama4", seed=1, samples=samples)
    step(*batch)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    said: list[str] = []

    def end(report: str | None) -> None:
        if report is not None:
            said.append(report)
            os.kill(pids[victim], signal.SIGCONT)

    watch = HangWatch(timeout=TIMEOUT, end=end, answer=2.0)
    watch.board = Store(dist.FileStore(path, len(pids)), dist.get_rank(), len(pids))
    if dist.get_rank() == victim:
        _stop_before(step, when)
    dist.barrier()
    watch.start()
    watch.progress("step 2")
    try:
        step(*batch)
        dist.barrier()  # those who need nothing of the victim are through
    finally:
        os.kill(pids[victim], signal.SIGCONT)
        watch.stop()
    assert threading.active_count() < 8, "no thread stays"
    return said


def _stop_before(step: TrainingStep, when: str) -> None:
    rank = step.rank
    if when == "forward":
        rank.accumulate = _stopping(rank.accumulate)  # type: ignore[method-assign]
    elif when == "backward":
        rank.pipeline._backward = _stopping(rank.pipeline._backward)  # type: ignore[method-assign]
    else:
        rank.optimizer.step = _stopping(rank.optimizer.step)  # type: ignore[method-assign]


def _stopping(function: Callable[..., object]) -> Callable[..., object]:
    left = [None]

    def stopping(*arguments: object) -> object:
        if left:
            left.pop()
            os.kill(os.getpid(), signal.SIGSTOP)
        return function(*arguments)

    return stopping
