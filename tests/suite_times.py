"""Where the time of the tests goes.

    CPU seconds of a test      of its own process and of those that it started and waited for, and of the workers of a
                               pool as they report it (`tests/distributed`); never the clock, so a busy machine counts
                               for nothing
    of a file                  of its tests, with what was made ready for them (fixtures)

`make test` prints the ten files that take most, and how long all took. A test whose own process takes more than `SLOW`
CPU seconds bears the mark `slow`: somebody should know what it costs. One that takes half as much again and has no mark
is named at the end. It fails no run: two tests that share a processor's caches take up to twice the CPU seconds of one.
On a slower machine the limit is as many times higher as a fixed piece of work takes longer there.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SLOW = 2.0
"""CPU seconds, on a machine that counts `_LOOPS` in `_USUAL` seconds."""

_LOOPS, _USUAL = 1_000_000, 0.05
_SHOWN = 10
_SPENT = "CPU seconds"

_elsewhere = [0.0]  # CPU seconds of workers, as they have reported them


def worked(seconds: float) -> None:
    """Count CPU seconds of a process that lives on, such as a worker of a pool, for the test that is running."""
    _elsewhere[0] += seconds


def _spent() -> tuple[float, float]:
    """CPU seconds so far: of this process; of it, its children that have ended, and workers."""
    spent, own = os.times(), time.process_time()
    return own, own + spent.children_user + spent.children_system + _elsewhere[0]


class Meter:
    """Adds to each report what its phase took. Runs where tests run."""

    def __init__(self) -> None:
        self._before = _spent()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """What was collected before is no test's."""
        self._before = _spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        before, self._before = self._before, _spent()
        own, spent = (now - then for now, then in zip(self._before, before, strict=True))
        marked = item.get_closest_marker("slow") is not None
        report.user_properties = [*report.user_properties, (_SPENT, (own, spent, marked))]
        return report


class Summary:
    """Adds up what reports say, and prints it. Runs where reports are read."""

    def __init__(self, log: Path | None) -> None:
        self._began = time.monotonic()
        self._slow = SLOW * max(1.0, _loop_seconds() / _USUAL)
        self._files: dict[str, float] = defaultdict(float)
        self._unmarked: dict[str, float] = {}
        self._log = log

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(_SPENT)
        if found is None:
            return
        own, spent, marked = found
        self._files[report.location[0]] += spent
        if report.when == "call" and own > 1.5 * self._slow and not marked:
            self._unmarked[report.nodeid] = own
        if self._log is not None:
            line = {"test": report.nodeid, "when": report.when, "own": own, "cpu": spent, "clock": report.duration}
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "outcome": report.outcome}) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The files that took most, and tests that are slow without saying so."""
        if not self._files:
            return
        total, minutes = sum(self._files.values()), (time.monotonic() - self._began) / 60
        terminalreporter.section(f"{minutes:.1f} min, {total:.0f} CPU s in tests; most of it in")
        for name, spent in sorted(self._files.items(), key=lambda item: -item[1])[:_SHOWN]:
            terminalreporter.write_line(f"{spent:7.1f} CPU s  {name}")
        if self._unmarked:
            terminalreporter.section("slow tests without the mark", red=True)
            for name, own in sorted(self._unmarked.items(), key=lambda item: -item[1]):
                terminalreporter.write_line(f"{own:7.1f} CPU s  {name}: make it quicker, or mark it with `slow`")


def register(config: pytest.Config) -> None:
    """Measure in the processes that run tests, sum up in the one that prints."""
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter(), "meter")
    if not is_worker:
        given = config.getoption("--cpu-times")
        config.pluginmanager.register(Summary(Path(given) if given else None), "summary of times")


def _loop_seconds() -> float:
    """CPU seconds of a fixed piece of work; the least of a few, as the first ones warm up."""
    found = []
    for _ in range(3):
        before = time.process_time()
        for _ in range(_LOOPS):
            pass
        found.append(time.process_time() - before)
    return min(found)
