"""The limits of the planner: who may ask, what an inner limit may do, and how code that never asks is ended."""

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from planner import limits
from planner.errors import LimitError
from planner.graph.trace import trace
from planner.limits import (
    Limits,
    available_bytes,
    check,
    check_late,
    checked,
    finishing,
    interrupting,
    limited,
    reached,
    room,
    seconds_left,
)
from tests.refusals import refused

GIB = 2**30

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""An interruption that a finalizer swallows is told there, and made again."""


def ticking(step: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by a step whenever it is read."""
    ticks = count()
    return lambda: step * next(ticks)


def test_without_limits_nothing_is_refused() -> None:
    check()
    room(1e30, "everything")
    assert not reached()
    assert seconds_left() == math.inf


def test_time_is_over_after_so_many_looks_at_the_clock() -> None:
    with limited(seconds=3.0, clock=ticking()):
        assert list(checked("ab")) == ["a", "b"]
        check()
        with refused(LimitError, "3 s") as caught:
            check()
        assert caught.value.by == "time"
        assert reached() == "time"
    check()


@pytest.mark.parametrize(("outer", "inner", "left"), [(5.0, 9.0, 4.0), (9.0, 5.0, 4.0), (5.0, None, 3.0)])
def test_an_inner_limit_only_tightens_an_outer_one(outer: float, inner: float | None, left: float) -> None:
    now = [0.0]
    with limited(seconds=outer, clock=lambda: now[0]):
        now[0] = 1.0 if inner != 5.0 else 0.0
        with limited(seconds=inner):
            now[0] += 1.0
            assert seconds_left() == pytest.approx(left - (1.0 if inner == 9.0 else 0.0))


def test_memory_is_what_the_process_holds_and_what_it_is_about_to_take() -> None:
    held = [1.0 * GIB]
    with limited(memory=4.0 * GIB, resident=lambda: held[0], clock=ticking()):
        check()
        room(2.9 * GIB, "a table")
        with refused(LimitError, "a table", "3.1 GiB", "4.0 GiB") as caught:
            room(3.1 * GIB, "a table")
        assert caught.value.by == "memory"
        held[0] = 4.5 * GIB
        with refused(LimitError, "4.5 GiB", "4.0 GiB"):
            check()


def test_what_was_found_is_priced_under_limits_of_its_own() -> None:
    now, held = [0.0], [1.0 * GIB]
    with limited(seconds=20.0, memory=GIB / 2, clock=lambda: now[0], resident=lambda: held[0]):
        now[0] = 30.0
        with finishing():
            check()
            now[0] = 33.9
            check()
            now[0] = 34.1
            with pytest.raises(LimitError):
                check()
        with pytest.raises(LimitError):
            check()


def test_a_search_may_begin_a_tenth_of_the_limit_late() -> None:
    now = [0.0]
    with limited(seconds=20.0, clock=lambda: now[0]):
        now[0] = 21.9
        check_late()
        now[0] = 22.1
        with refused(LimitError, "20 s"):
            check_late()
    check_late()


