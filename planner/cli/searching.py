"""Searches with progress on the terminal; Ctrl-C returns the best plan so far; advice if nothing fits."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.cli.stopping import stoppable
from planner.cli.waiting import Waiting, waiting
from planner.errors import InfeasibleError, LimitError
from planner.limits import reached

if TYPE_CHECKING:
    from rich.console import Console

    from planner.errors import StoppedBy
    from planner.strategy_search.analysis.advice import Retrace
    from planner.strategy_search.request.request import SearchRequest
    from planner.strategy_search.result import SearchResult

_NOTHING_YET = "interrupted before there was a plan"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The results of a search: one result, or with `pareto` those of the front, fastest first."""

    results: "tuple[SearchResult, ...]"
    interrupted: bool

    @property
    def best(self) -> "SearchResult":
        return self.results[0]

    @property
    def stopped_by(self) -> "StoppedBy | None":
        """What stopped the search early, if anything did."""
        stops = (result.statistics.stopped_by for result in self.results)
        return "interrupt" if self.interrupted else next(filter(None, stops), None)


def find(
    request: "SearchRequest",
    console: "Console",
    *,
    pareto: bool = False,
    advise: bool = True,
    retrace: "Retrace | None" = None,
) -> Found:
    """Search and show progress on the console. `retrace` makes the request for another sequence length, to find out
    whether that would fit.

    The first Ctrl-C stops the search; the second, or the first before there is any plan, raises KeyboardInterrupt.
    Raises InfeasibleError with advice where nothing fits.
    """
    from planner.strategy_search.objectives import front, plan_for

    with waiting(console) as wait, stoppable(lambda: wait.phase("stopping")) as stopped:
        try:
            results = front(request, wait.searched, stopped) if pareto else (plan_for(request, wait.searched, stopped),)
        except InfeasibleError as error:
            if stopped():
                raise KeyboardInterrupt(_NOTHING_YET) from error
            if not advise or isinstance(error, LimitError) or reached():
                raise
            raise _advised(error, request, retrace, wait, stopped) from error
    if not results:
        raise KeyboardInterrupt(_NOTHING_YET)
    return Found(results=results, interrupted=stopped())


@contextlib.contextmanager
def telling(verbose: bool) -> Iterator[None]:
    """With `verbose`, print the search's notes on each configuration on stderr."""
    if not verbose:
        yield
        return
    log, handler = logging.getLogger("planner.strategy_search"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _advised(
    error: InfeasibleError,
    request: "SearchRequest",
    retrace: "Retrace | None",
    wait: Waiting,
    stopped: Callable[[], bool],
) -> InfeasibleError:
    """The same error with advice: what would make a plan fit and what that costs, in words and for programs, as far as
    it was searched."""
    from planner.report.advice import advice_text
    from planner.strategy_search.analysis.advice import PATIENCE, changes

    patience = PATIENCE if request.time_limit is None else request.time_limit
    found = changes(
        request,
        error.needed,
        retrace,
        patience,
        stopped,
        on_change=lambda text: wait.phase(f"does not fit; trying {text}"),
    )
    texts = [advice_text(one.text, one.seconds, one.samples, one.tokens, one.devices) for one in found]
    said = f"It would fit with: {', or '.join(texts)}" if texts else "No change was found with which it would fit"
    said += "; stopped by Ctrl-C before all were tried" if stopped() else ""
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
