"""What is timed on an accelerator: by the clock of the device, which here is that of the host."""

import time

import pytest
import torch

from runtime.profiling import measuring, microbenchmarks
from runtime.profiling.microbenchmarks import cases, small_model

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


def test_kernels_of_a_model_by_hand_are_counted_in_both_passes() -> None:
    """Of a block: 4 products forward and 8 backward, attention and its gradient, two norms, gelu and two sums."""
    call, kernels = small_model(CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        call()
    calls = {event.key: event.count for event in found.key_averages()}
    blocks = calls["aten::gelu"]
    assert calls["aten::addmm"] + calls["aten::mm"] == (4 + 8) * blocks
    assert 25 * blocks < kernels < 35 * blocks
    assert measuring._host(CPU, measuring.EFFORTS["least"]) > 0


def test_a_collective_between_products_takes_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that sleep while a rank computes, and ranks that come late, cost a step more than calls in a row do."""
    took = {"call": 1e-3, "product": 3e-3, "between": 7e-3}
    monkeypatch.setattr(measuring, "_product", lambda device: "product")
    monkeypatch.setattr(measuring, "_seconds", lambda call, *_, **__: took.get(call, took["between"]))
    effort = measuring.EFFORTS["least"]
    assert measuring._added("call", CPU, effort) == pytest.approx(4e-3)  # type: ignore[arg-type]
    took["between"] = 3.5e-3
    assert measuring._added("call", CPU, effort) == 1e-3  # type: ignore[arg-type]
    assert measuring._added("call", torch.device("cuda"), effort) == 1e-3  # type: ignore[arg-type]


def test_what_products_cover_is_measured_beside_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products take twice as long as the collective at least; it starts before them and is waited for behind."""
    said: list[str] = []
    monkeypatch.setattr(measuring, "_product", lambda device: lambda: said.append("product"))
    monkeypatch.setattr(measuring, "_added", lambda *_: 5e-3)
    monkeypatch.setattr(measuring, "_seconds", lambda call, *_, **__: call() or 1e-3 * len(said))

    class Work:
        def wait(self) -> None:
            said.append("wait")

    def start() -> Work:
        said.append("start")
        return Work()

    alone, computed, both = measuring._beside_products(start, CPU, measuring.EFFORTS["least"])  # type: ignore[arg-type]
    assert (alone, computed) == (5e-3, pytest.approx(11e-3))  # one product, then ten
    assert both > computed
    assert said[11:] == ["start", *["product"] * 10, "wait"]


@pytest.mark.parametrize(("one", "kernels"), [(True, {2}), (False, {8})])
def test_an_update_by_one_kernel_is_not_taken_for_eight(
    one: bool, kernels: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit divides what short updates take by it, for the latency of a launch."""
    monkeypatch.setattr(microbenchmarks, "has_one_kernel", lambda name, device_type: one)
    rows = [case.row(1.0) for case in cases(torch.device("cuda"), 1)]
    assert {row.kernels for row in rows if row.op_class == "optimizer"} == kernels
