"""What is said beside an infeasible request, and beside a plan."""

import math
from types import SimpleNamespace
from typing import cast

import pytest

from hardware_profiles import load_profile
from planner.errors import InfeasibleError, LimitError, PlannerError, RequestError
from planner.sharding.update import Update
from planner.strategy_search.analysis import advice, sensitivity
from planner.strategy_search.analysis.sensitivity import World
from tests.unit.search.cases import cluster_of, request_of


def test_more_devices_than_samples_come_with_more_samples_in_words_too() -> None:
    request = request_of("llama-4", cluster_of("cpu", 2), 7, update=Update(padding_samples=1))
    steps = [(text, made()) for text, made in advice._more_devices(request)[:3]]
    assert [text for text, _ in steps] == [
        "4 devices (--devices 4)",
        "8 devices (--devices 8)",
        "16 devices and as many samples (--devices 16 --global-batch 16)",
    ]
    assert [(one.cluster.devices, one.padded_batch) for _, one in steps] == [(4, 8), (8, 8), (16, 16)]


def test_larger_devices_that_are_slower_come_last() -> None:
    request = request_of("llama-4", cluster_of("h100-80gb", 8), 8)
    profiles = [text.partition("--hardware ")[2].rstrip(")") for text, _ in advice._larger_devices(request, None)]
    peaks = [load_profile(name).device.peak(request.precision) for name in profiles]
    own = cluster_of("h100-80gb", 8).device.peak(request.precision)
    slower = [peak < own for peak in peaks]
    assert slower == sorted(slower)
    assert profiles.index("h200-141gb") < profiles.index("h20-141gb")


@pytest.mark.parametrize(
    ("error", "words"),
    [(InfeasibleError("does not fit"), None), (LimitError("late"), "lean"), (RequestError("not legal"), None)],
)
def test_what_fits_in_no_whole_plan_is_not_advised(
    monkeypatch: pytest.MonkeyPatch, error: PlannerError, words: str | None
) -> None:
    """The leanest configuration seems to fit, and its plan does not."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(advice, "anything_fits", lambda *_: True)
    monkeypatch.setattr(advice, "best_plans", refuse)
    asked = request_of("llama-4", cluster_of("h100-80gb", 8), 8)
    advisor = advice._Advisor(end=math.inf, cancelled=lambda: False, on_change=lambda _: None)
    found = advisor.first([("lean", lambda: asked)])
    assert (found and found.text) == words


@pytest.mark.parametrize(("devices", "words"), [(1, "there is one device"), (3, "3 devices cannot be halved")])
def test_an_odd_number_of_devices_has_no_half(devices: int, words: str) -> None:
    world = cast(World, SimpleNamespace(cluster=cluster_of("cpu", devices)))
    assert sensitivity._devices(world, 0.5) == words
