"""Two passes that take turns: only one of them runs at a time, and both are through at the end."""

import threading

import pytest
import torch

from runtime.executor.alternation import Alternation


def test_each_goes_on_where_the_other_one_waits() -> None:
    alternation, told = Alternation(torch.device("cpu")), list[str]()

    def steps(name: str, count: int) -> str:
        for number in range(count):
            told.append(f"{name}{number}")
            alternation.switch()
        return name

    assert alternation.run(lambda: steps("b", 2), lambda: steps("f", 4)) == ("b", "f")
    assert told == ["b0", "f0", "b1", "f1", "f2", "f3"]
    told.clear()
    assert alternation.run(lambda: steps("b", 3), lambda: steps("f", 1)) == ("b", "f")
    assert told == ["b0", "f0", "b1", "b2"]
    alternation.switch()  # alone: nothing happens


def test_what_either_raises_is_raised_when_both_are_through() -> None:
    alternation, told = Alternation(torch.device("cpu")), list[str]()

    def fails() -> None:
        alternation.switch()
        raise ValueError("of one")

    def goes_on() -> None:
        for _ in range(3):
            alternation.switch()
        told.append("through")

    for one, other in ((fails, goes_on), (goes_on, fails)):
        with pytest.raises(ValueError, match="of one"):
            alternation.run(one, other)
    assert told == ["through", "through"]
    assert alternation.run(lambda: 1, lambda: 2) == (1, 2)


def test_gradients_of_a_pass_that_another_thread_recorded() -> None:
    alternation, x = Alternation(torch.device("cpu")), torch.ones(3, requires_grad=True)
    _, made = alternation.run(lambda: None, lambda: (2 * x).sum())
    made.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_the_other_thread_computes_on_the_stream_of_the_one_that_began(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: told.extend((threading.get_ident(), stream)))
    threads = Alternation(torch.device("cuda:0")).run(lambda: None, threading.get_ident)
    assert told == [threads[1], "stream of cuda:0"]
