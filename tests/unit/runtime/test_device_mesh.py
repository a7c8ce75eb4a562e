"""Which device a process has."""

import pytest
import torch

from planner.errors import RequestError
from runtime.comm.device_mesh import current_device
from tests.refusals import refused


def test_processes_without_an_accelerator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert current_device(1) == torch.device("cuda", 1)
    with refused(RequestError, "process 2", 2, "cuda"):
        current_device(2)


def test_processes_share_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert current_device(7) == torch.device("cpu")
