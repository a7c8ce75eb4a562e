"""What the workers do in the tests of ranks that are slow: a run of `train` in which one of them dawdles."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.utils.data import TensorDataset

from planner.graph.trace import trace
from runtime.launch.training import train
from runtime.processes.progress import RunSummary
from runtime.processes.stragglers import LEAST_STEPS
from runtime.run_settings import RunSettings
from runtime.step.step import RankStep
from tests.distributed import plans, tasks_rollback

DAWDLES = 0.2  # seconds in each step; the rest of a step is a few milliseconds
PLACES: dict[str, tuple[Any, str, int]] = {
    "computing": (RankStep, "accumulate", 1),
    "reading": (TensorDataset, "__getitem__", plans.BATCH),
}
"""What is slow, and how often that is called in a step."""


def run(sizes: tuple[int, ...], settings: dict[str, object], victim: int, where: str) -> dict[str, object]:
    """The summary of a run in which one rank does something before its forward pass, or before it reads a batch."""
    os.environ[tasks_rollback._OFFSETS] = " ".join(f"{number}:0" for number in range(LEAST_STEPS + 2))
    module, example = tasks_rollback.model()
    plan = plans.random_plan("fragile", plans.mesh_of(*sizes), 7, graph=trace(module, example), **settings)
    steps = LEAST_STEPS + 2  # the first two are not counted
    given = RunSettings(
        steps=steps,
        check=False,
        model="tests.distributed.tasks_rollback:model",
        dataset="tests.distributed.tasks_rollback:data",
    )
    owner, name, times = PLACES[where]
    own = getattr(owner, name)
    with patch.object(owner, name, _dawdling(own, DAWDLES / times) if dist.get_rank() == victim else own):
        *_, summary = train(plan, given)
    assert isinstance(summary, RunSummary)
    return asdict(summary)


def _dawdling(function: Callable[..., object], seconds: float) -> Callable[..., object]:
    def dawdling(*arguments: object) -> object:
        time.sleep(seconds)
        return function(*arguments)

    return dawdling
