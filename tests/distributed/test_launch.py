"""`python -m runtime` and `launch`: real processes on loopback, on good days."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

from hardware_profiles.run_record import load_run_record
from planner.cli.schemas import ANSWERS
from planner.errors import RequestError
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.file import save_plan
from planner.plan.plan import Plan
from runtime.launch.launch import launch
from runtime.launch.training import train
from runtime.processes.progress import Report, RunSummary, StepReport
from runtime.run_settings import RunSettings
from tests.distributed.forked_ranks import forked_ranks
from tests.distributed.listening import listening_meanwhile
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]


def _plans() -> ModuleType:
    specification = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("plans.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["plans"] = module
    specification.loader.exec_module(module)
    return module


def plan_for(reference: str, sequence_length: int | None) -> Plan:
    plans = _plans()
    built = build_model(reference, dtype="float32", device="cpu", sequence_length=sequence_length)
    graph = trace(built.module, built.args, built.kwargs)
    plan = plans.hand_plan("zero1", reference, plans.mesh_of(2), graph=graph, samples=built.batch, micro_batches=2)
    return replace(plan, model=replace(plan.model, sequence_length=sequence_length))


def reports_of(path: Path, **settings: object) -> tuple[int, list[StepReport], RunSummary]:
    """Exit code and reports of a run."""
    found: list[Report] = []
    code = launch(path, RunSettings(**settings), found.append)  # type: ignore[arg-type]
    *steps, summary = found
    assert isinstance(summary, RunSummary)
    assert all(isinstance(step, StepReport) for step in steps)
    return code, steps, summary  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_plan_agrees_with_the_unsharded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan_for("llama-tiny", 8), path)
    monkeypatch.setenv("MARK", str(path))
    with listening_meanwhile(str(path)) as sockets:
        code, steps, summary = reports_of(path, steps=3)
    assert len(sockets) > 2, "each rank has some"
    assert [one for one in sockets if not one.on_loopback] == [], "nobody else can talk to the run"
    assert code == 0
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(step.difference < 1e-4 and step.tokens == 32 for step in steps)
    assert summary.agrees
    assert summary.seconds == steps[2].seconds, "the first two do not count"
    assert len(summary.peak_bytes) == 2
    assert min(summary.peak_bytes) > 0
    assert "plan calibrate" in summary.elsewhere, "the shipped profile describes no machine in particular"


@pytest.mark.thorough
def test_a_measured_run_is_recorded_term_by_term(tmp_path: Path) -> None:
    path, record = tmp_path / "plan.json", tmp_path / "run.json"
    plan = plan_for("llama-tiny", 8)
    save_plan(plan, path)
    with forked_ranks():
        code, steps, _ = reports_of(path, steps=6, check=False, measure=str(record))
    assert code == 0
    run = load_run_record(record)
    assert (run.plan.model, run.plan.devices, len(run.ranks)) == ("llama-tiny", 2, 2)
    assert run.step_seconds == tuple(step.seconds for step in steps[2:5]), "warm-up and the profiled step are left out"
    assert run.profiled_seconds == steps[5].seconds
    assert sum(run.ranks[0].seconds.values()) == pytest.approx(fmean(run.step_seconds)), "steps are those of rank 0"
    for rank in run.ranks:
        assert min(rank.seconds.values()) > -1e-9, "nothing counts twice, so that something is left of a step"
        assert min(rank.seconds[name] for name in ("forward", "backward", "update", "reduction")) > 0
        assert rank.memory["weights"] == dict(plan.prediction.memory).get("weights", rank.memory["weights"])
    assert run.operators["matmul"] > 0
    assert {one.phase for one in run.collectives} >= {"update"}
    with refused(RequestError, "--measure", "--steps 4", 5):
        list(train(plan, RunSettings(steps=4, measure=str(record))))


MODULE = """
import torch
from torch.utils.data import Dataset


class Square(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x, scale):
        return ((x @ self.weight) * scale).pow(2).mean()


def make():
    return Square(), (torch.randn(2, 4),), {"scale": torch.randn(2, 4)}


class Rows(Dataset):
    def __len__(self):
        return 13

    def __getitem__(self, number):
        return {"scale": torch.rand(4), "x": torch.full((4,), 1.0 + number)}


def rows():
    print("the dataset is open", flush=True)
    return Rows()
"""


@pytest.mark.exhaustive
def test_a_dataset_is_read_whole_or_in_pieces_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Mappings in another order, values drawn by the dataset, shuffled, with a worker."""
    (tmp_path / "squares.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_plan(plan_for("squares:make", None), tmp_path / "plan.json")
    settings = {"steps": 3, "model": "squares:make", "dataset": "squares:rows", "shuffle": True}
    code, whole, summary = reports_of(tmp_path / "plan.json", **settings)
    assert code == 0
    assert summary.data == "squares:rows"
    assert "the dataset is open" in capfd.readouterr().out
    code, own, _ = reports_of(tmp_path / "plan.json", full_batch=False, workers=1, **settings)
    assert code == 0
    assert [step.loss for step in own] == [step.loss for step in whole]
    assert len({step.loss for step in own}) == 3


@pytest.mark.exhaustive
def test_a_batch_that_breaks_is_skipped_by_the_plan_and_by_the_unsharded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squares.py").write_text(
        MODULE.replace("1.0 + number", 'float("nan") if number == 5 else 1.0 + number')
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "squares", raising=False)
    save_plan(plan_for("squares:make", None), tmp_path / "plan.json")
    code, steps, _ = reports_of(
        tmp_path / "plan.json", steps=3, model="squares:make", dataset="squares:rows", on_nonfinite="skip"
    )
    assert code == 0, "the steps before and after agree"
    assert [step.trouble for step in steps] == [None, "the loss is nan", None, None]  # another batch in its place
    assert "NO UPDATE: the loss is nan" in steps[1].text()


@pytest.mark.exhaustive
def test_json_is_one_object_per_step_and_a_summary(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan_for("llama-tiny", 8), path)
    command = [sys.executable, "-m", "planner.cli.main", "run", str(path), "--steps", "1", "--no-check", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    step, summary = map(json.loads, done.stdout.splitlines())
    for line in done.stdout.splitlines():
        ANSWERS["plan run"].model_validate_json(line)
    assert (step["event"], step["step"], step["unsharded"]) == ("step", 1, None)
    assert (summary["event"], summary["seconds"], summary["agrees"]) == ("summary", None, None)


SCRIPT = """
import sys

import torch
import torch.distributed as dist

import runtime
import squares

torch.manual_seed(0)
model, *_ = squares.make()
step = runtime.parallelize(model, "plan.json")
data = runtime.loader(squares.Rows(), step, shuffle=True, full_batch=sys.argv[1] == "whole")
losses = [step(batch) for batch in data]
if dist.get_rank() == 0:
    print(losses, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_a_script_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It joins the processes by itself, and reads as it likes."""
    (tmp_path / "squares.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_plan(plan_for("squares:make", None), tmp_path / "plan.json")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "script.py"]  # fmt: skip
    found = []
    for how in ("whole", "own"):
        done = subprocess.run([*command, how], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert len(found[0]) == 3
