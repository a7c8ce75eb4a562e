"""Limits of a command: the time of --time-limit, the memory of --planner-memory or most of what is available."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.cli.values import parse_memory

if TYPE_CHECKING:
    from planner.cli.options import Options


@contextlib.contextmanager
def within_limits(options: "Options") -> Iterator[None]:
    """Limit what a command does from here on. Libraries are loaded before the clock starts: what they take has nothing
    to do with what is asked."""
    import planner.graph.trace
    import planner.strategy_search.objectives  # noqa: F401, loads the libraries
    from planner.limits import default_memory, limited

    memory = None if options.planner_memory is None else parse_memory(options.planner_memory, "--planner-memory")
    with limited(options.time_limit, default_memory() if memory is None else memory):
        yield
