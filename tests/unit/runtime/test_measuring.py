"""What is timed on an accelerator: by the clock of the device, which here is that of the host."""

import time

import pytest
import torch

from runtime.profiling import measuring, microbenchmarks
from runtime.profiling.microbenchmarks import block_of_operators, cases

CPU = torch.device("cpu")


class Clock:
    """An event of a device that is done when it is recorded."""

    def __init__(self, *_: object, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Clock") -> float:
        return 1e3 * (end.at - self.at)


def test_short_calls_are_queued_behind_products_that_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch, "Event", Clock)
    monkeypatch.setattr(torch, "mm", lambda *_: said.append("product") or time.sleep(1e-3))
    monkeypatch.setattr(measuring, "_AHEAD", 1)
    seconds = measuring._queued(lambda: said.append("call") or time.sleep(2e-4), 5e-4, CPU)
    assert 2e-4 < seconds < 5e-3
    assert said.count("call") == measuring._QUEUED
    assert said[-measuring._QUEUED :] == ["call"] * measuring._QUEUED
    assert said.count("product") > 3


def test_operators_of_a_block_are_counted_forward_and_backward() -> None:
    call, operators = block_of_operators(CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        call()
    names = {"aten::linear", "aten::layer_norm", "aten::silu", "aten::mul", "aten::add"}
    forward = sum(event.count for event in found.key_averages() if event.key in names - {"aten::mul", "aten::add"})
    assert operators == 2 * 5 * (forward // 3)


def test_a_host_that_computes_launches_nothing() -> None:
    assert measuring._host(CPU, measuring.EFFORTS["least"]) == 0.0


@pytest.mark.parametrize(("one", "kernels"), [(True, {2}), (False, {8})])
def test_an_update_by_one_kernel_is_not_taken_for_eight(
    one: bool, kernels: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit divides what short updates take by it, for the latency of a launch."""
    monkeypatch.setattr(microbenchmarks, "has_one_kernel", lambda name, device_type: one)
    rows = [case.row(1.0) for case in cases(torch.device("cuda"), 1)]
    assert {row.kernels for row in rows if row.op_class == "optimizer"} == kernels
