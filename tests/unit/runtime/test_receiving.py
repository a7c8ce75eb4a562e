"""Receives of pipelines are posted a turn ahead, in the order of the turns, and as many as these take."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.step.receiving import Line
from runtime.step.stage_links import Crossing


class Posted:
    """What stands in for a receive: the number of the message that it gets, once somebody waits for it."""

    def __init__(self, value: torch.Tensor, number: int, log: list[str]) -> None:
        self.value, self.number, self.log = value, number, log

    def wait(self) -> None:
        self.log.append(f"wait {self.number}")
        self.value.fill_(self.number)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was posted and waited for, in order."""
    told: list[str] = []

    def irecv(value: torch.Tensor, source: int, group: Any) -> Posted:
        number = sum(word.startswith("post") for word in told)
        told.append(f"post {number}")
        return Posted(value, number, told)

    monkeypatch.setattr(dist, "irecv", irecv)
    return told


def line(together: int, *names: str) -> Line:
    crossings = [Crossing(name=name, shape=(2,), dtype=torch.float32, differentiable=True) for name in names]
    group: Any = None
    return Line(crossings=crossings, rank=0, group=group, device=torch.device("cpu"), together=together)


def test_the_next_turn_is_posted_when_one_is_taken(log: list[str]) -> None:
    values = line(1, "x")
    values.expect(3, post=True)
    assert log == ["post 0"]
    taken = [[float(value[0]) for value in values.take()] for _ in range(3)]
    assert taken == [[0.0], [1.0], [2.0]]
    assert log == ["post 0", "wait 0", "post 1", "wait 1", "post 2", "wait 2"]  # and none is left


def test_gradients_are_posted_when_they_may_come(log: list[str]) -> None:
    gradients = line(2, "x", "mask")
    gradients.expect(1, post=False)
    assert log == []
    gradients.post()
    gradients.post()  # nothing new before these are taken
    assert log == [f"post {number}" for number in range(4)]
    assert [float(value[0]) for value in gradients.take()] == [0.0, 1.0, 2.0, 3.0]
    assert log[4:] == [f"wait {number}" for number in range(4)]
