"""`python -m runtime` on a model that drops elements, and on one that breaks down: real processes."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from planner.errors import PlannerError
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.file import save_plan
from runtime.launch.launch import launch
from runtime.processes.progress import Report, RunSummary, StepReport
from runtime.run_settings import RunSettings
from tests.refusals import refused

MODELS = """
import torch
from torch import nn

class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x @ self.weight).pow(2).mean()

class Sinks(nn.Module):
    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(torch.full((4,), 0.0015))  # the optimizer takes 0.001 a step from it

    def forward(self, x):
        return (x * 0 + self.level).mean() + torch.log(self.level).mean().detach()

def drops():
    return Drops(), (torch.randn(2, 4),)

def sinks():
    return Sinks(), (torch.randn(2, 4),)
"""


def _plans() -> ModuleType:
    specification = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("plans.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["plans"] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def plan_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Saves a data parallel plan of a factory for two processes, and gives its path."""
    (tmp_path / "random_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    plans = _plans()

    def made(factory: str) -> Path:
        reference = f"random_models:{factory}"
        built = build_model(reference, dtype="float32", device="cpu", sequence_length=None)
        graph = trace(built.module, built.args, built.kwargs)
        plan = plans.hand_plan("zero1", reference, plans.mesh_of(2), graph=graph, samples=built.batch, micro_batches=2)
        save_plan(replace(plan, model=replace(plan.model, sequence_length=None)), tmp_path / "plan.json")
        return tmp_path / "plan.json"

    return made


@pytest.mark.exhaustive
def test_the_unsharded_model_drops_the_same(plan_of) -> None:
    found: list[Report] = []
    assert launch(plan_of("drops"), RunSettings(model="random_models:drops", steps=4, seed=3), found.append) == 0
    assert isinstance(found[-1], RunSummary)
    assert found[-1].agrees


@pytest.mark.exhaustive
def test_a_loss_that_is_not_finite_ends_all_ranks(plan_of) -> None:
    found: list[Report] = []
    with refused(PlannerError, "step 3", "nan", "micro-batch 0", "log", "aten.log.default") as caught:
        launch(plan_of("sinks"), RunSettings(model="random_models:sinks", steps=10, check=False), found.append)
    assert caught.value.exit_code == 4
    assert [report.step for report in found if isinstance(report, StepReport)] == [1, 2]
