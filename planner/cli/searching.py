"""Searching while somebody waits: progress on a terminal, Ctrl-C for the best plan so far, advice if nothing fits."""

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.errors import InfeasibleError

if TYPE_CHECKING:
    from rich.console import Console

    from planner.search.advice import Retrace
    from planner.search.request import SearchRequest
    from planner.search.search import Progress as SearchProgress
    from planner.search.search import SearchResult

_NOTHING_YET = "interrupted before there was a plan"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came back with: one result, or with `pareto` those of the front, fastest first."""

    results: "tuple[SearchResult, ...]"
    interrupted: bool

    @property
    def best(self) -> "SearchResult":
        return self.results[0]

    @property
    def stopped(self) -> bool:
        """Whether the search ended before it was through."""
        return self.interrupted or any(result.statistics.stopped for result in self.results)


def find(
    request: "SearchRequest",
    console: "Console",
    *,
    pareto: bool = False,
    advise: bool = True,
    retrace: "Retrace | None" = None,
) -> Found:
    """Search, showing progress on the console. `retrace` makes the request for sequences of another length, to say
    whether those would fit.

    The first Ctrl-C stops the search; the second, or the first before there is any plan, raises KeyboardInterrupt.
    Raises InfeasibleError with advice where nothing fits.
    """
    from planner.search.objectives import front, plan_for

    with _progress(console) as (show, note), _stoppable(lambda: note("stopping")) as stopped:
        started = time.perf_counter()
        try:
            results = front(request, show, stopped) if pareto else (plan_for(request, show, stopped),)
        except InfeasibleError as error:
            if stopped():
                raise KeyboardInterrupt(_NOTHING_YET) from error
            limit = math.inf if request.time_limit is None else request.time_limit
            if not advise or time.perf_counter() - started > limit:
                raise
            note("looking for what would fit")
            raise _advised(error, request, retrace) from error
    if not results:
        raise KeyboardInterrupt(_NOTHING_YET)
    return Found(results=results, interrupted=stopped())


@contextlib.contextmanager
def telling(verbose: bool) -> Iterator[None]:
    """With `verbose`, what the search notes of each configuration goes to stderr."""
    if not verbose:
        yield
        return
    log, handler = logging.getLogger("planner.search"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextlib.contextmanager
def _progress(console: "Console") -> Iterator[tuple[Callable[["SearchProgress"], None], Callable[[str], None]]]:
    """A line that says where the search is, and a way to say what else is done; nothing on a quiet console."""
    if console.quiet:
        yield (lambda _: None), (lambda _: None)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    counts = TextColumn("{task.completed}/{task.total} {task.fields[news]}")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), counts, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("searching", total=None, news="")

        def show(progress: "SearchProgress") -> None:
            bar.update(task, total=progress.total, completed=progress.done, news=news_of(progress))

        yield show, lambda text: bar.update(task, description=text)


def news_of(progress: "SearchProgress") -> str:
    """`best 31.8 s, bound 31.2 s, gap 1.9%`, as far as it is known."""
    from planner.report.units import percent_text, seconds_text

    best, bound = progress.best_seconds, progress.bound_seconds
    if best == math.inf:
        return "nothing fits yet"
    if not 0 < bound < math.inf:
        return f"best {seconds_text(best)}"
    gap = max(0.0, 1 - bound / best)
    return f"best {seconds_text(best)}, bound {seconds_text(bound)}, gap {percent_text(gap)}"


@contextlib.contextmanager
def _stoppable(notice: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C a request to stop, which the function that is handed out tells of; the next one is as
    usual."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def stop(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        notice()

    signal.signal(signal.SIGINT, stop)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _advised(error: InfeasibleError, request: "SearchRequest", retrace: "Retrace | None") -> InfeasibleError:
    """The same error with what would help and what that costs, in words and for programs."""
    from planner.report.advice import advice_text
    from planner.search.advice import PATIENCE, changes

    patience = PATIENCE if request.time_limit is None else request.time_limit
    found = changes(request, error.needed, retrace, patience)
    texts = [advice_text(one.text, one.seconds, one.samples, one.tokens, one.devices) for one in found]
    said = f"It would fit with: {', or '.join(texts)}" if texts else "No change was found with which it would fit"
    advice = tuple(
        {
            "change": one.text,
            "devices": one.devices,
            "step_seconds": one.seconds,
            "peak_bytes": one.peak,
            "samples_per_second": one.samples,
            "tokens_per_second_per_device": None if one.tokens is None else one.tokens / one.devices,
        }
        for one in found
    )
    return InfeasibleError(f"{error}. {said}", needed=error.needed, missing=error.missing, advice=advice)