class Endless(nn.Module):
    """A forward pass that never ends: in operators, or without any."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls, self.weight = calls, nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while True:
            x = x * self.weight if self.calls else x


@pytest.mark.cases(1)
@pytest.mark.parametrize("thread", ["main", "another"])
@pytest.mark.parametrize("calls", [True, False])
def test_a_model_that_never_ends_is_traced_until_the_limit(calls: bool, thread: str) -> None:
    found: list[LimitError] = []

    def traced() -> None:
        with limited(seconds=0.0), refused(LimitError, "Endless", "0 s") as caught:
            trace(Endless(calls), (torch.ones(4),))
        found.append(caught.value)

    if thread == "main":
        traced()
    else:
        worker = threading.Thread(target=traced)
        worker.start()
        worker.join()
    assert len(found) == 1


def test_a_model_that_takes_memory_while_it_is_traced_is_ended() -> None:
    with (
        limited(memory=1.0, resident=lambda: 2.0),
        refused(LimitError, "Endless", "2 B", "1 B") as caught,
    ):
        trace(Endless(True), (torch.ones(4),))
    assert caught.value.by == "memory"


def test_an_interruption_that_becomes_another_error_is_told_as_the_limit() -> None:
    def forgetful() -> None:
        try:
            while True:
                pass
        except BaseException:  # as code of others does
            raise ValueError("something went wrong") from None

    with limited(seconds=0.0), refused(LimitError, "reading", "0 s"), interrupting("reading"):
        forgetful()


def test_what_ends_by_itself_is_not_interrupted() -> None:
    before = threading.active_count()
    with limited(seconds=1000.0, memory=1e15), interrupting("adding"):
        assert sum(range(10)) == 45
    with limited(seconds=1000.0), pytest.raises(KeyError), interrupting("reading"):
        raise KeyError("its own")
    assert threading.active_count() <= before + 2  # a watching thread ends at its next look


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="ascii")
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"}


def cgroup_trees() -> Iterator[tuple[str, dict[str, str], float | None]]:
    two = {"memory.max": f"{4 * GIB}", "memory.current": f"{3 * GIB}", "memory.stat": f"inactive_file {GIB // 2}\n"}
    one = {"memory.limit_in_bytes": f"{2 * GIB}", "memory.usage_in_bytes": f"{GIB}", "memory.stat": "cache 5\n"}
    yield "the machine alone", {"proc/self/cgroup": "0::/\n"}, 8.0 * GIB
    own = {f"sys/fs/cgroup/job/{name}": text for name, text in two.items()}
    yield "its own group", {"proc/self/cgroup": "0::/job\n", **own}, 1.5 * GIB
    yield "a group around it", {"proc/self/cgroup": "0::/job/step\n", **own}, 1.5 * GIB
    old = {f"sys/fs/cgroup/memory/job/{name}": text for name, text in one.items()}
    yield "version one", {"proc/self/cgroup": "3:cpu:/job\n2:memory:/job\n", **old}, 1.0 * GIB
    none = {**own, "sys/fs/cgroup/job/memory.max": "max\n"}
    yield "a group without a limit", {"proc/self/cgroup": "0::/job\n", **none}, 8.0 * GIB


@pytest.mark.parametrize(("files", "expected"), [pytest.param(f, e, id=name) for name, f, e in cgroup_trees()])
def test_what_is_available_is_that_of_the_machine_and_of_its_groups(
    tmp_path: Path, files: dict[str, str], expected: float
) -> None:
    assert available_bytes(tree(tmp_path, {**MEMINFO, **files})) == expected


def test_where_the_system_does_not_say_what_is_available_there_is_no_limit(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_limits_are_those_of_their_thread() -> None:
    seen: list[float] = []
    with limited(seconds=0.0):
        other = threading.Thread(target=lambda: seen.append(seconds_left()))
        other.start()
        other.join()
    assert seen == [math.inf]
    assert Limits().ends == math.inf


SLOW_LIBRARY = """
import time
for _ in range(150):
    time.sleep(0.01)
done = True
"""


@pytest.mark.parametrize("installed", [True, False])
def test_the_import_of_a_library_is_not_interrupted(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole when the limit ends what comes after it. That of a module of the user's may never end."""
    (tmp_path / "slow_library.py").write_text(SLOW_LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_library", raising=False)
    if installed:
        monkeypatch.setattr(limits, "_LIBRARIES", (f"{tmp_path}/",))
    with limited(0.1), refused(LimitError, "importing"), interrupting("importing"):
        import slow_library  # type: ignore[import-not-found]  # noqa: F401

        while True:
            time.sleep(0.01)
    assert getattr(sys.modules.get("slow_library"), "done", False) == installed


AFTERWARDS = """
import sys, time
from planner.errors import LimitError
from planner.limits import interrupting, limited
for _ in range(3):
    try:
        with limited(seconds=0.0), interrupting("waiting"):
            while True:
                time.sleep(0.001)
    except LimitError:
        print("interrupted")
called = []
sys.setprofile(lambda frame, event, argument: called.append(event))
(lambda: None)()
sys.setprofile(None)
print(called.count("call"))
"""


def test_a_profiler_works_after_an_interruption() -> None:
    """Tracing looks for draws of random numbers with one; an interruption that was cancelled made it wait for ever."""
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["interrupted"] * 3 + ["1"]
