"""What the workers do in the test of runs over several epochs of a dataset: whole runs of `train`."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from planner.graph.trace import trace
from runtime.launch.training import train
from runtime.processes.progress import StepReport
from runtime.run_settings import RunSettings
from tests.distributed import plans

COUNT = 18
"""Samples: four and a half global batches of four."""


class Powers(nn.Module):
    """Its loss says which samples were in the batch: each has a power of two, and its weight counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BH: torch.Tensor) -> torch.Tensor:
        return (x_BH + self.linear(x_BH) * 0.0).mean()


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.zeros(8).index_fill(0, torch.tensor([0]), float(2**number))


def model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A factory for `--model`."""
    return Powers(), (torch.zeros(plans.BATCH, 8),)


def seen(kind: str, sizes: tuple[int, ...], batches: int, steps: int, folder: str, own: bool) -> list[list[int]]:
    """The samples of every step of a run whose steps take so many times the batch, and which goes on where there is a
    checkpoint in the folder."""
    module, example = model()
    plan = plans.hand_plan(
        kind, "powers", plans.mesh_of(*sizes), graph=trace(module, example), samples=plans.BATCH,
        global_batch=batches * plans.BATCH, micro_batches=batches,
    )  # fmt: skip
    settings = RunSettings(
        steps=steps, model=f"{__name__}:model", dataset=f"{__name__}:Rows", shuffle=True, full_batch=not own, seed=5,
        save=folder, save_every=1, keep=99, go_on=True,
    )  # fmt: skip
    reports = [report for report in train(plan, settings) if isinstance(report, StepReport)]
    sums = [round(report.loss * plan.training.global_batch * 8) for report in reports]
    return [[row for row in range(COUNT) if found >> row & 1] for found in sums]
