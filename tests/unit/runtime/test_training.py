"""The loop of `plan run`: what becomes of batches that make no step."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.graph.trace import trace
from planner.plan.plan import SLACK, Prediction
from planner.sharding.stored import own_copies
from runtime.checkpoint.manifest import read_manifest
from runtime.launch.evaluating import Validation
from runtime.launch.training import _of_every_rank, train
from runtime.processes.progress import NoticeReport, RunSummary, StepReport
from runtime.processes.this_machine import predicted_memory
from runtime.profiling.recording import _gathered, least_seconds
from runtime.run_settings import RunSettings
from tests.distributed import plans

BATCHES, BROKEN = 5, 2  # of an epoch, and the number of the one that has no finite loss
SIZE = plans.BATCH


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BH: torch.Tensor) -> torch.Tensor:
        return self.linear(x_BH).pow(2).mean()


def _rows() -> list[torch.Tensor]:
    rows = torch.randn(BATCHES * SIZE, 8, generator=torch.Generator().manual_seed(0))
    rows[BROKEN * SIZE] = torch.nan
    return list(rows)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a plan of one device in this process, up to a step; returns what it reports of steps, and the summary."""
    given = ModuleType("given_by_a_test")
    given.build, given.rows = lambda: (Squares(), (torch.zeros(SIZE, 8),)), _rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, given.__name__, given)
    monkeypatch.syspath_prepend(os.getcwd())  # what a run would do itself, and leave behind
    graph = trace(Squares(), (torch.zeros(SIZE, 8),))
    plan = plans.hand_plan("zero1", "squares", plans.mesh_of(1), graph=graph, samples=SIZE)

    def runs(steps: int, folder: str) -> tuple[list[StepReport], RunSummary]:
        settings = RunSettings(
            steps=steps, model="given_by_a_test:build", save=str(tmp_path / folder), save_every=1, keep=9, go_on=True,
            dataset="given_by_a_test:rows", on_nonfinite="skip",
        )  # fmt: skip
        *reports, summary = train(plan, settings)
        assert isinstance(summary, RunSummary)
        assert summary.agrees, "the unsharded model beside it skips the same"
        return [report for report in reports if isinstance(report, StepReport)], summary

    return runs


def _losses(reports: list[StepReport]) -> list[float]:
    return [report.loss for report in reports if report.trouble is None]


def test_batches_without_a_step_are_made_up_for(run: Any, tmp_path: Path) -> None:
    """From the next epoch, as this one has just enough; the run makes all its steps, and saves behind the last."""
    reports, summary = run(5, "whole")
    assert [report.step for report in reports] == [1, 2, 3, 3, 4, 5]
    assert [report.trouble is None for report in reports] == [True, True, False, True, True, True]
    assert summary.saved == str(tmp_path / "whole/step-000005")
    saved = read_manifest(tmp_path / "whole/step-000005").progress
    assert (saved.step, saved.samples) == (5, 6 * SIZE)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_what_is_resumed_skips_the_same(run: Any, stop: int) -> None:
    """Before the broken batch, behind it, and where the epoch ends."""
    whole, _ = run(5, "whole")
    first, _ = run(stop, "parts")
    then, summary = run(5, "parts")
    assert f"step {stop}" in summary.resumed
    assert _losses(first) + _losses(then) == _losses(whole)


def test_it_is_said_where_losses_are_not_compared(run: Any, tmp_path: Path) -> None:
    """A model whose devices have parameters of their own differs from the unsharded one."""
    graph = trace(Squares(), (torch.zeros(SIZE, 8),))
    plan = plans.hand_plan("zero1", "squares", plans.mesh_of(1), graph=graph, samples=SIZE)
    local = replace(plan.training, update=replace(plan.training.update, local_parameters=("*",)))
    groups = tuple(
        replace(group, parameters=tuple((name, own_copies(1)) for name, _ in group.parameters)) for group in plan.groups
    )
    settings = RunSettings(steps=1, model="given_by_a_test:build")
    notes = [
        one.text
        for one in train(replace(plan, training=local, groups=groups), settings)
        if isinstance(one, NoticeReport)
    ]
    assert notes == [
        "losses are not compared with those of the unsharded model, which differ: each device has its own *"
    ]
    assert not any(isinstance(one, NoticeReport) for one in train(plan, settings))


def test_what_a_process_on_cpus_keeps_on_its_host_is_its_memory_too() -> None:
    memory = (("weights", 1.0), ("activations", 1.5), (SLACK, 0.5))
    found = replace(Prediction.unknown(), peak_bytes=3.0, memory=memory, offloaded=(("host", 2.0), ("disk", 7.0)))
    assert predicted_memory(found, torch.device("cpu")) == 5.0
    assert predicted_memory(found, torch.device("cuda")) == 2.5  # tensors alone are measured there


def test_every_evaluated_batch_is_progress() -> None:
    """All of them may take longer than --timeout, which ends runs without progress."""
    step = SimpleNamespace(
        evaluate=lambda batch: float(batch),
        plan=SimpleNamespace(training=SimpleNamespace(global_batch=1), model=SimpleNamespace(sequence_length=None)),
    )
    validation = Validation(
        settings=RunSettings(evaluate="mine"),
        step=cast(Any, step),
        plain=None,
        compares=False,
        own=cast(Any, _Batches([0, 1, 2])),
        full=None,
    )
    said: list[str] = []
    assert validation.report(7, said.append).loss == 1.0
    assert len(set(said)) == 4


class _Batches(list[int]):
    """Batches of one sample."""

    iterable = False

    @property
    def dataset(self) -> "_Batches":
        return self


def test_numbers_of_ranks_are_reduced_in_no_dtype_that_hccl_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu refuses float64: `checkSupportedDataType` in ProcessGroupHCCL.cpp."""
    reduce = dist.all_reduce

    def as_hccl(tensor: torch.Tensor, *rest: Any) -> Any:
        assert tensor.dtype != torch.float64
        return reduce(tensor, *rest)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "all_reduce", as_hccl)
    try:
        assert _of_every_rank(0.1) == (0.1,)
        assert _gathered([0.1, 2.0]) == [[0.1, 2.0]]
        group = dist.group.WORLD
        assert group is not None
        least = least_seconds([{group: [("forward", 0.25), ("update", 0.5)]}], torch.device("cpu"))
        assert least == {group: [0.25, 0.5]}
    finally:
        dist.destroy_process_group()
