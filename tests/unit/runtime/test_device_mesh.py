"""Which device a process has."""

import os

import pytest
import torch

from planner.errors import RequestError
from planner.sharding.mesh import Mesh, MeshAxis
from runtime.comm.device_mesh import current_device, join_processes, rank_mesh
from runtime.launchers.own import environment_of
from runtime.offload.copy_streams import here
from tests.refusals import refused


def test_processes_without_an_accelerator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert current_device(1) == torch.device("cuda", 1)
    with refused(RequestError, "process 2", 2, "cuda"):
        current_device(2)


def test_the_only_device_that_slurm_shows_a_process_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `srun --gpus-per-task 1` every task sees one device, whatever its number on the node is."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with refused(RequestError, "process 2", 1, "cuda"):
        current_device(2)
    task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2"}
    monkeypatch.setattr(os, "environ", {**task, "SLURM_STEP_NODELIST": "node1"})
    assert current_device(2) == torch.device("cuda", 0)
    monkeypatch.setattr(os, "environ", environment_of(2, 4, "store", 29500))  # `plan run` shows all to each process
    with refused(RequestError, "process 2", 1, "cuda"):
        current_device(2)


def test_one_process_that_nobody_launched_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    two = Mesh(axes=(MeshAxis(name="axis0", size=2, stride=1, bandwidth=1e9),))
    with refused(RequestError, 2, 1, "torchrun", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        rank_mesh(two, torch.device("cpu"))


def test_processes_share_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert current_device(7) == torch.device("cpu")


def test_the_device_becomes_the_current_one_although_the_program_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else copies on other streams would wait for device 0, and messages of all ranks would be on it."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for device in (torch.device("cuda", 1), torch.device("cuda"), torch.device("cpu")):
        join_processes(device)
    assert chosen == [torch.device("cuda", 1)]


def test_a_mark_is_in_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device | None] = []

    class Recorded:
        def record_event(self) -> None: ...

    def stream(device: torch.device | None = None) -> Recorded:
        asked.append(device)
        return Recorded()

    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    here(torch.device("cuda", 1))
    assert asked == [torch.device("cuda", 1)]
