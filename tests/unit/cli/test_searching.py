"""Progress and Ctrl-C."""

import math
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from planner.cli.searching import news_of
from planner.search import search as searching
from planner.search.search import Progress

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "4")


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    """Ctrl-C means what it does in a terminal, also where a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Press Ctrl-C some times before certain evaluations."""

    def press(*before: int) -> None:
        evaluate, calls = searching._Search._evaluate, iter(range(1000))

        def pressed(self: Any, *arguments: Any) -> None:
            call = next(calls)
            for _ in range(before.count(call)):
                signal.raise_signal(signal.SIGINT)
            evaluate(self, *arguments)

        monkeypatch.setattr(searching._Search, "_evaluate", pressed)

    return press


def test_an_interrupt_keeps_the_best_plan_so_far(plan: Any, interrupting: Callable[..., None]) -> None:
    interrupting(1)
    before = signal.getsignal(signal.SIGINT)
    content = plan.json(*TINY, "-o", "plan.json")
    assert content["search"]["stopped"] is True
    assert content["search"]["evaluated"] == 2
    assert plan("verify", "plan.json").code == 0
    assert signal.getsignal(signal.SIGINT) == before


def test_an_interrupted_report_says_so(plan: Any, interrupting: Callable[..., None]) -> None:
    interrupting(1)
    outcome = plan(*TINY)
    assert outcome.code == 0
    assert "Stopped by Ctrl-C; this is the best so far." in outcome.out


def test_the_second_interrupt_ends_at_once(plan: Any, interrupting: Callable[..., None]) -> None:
    interrupting(1, 1)
    outcome = plan(*TINY, "-o", "plan.json")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "plan: interrupted\n")


def test_an_interrupt_before_any_plan(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = searching._Search._open_families

    def pressed(self: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        opened(self)

    monkeypatch.setattr(searching._Search, "_open_families", pressed)
    outcome = plan(*TINY, "--json")
    assert (outcome.code, outcome.err) == (130, "plan: interrupted before there was a plan\n")
    assert '"kind": "interrupted"' in outcome.out
    assert plan(*TINY, "--pareto").code == 130


@pytest.mark.parametrize(
    ("best", "bound", "words"),
    [
        (math.inf, 1.0, "nothing fits yet"),
        (2.0, 0.0, "best 2 s"),
        (2.0, 1.9, "best 2 s, bound 1.9 s, gap 5.0%"),
    ],
)
def test_news(best: float, bound: float, words: str) -> None:
    assert news_of(Progress(total=10, done=1, best_seconds=best, bound_seconds=bound)) == words
