"""The progress line of a command on a terminal: its phase, how much is done, and the best plan and bound so far."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

    from planner.strategy_search.result import Progress as SearchProgress

_BAR = 20
"""Width of the bar, if there is room for one."""

_PHASE = 16
"""Minimum width of the phase on a narrow terminal, where the numbers are shorter."""


class Waiting:
    """A progress line on stderr. This base prints nothing: it is used without a terminal, or if nobody reads the
    output."""

    def phase(self, text: str, at: int | None = None, total: int | None = None) -> None:
        """Start another phase: the `at`-th of `total`, if there are several."""

    def searched(self, progress: "SearchProgress") -> None:
        """Show the progress of the search in this phase."""

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the line while something is printed that stays."""
        yield


class _Line(Waiting):
    """Spinner, phase, bar, numbers and elapsed seconds, as far as the terminal is wide enough."""

    def __init__(self) -> None:
        from rich.spinner import Spinner

        self._began, self._spinner = time.monotonic(), Spinner("dots")
        self._text = ""
        self._search: SearchProgress | None = None
        self.live: Live | None = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        if self.live is not None:
            self.live.stop()
        try:
            yield
        finally:
            if self.live is not None:
                self.live.start()

    def phase(self, text: str, at: int | None = None, total: int | None = None) -> None:
        self._text = text if at is None else f"{text} ({at}/{total})"
        self._search = None

    def searched(self, progress: "SearchProgress") -> None:
        self._search = progress

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        search, now = self._search, time.monotonic()
        told = ": ".join(filter(None, (self._text, search.phase if search else "")))
        passed = str(timedelta(seconds=int(now - self._began)))
        room = options.max_width - len(passed) - 4  # the spinner, and spaces
        forms = news_of(search) if search else ("",)
        news = next((one for one in forms if len(one) < room - min(len(told), _PHASE)), "")
        room -= len(news) + 1
        cells = [self._spinner.render(now), Text(told[: room - 1] + "…" if len(told) > room else told), news, passed]
        if search and search.total and len(told) + _BAR < room:
            cells.insert(2, ProgressBar(search.total, search.done, width=_BAR))
        line = Table.grid(padding=(0, 1))
        for _ in cells:
            line.add_column(no_wrap=True)
        line.add_row(*cells)
        yield line


@contextlib.contextmanager
def waiting(console: "Console | None" = None) -> Iterator[Waiting]:
    """Show the phase in a line that disappears at the end; nothing on a quiet console, such as stderr without a
    terminal."""
    from planner.report.console import PlainConsole

    console = console or PlainConsole(file=sys.stderr, quiet=not sys.stderr.isatty())
    if console.quiet:
        yield Waiting()
        return
    from rich.live import Live

    line = _Line()
    with Live(line, console=console, transient=True, refresh_per_second=8) as line.live:
        yield line


def news_of(progress: "SearchProgress") -> tuple[str, ...]:
    """`13/198 tried, best 31.8 s, bound 31.2 s, gap 1.9%`, as far as known; and a shorter form."""
    from planner.report.units import percent_text, seconds_text

    best, bound = progress.best_seconds, progress.bound_seconds
    known = [f"{progress.done:,}/{progress.total:,} tried"] if progress.total else []
    if best < math.inf:
        known.append(f"best {seconds_text(best)}")
        if 0 < bound < math.inf:
            known += [f"bound {seconds_text(bound)}", f"gap {percent_text(max(0.0, 1 - bound / best))}"]
    elif progress.done:
        known.append("nothing fits yet")
    return tuple(", ".join(known[:count]) for count in range(len(known), -1, -1))
