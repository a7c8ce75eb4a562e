"""Progress and Ctrl-C."""

import contextlib
import gc
import io
import math
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from planner.api import comparing
from planner.cli import limiting
from planner.cli.commands import repricing
from planner.cli.commands import show as showing
from planner.cli.commands.plan import undisturbed
from planner.cli.limiting import whole_process
from planner.cli.main import app
from planner.cli.options import Options
from planner.cli.waiting import Waiting, news_of, waiting
from planner.errors import LateError, LimitError, StoppedBy
from planner.plan.compare import differences
from planner.strategy_search import objectives
from planner.strategy_search.analysis import sensitivity
from planner.strategy_search.exploration.evaluator import Evaluator
from planner.strategy_search.exploration.families import Families
from planner.strategy_search.refinement import offloading
from planner.strategy_search.result import Progress, SearchResult
from planner.strategy_search.search import search
from tests.unit.cli.searched_once import searched_once

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
        evaluate, calls = Evaluator.evaluate, iter(range(1000))

        def pressed(self: Any, *arguments: Any) -> None:
            call = next(calls)
            for _ in range(before.count(call)):
                signal.raise_signal(signal.SIGINT)
            evaluate(self, *arguments)

        monkeypatch.setattr(Evaluator, "evaluate", pressed)

    return press


def test_an_interrupt_keeps_the_best_plan_so_far(plan: Any, interrupting: Callable[..., None]) -> None:
    interrupting(1)
    before = signal.getsignal(signal.SIGINT)
    content = plan.json(*TINY, "-o", "plan.json")
    assert content["search"]["stopped"] is True
    assert content["search"]["stopped_by"] == "interrupt"
    assert content["search"]["evaluated"] == 2
    assert plan("verify", "plan.json").code == 0
    assert signal.getsignal(signal.SIGINT) == before


def test_a_graph_that_was_kept_too_late_is_found_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*kept: bool) -> str:
        answers = iter(kept)
        monkeypatch.setattr(limiting, "is_kept", lambda options: next(answers))
        with pytest.raises(LateError) as caught, limiting.within_limits(Options(model="llama-tiny")):
            raise LateError("give it more time (--time-limit)")
        return str(caught.value)

    assert told(False, True).endswith("(--time-limit), or the same command again, which finds the graph of the model")
    assert told(False, False) == told(True) == "give it more time (--time-limit)"


def test_an_interrupted_report_says_so(plan: Any, interrupting: Callable[..., None]) -> None:
    interrupting(1)
    outcome = plan(*TINY)
    assert outcome.code == 0
    assert "Stopped by Ctrl-C; this is the best so far." in outcome.out


@pytest.mark.slow
@pytest.mark.parametrize("by", ["memory", "time"])
def test_a_limit_in_the_search_after_the_first_is_named(
    plan: Any, monkeypatch: pytest.MonkeyPatch, by: StoppedBy
) -> None:
    """The search with offload, beside a plan without it that fits."""

    def told(request: Any, *_: Any) -> SearchResult:
        found = search(request)

        def full(*_: object) -> SearchResult:
            raise LimitError("ended", by=by)

        with monkeypatch.context() as patch:
            patch.setattr(offloading, "offload_may_win", lambda *_: True)
            patch.setattr(offloading, "_offloading", lambda one: one)
            return offloading.with_faster_offload(request, found, full)

    monkeypatch.setattr(objectives, "plan_for", told)
    outcome = plan(*TINY)
    assert outcome.code == 0
    limit, option = {"memory": ("planner's memory", "--planner-memory SIZE"), "time": ("time", "--time-limit SECONDS")}[
        by
    ]
    assert f"Stopped by the {limit} limit; this is the best so far. {option} gives more." in outcome.out
    found = plan.json(*TINY)["search"]
    assert (found["stopped"], found["stopped_by"]) == (True, by)


def test_the_second_interrupt_ends_at_once(plan: Any, interrupting: Callable[..., None]) -> None:
    interrupting(1, 1)
    outcome = plan(*TINY, "-o", "plan.json")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "plan: interrupted\n")


