"""`python -m runtime` as one rank of several, started by others: mpirun, agents of torchrun, srun's variables, a rank
table. Each run computes what the same plan computes when it starts its own processes."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.file import save_plan
from runtime.launch.launch import launch
from runtime.processes.progress import Report, StepReport
from runtime.run_settings import RunSettings
from tests.distributed.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import torch


class Square(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.weight).pow(2).mean()


def make():
    return Square(), (torch.randn(2, 4),)
"""
RUN = [
    sys.executable,
    "-m",
    "runtime",
    "plan.json",
    "--model",
    "launched_model:make",
    "--steps",
    "2",
    "--json",
    "--timeout",
    "60",
]
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "SLURM_", "OMPI_", "PMIX_", "TORCHELASTIC_", "GROUP_")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with a plan for two processes and its model."""
    path = tmp_path_factory.mktemp("launched")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(str(path))
        _write_plan(path)
        yield path


def _write_plan(path: Path) -> None:
    specification = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("plans.py"))
    assert specification is not None
    assert specification.loader is not None
    plans = importlib.util.module_from_spec(specification)
    sys.modules["plans"] = plans
    specification.loader.exec_module(plans)
    (path / "launched_model.py").write_text(MODULE)
    built = build_model("launched_model:make", dtype="float32", device="cpu", sequence_length=None)
    graph = trace(built.module, built.args, built.kwargs)
    plan = plans.hand_plan("zero1", "launched_model:make", plans.mesh_of(2), graph=graph, samples=2, micro_batches=2)
    save_plan(replace(plan, model=replace(plan.model, sequence_length=None)), path / "plan.json")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """That of a process that nobody has launched, and more."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**clean, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1", **more}


def together(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> tuple[int, str, str]:
    """Run several commands at once; the worst exit code, and what all of them wrote."""
    started = [
        subprocess.Popen(command, env=dict(own), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, own in zip(commands, environments, strict=True)
    ]
    try:
        written = [one.communicate(timeout=180) for one in started]
    finally:
        for one in started:
            one.kill()
    code = max(abs(one.returncode) for one in started)
    return code, "".join(out for out, _ in written), "".join(err for _, err in written)


def losses_of(written: str) -> list[float]:
    """The losses, which one rank reports."""
    events = [json.loads(line) for line in written.splitlines()]
    assert [event["event"] for event in events] == ["step", "step", "summary"]
    assert events[-1]["agrees"]
    return [event["loss"] for event in events[:-1]]


@pytest.fixture(scope="module")
def usual(folder: Path) -> list[float]:
    """The losses of the plan that starts its own processes."""
    found: list[Report] = []
    assert launch("plan.json", RunSettings(model="launched_model:make", steps=2), found.append) == 0
    return [report.loss for report in found if isinstance(report, StepReport)]


def needs_mpirun() -> list[str]:
    found = shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun on PATH: apt-get install openmpi-bin")
    return [found, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


@pytest.mark.exhaustive
def test_under_mpirun(folder: Path, usual: list[float]) -> None:
    mpirun = needs_mpirun()
    code, out, errors = together([[*mpirun, "-n", "2", *RUN]], [environment(folder)])
    assert code == 0, errors
    assert errors.count("started by Open MPI: 2 processes on 1 host, which meet at 127.0.0.1:") == 1
    assert losses_of(out) == usual


@pytest.mark.thorough
def test_mpirun_with_another_number_of_processes(folder: Path) -> None:
    mpirun = needs_mpirun()
    code, out, errors = together([[*mpirun, "-n", "3", *RUN]], [environment(folder)])
    assert code == 2, errors
    assert out == ""
    assert "error: the plan is for 2 devices, and Open MPI started 3 processes; start 2, or plan for 3" in errors


@pytest.mark.exhaustive
def test_under_two_agents_of_torchrun(folder: Path, usual: list[float]) -> None:
    """As on two hosts, each with its agent."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
             "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two",
             "--local-addr", "127.0.0.1", *RUN[1:]]  # fmt: skip
    code, out, errors = together([agent, agent], [environment(folder)] * 2)
    assert code == 0, errors
    assert "started by torchrun: 2 processes" in errors
    assert losses_of(out) == usual


@pytest.mark.exhaustive
def test_under_the_variables_of_slurm(folder: Path, usual: list[float]) -> None:
    """Two tasks on two hosts, of which the first is this machine by a name of its own."""
    own = {
        "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0",
        "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost,node[1-1]", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    both = [environment(folder, SLURM_PROCID=str(rank), SLURM_NODEID=str(rank), **own) for rank in range(2)]
    code, out, errors = together([RUN, RUN], both)
    assert code == 0, errors
    assert f"started by Slurm: 2 processes on 2 hosts, which meet at localhost:{own['MASTER_PORT']}" in errors
    assert losses_of(out) == usual


@pytest.mark.exhaustive
def test_under_a_rank_table(folder: Path, usual: list[float]) -> None:
    devices = [{"device_id": str(rank), "device_ip": f"192.0.2.{rank}", "rank_id": str(rank)} for rank in range(2)]
    table = {"version": "1.0", "server_count": "1", "server_list": [{"server_id": "10.0.0.1", "device": devices}]}
    (folder / "table.json").write_text(json.dumps({**table, "status": "completed"}))
    own = {"RANK_TABLE_FILE": "table.json", "MASTER_PORT": str(free_port())}
    code, out, errors = together([RUN, RUN], [environment(folder, RANK_ID=str(rank), **own) for rank in range(2)])
    assert code == 0, errors
    assert "started by a rank table: 2 processes on 1 host" in errors
    assert losses_of(out) == usual
