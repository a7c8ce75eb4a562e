"""A large plan proved by a small one: it agrees with the unsharded model, and a runtime with a fault does not."""

import json
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import planner
from planner.cli.main import app
from planner.graph.trace import trace
from planner.plan.binding.bind import bind
from planner.plan.binding.machine import machine_of
from planner.plan.binding.model_of import build_planned
from planner.plan.file import load_plan
from planner.plan.plan import Plan
from planner.plan.shrinking.facts import facts_of
from planner.plan.shrinking.shrink import EXACT, SmallPlan
from planner.plan.shrinking.smallest import SmallRequest, smallest
from tests.distributed.conftest import WorkerPool
from tests.distributed.tasks_proving import FAULTS

HERE = Path(__file__).resolve().parent
PAIR, FOUR = HERE / "llama-tiny-in-two.json", HERE.parent / "golden" / "plans" / "gpt-tiny-8-h100-pipeline.json"
"""One that adds up terms, whatever a search finds today, and a pipeline."""


@cache
def small_of(path: Path) -> tuple[SmallPlan, list[str]]:
    """The small plan of one in float64, and the decisions that it has not."""
    return smallest_of(load_plan(path))


def smallest_of(plan: Plan) -> tuple[SmallPlan, list[str]]:
    built = build_planned(plan, None)
    machine = machine_of(plan.cluster)
    large = bind(plan, trace(built.module, built.args, built.kwargs), built.batch)
    request = SmallRequest(
        machine=machine, reference=plan.model.reference, small=None, processes=4, precisions=(EXACT,)
    )
    (found,), covered = smallest(large, facts_of(large, machine), request)
    return found, [what for one in covered for what, _ in one.missing if what != "precision bf16"]


@pytest.mark.slow
def test_a_pipeline_with_sharded_weights(pool: WorkerPool) -> None:
    small, missing = small_of(FOUR)
    assert (small.plan.mesh.sizes, small.plan.pipeline, missing) == ((2,), 2, [])
    found = pool.run("tasks_proving", "proved", small.plan, small.traced, "")
    assert found[0].agrees, found[0]
    assert found[0].gradient < 1e-12
    assert found[0].parameters == len(small.bound.parameters)
    assert found[1:] == [None] * 3


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("fault", [pytest.param(one, marks=[pytest.mark.thorough] * (one[0] == "p")) for one in FAULTS])
def test_a_runtime_with_a_fault_is_found_out(pair: WorkerPool, fault: str) -> None:
    small, _ = small_of(PAIR)
    found = pair.run("tasks_proving", "proved", small.plan, small.traced, fault)[0]
    assert not found.agrees
    if fault == "nothing is updated":
        assert found.gradient < 1e-12
        assert "change" in found.failures


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("path", [PAIR, FOUR.with_name("gpt2-16-ascend.json"), FOUR.with_name("llama8b-8-h100.json")])
def test_golden_plans(pool: WorkerPool, pair: WorkerPool, path: Path) -> None:
    small, missing = small_of(path)
    processes = {2: pair, 4: pool}[small.plan.cluster.devices]
    assert missing == []
    assert processes.run("tasks_proving", "proved", small.plan, small.traced, "")[0].agrees


@pytest.mark.slow
@pytest.mark.exhaustive
def test_batch_norm_that_amplifies_rounding(pair: WorkerPool) -> None:
    """In fp32 gradients of this model are off by 1e-2 themselves."""
    plan = planner.search("resnet50", "cpu", devices=4, global_batch=32, precision="fp32", pinned={"data": 4}).plan
    small, missing = smallest_of(plan)
    found = pair.run("tasks_proving", "proved", small.plan, small.traced, "")[0]
    assert (missing, small.plan.training.precision, found.precision) == ([], "fp32", EXACT)
    assert found.agrees, found
    assert found.gradient < 1e-9


@pytest.mark.slow
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("recipe", "left_out"),
    [("tensorwise", []), ("delayed", []), ("blockwise", []), ("delayed", ["model.layers.0.mlp.experts*"])],
)
def test_layers_and_experts_in_fp8(pair: WorkerPool, recipe: str, left_out: list[str]) -> None:
    """Over two steps, the second of which has delayed scales of the first, and of nothing else; the experts of a block
    may stay out."""
    fp8 = {"fp8": recipe, "fp8_experts": True, "fp8_dispatch": recipe == "blockwise", "fp8_left_out": left_out}
    settings = {"precision": "bf16", **fp8, "pinned": {"expert": 2}}
    plan = planner.search("mixtral-tiny", "cpu", devices=2, **settings).plan
    small, missing = smallest_of(plan)
    found = pair.run("tasks_proving", "proved", small.plan, small.traced, "")[0]
    assert (missing, small.plan.training.fp8, found.precision) == ([], plan.training.fp8, EXACT)
    assert found.agrees, found
    assert found.gradient < 1e-12
    assert found.change < 1e-12


_OWN = """
import torch
from torch import nn


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Single(Double):
    @staticmethod
    def forward(ctx, x):
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel for doubles")
        return x * 2


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.up, self.down = function, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        start = torch.zeros(x.shape[0], 8, device=x.device)  # of the default dtype
        return (self.down(self.function.apply(self.up(x) + self.up(start))) ** 2).mean()


def double():
    return Net(Double), (torch.randn(4, 8),)


def single():
    return Net(Single), (torch.randn(4, 8),)
"""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("factory", "precision"), [("double", EXACT), ("single", "fp32")])
def test_functions_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, precision: str) -> None:
    """They are operators of the processes that trace the model; one without float64 is run in fp32, and named."""
    (tmp_path / "proved_own.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parents[1]}:{tmp_path}")
    model = f"proved_own:{factory}"
    asked = ["--model", model, "--hardware", "cpu", "--devices", "2", "--tensor", "2", "--global-batch", "8"]
    made = CliRunner().invoke(app, [*asked, "-q", "-o", "plan.json"])
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(app, ["prove", "plan.json", "--model", model, "--small", model, "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert [one["precision"] for one in content["differences"]] == [precision]
    assert content["differences"][0]["gradient"] < (1e-12 if precision == EXACT else 1e-5)
    assert content["differences"][0]["change"] is not None
    why = content["not_in_float64"]
    assert why is None if precision == EXACT else "Single" in why and "no kernel for doubles" in why


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["prove", str(FOUR), "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["agrees"]
    assert content["complete"]
    assert [one["precision"] for one in content["differences"]] == [EXACT, "bf16"]
    done = CliRunner().invoke(app, ["prove", str(FOUR), "--processes", "2"])
    assert done.exit_code == 2
    assert "axes of 2 and a pipeline of 2 need 4 processes; give 4 or more" in done.output


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "devices"), [("llama70b", 64), ("gpt3-175b", 128), ("deepseek-v3", 2048)])
def test_plans_for_clusters(tmp_path: Path, model: str, devices: int) -> None:
    path = tmp_path / "plan.json"
    made = CliRunner().invoke(app, ["--model", model, "--devices", str(devices), "-q", "-o", str(path)])
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(app, ["prove", str(path), "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["agrees"]
    assert content["complete"], [one["missing"] for one in content["decisions"]]