def test_an_interrupt_before_any_plan(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Families.list_all

    def pressed(self: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        listed(self)

    monkeypatch.setattr(Families, "list_all", pressed)
    outcome = plan(*TINY, "--json")
    assert (outcome.code, outcome.err) == (130, "plan: interrupted before there was a plan\n")
    assert '"kind": "interrupted"' in outcome.out
    assert plan(*TINY, "--pareto").code == 130


@pytest.mark.parametrize(
    ("best", "bound", "words"),
    [
        (math.inf, 1.0, ("1/10 tried, nothing fits yet", "1/10 tried", "")),
        (2.0, 0.0, ("1/10 tried, best 2 s", "1/10 tried", "")),
        (
            2.0,
            1.9,
            (
                "1/10 tried, best 2 s, bound 1.9 s, gap 5.0%",
                "1/10 tried, best 2 s, bound 1.9 s",
                "1/10 tried, best 2 s",
                "1/10 tried",
                "",
            ),
        ),
    ],
)
def test_news(best: float, bound: float, words: tuple[str, ...]) -> None:
    assert news_of(Progress(total=10, done=1, best_seconds=best, bound_seconds=bound)) == words


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (120, ("searching", "━", "13/198 tried", "best 31.8 s", "bound 31.2 s", "gap 1.9%", "0:00:0")),
        (80, ("searching", "13/198 tried", "best 31.8 s", "bound 31.2 s", "gap 1.9%", "0:00:0")),
        (50, ("searching", "13/198 tried", "best 31.8 s", "0:00:0")),
        (20, ("searc", "…", "0:00:0")),
    ],
)
def test_a_line_says_as_much_as_there_is_room_for(width: int, words: tuple[str, ...]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    with waiting(console) as wait:
        wait.searched(Progress(total=198, done=13, best_seconds=31.8, bound_seconds=31.2))
    with console.capture() as shown:
        console.print(wait)
    (line,) = shown.get().splitlines()
    at = [line.index(word) for word in words]
    assert at == sorted(at)
    assert len(line) <= width


def test_what_is_printed_meanwhile_does_not_stand_behind_the_line() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    with waiting(console) as wait:
        wait.phase("pricing")
        with wait.aside():
            shown.write("a row\n")
        wait.phase("searching")
    before, after = shown.getvalue().split("a row\n")
    assert before.rpartition("\n")[2].endswith("\x1b[2K")  # the line was erased
    assert after  # and is there again


def test_nothing_is_said_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting() as wait:
        wait.phase("tracing")
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def file(plan: Any) -> str:
    """A plan file."""
    with searched_once():
        plan.json(*TINY, "--pipeline", "1", "--micro-batches", "1", "--recompute", "none", "-o", "plan.json")
    return "plan.json"


@pytest.mark.cases(1)
@pytest.mark.parametrize("words", [("show",), ("verify",), ("estimate",)], ids=" ".join)
def test_who_waits_for_a_plan_file_is_told_what_is_done(
    plan: Any, file: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Told(Waiting):
        def phase(self, text: str, at: int | None = None, total: int | None = None) -> None:
            told.append(text)

    for module in (showing, repricing):
        monkeypatch.setattr(module, "waiting", lambda *console: contextlib.nullcontext(Told()))
    plan(*words, file)
    assert told[0] == "tracing the model"
    assert told[1] in ("checking the plan", "pricing the plan")


@pytest.mark.slow
@pytest.mark.thorough
def test_an_interrupted_explanation_has_what_was_found(plan: Any, file: str, interrupting: Callable[..., None]) -> None:
    searched = plan.json("explain", file, "--no-search")["sensitivities"]
    interrupting(0)
    content = plan.json("explain", file)
    assert content["stopped"] is True
    asked = [row for row in searched if row["name"] != "sequence length"]  # nothing traced
    assert [(row["name"], row["kept"]) for row in content["sensitivities"]] == [
        (row["name"], row["kept"]) for row in asked
    ]
    interrupting(0)
    outcome = plan("explain", file, "*.mlp.up_proj*")
    assert outcome.code == 0
    assert "Stopped by Ctrl-C: what was not looked at by then is missing." in outcome.out
    assert "chosen" in outcome.out


@pytest.mark.slow
@pytest.mark.thorough
def test_an_explanation_that_ran_out_of_time_says_so(plan: Any, file: str) -> None:
    assert plan.json("explain", file, "*.mlp.up_proj*", "--time-limit", "0")["stopped"] is True
    outcome = plan("explain", file, "*.mlp.up_proj*", "--time-limit", "0")
    assert "Not all was searched again within 0 s; --time-limit SECONDS gives more." in outcome.out
    assert plan.json("explain", file, "*.mlp.up_proj*", "--no-search")["stopped"] is False


def test_an_interrupted_explanation_without_anything_says_so(
    plan: Any, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured = sensitivity._worlds

    def pressed(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return configured(*arguments)

    monkeypatch.setattr(sensitivity, "_worlds", pressed)
    outcome = plan("explain", file, "--json")
    assert (outcome.code, outcome.err) == (130, "plan: interrupted before anything was known\n")
    outcome = plan("explain", file)  # where the time goes was said at once
    assert outcome.code == 0
    assert "Why it takes that long" in outcome.out
    assert "Stopped by Ctrl-C: what was not looked at by then is missing." in outcome.out


@pytest.mark.slow
@pytest.mark.thorough
def test_an_interrupted_comparison_prices_what_is_left_at_once(
    plan: Any, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.json(*TINY, "--pipeline", "2", "--zero", "0", "--recompute", "full", "--global-batch", "32", "-o", "b.json")
    whole = plan.json("diff", file, "b.json")
    assert len(whole["steps"]) > 2
    assert whole["stopped"] is False
    reprice, calls = differences.repriced, iter(range(1000))

    def pressed(*arguments: Any) -> Any:
        if next(calls) == 2:  # both plans are priced, and the first on the way is about to be
            signal.raise_signal(signal.SIGINT)
        return reprice(*arguments)

    monkeypatch.setattr(differences, "repriced", pressed)
    content = plan.json("diff", file, "b.json")
    assert content["stopped"] is True
    first, last = content["steps"]
    assert first == whole["steps"][0]
    named = [one["name"] for step in whole["steps"][1:] for one in step["differences"]]
    assert sorted(one["name"] for one in last["differences"]) == sorted(named)
    assert last["step_seconds_after"] == whole["second"]["step_seconds"]


@pytest.mark.thorough
def test_an_interrupted_report_has_what_was_found(plan: Any, file: str, interrupting: Callable[..., None]) -> None:
    interrupting(1)
    choices = plan.json("report", file)["choices"]
    assert "The search was stopped before its end" in choices["note"]
    assert sum(one["this"] for one in choices["plans"]) == 1


def test_the_garbage_collector_looks_through_what_is_left_unless_the_process_ends_with_it() -> None:
    before = gc.get_freeze_count()
    with undisturbed():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == before
    try:
        with whole_process(), undisturbed():
            pass
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_ctrl_c_while_a_model_is_traced_ends_a_comparison_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken as a request to stop, which nobody reads before the model is traced and its search begins."""
    trace = comparing.trace

    def traced(model: str, **options: Any) -> Any:
        if model == "gpt-tiny":
            signal.raise_signal(signal.SIGINT)
            pytest.fail("traced on")
        return trace(model, **options)

    monkeypatch.setattr(comparing, "trace", traced)
    call = ["compare", "--devices", "1", "--hardware", "cpu", "--seq-len", "16", "--model"]
    assert CliRunner().invoke(app, [*call, "gpt-tiny"]).exit_code == 130
    found = CliRunner().invoke(app, [*call, "llama-tiny,gpt-tiny"])
    assert found.exit_code == 0
    assert "Stopped by Ctrl-C: cases that were not searched by then are missing." in found.stdout
    call = ["capacity", "--days", "1", "--tokens", "1G", "--hardware", "cpu", "--model", "gpt-tiny"]
    assert CliRunner().invoke(app, call).exit_code == 130
