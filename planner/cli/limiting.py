"""Limits of a command: the time of --time-limit, the memory of --planner-memory or most of what is available."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.cli.graph_folder import is_kept
from planner.cli.values import parse_memory

if TYPE_CHECKING:
    from planner.cli.options import Options


@contextlib.contextmanager
def within_limits(options: "Options") -> Iterator[None]:
    """Limit what a command does from here on. Libraries are loaded before the clock starts: what they take has nothing
    to do with what is asked. PyTorch is not needed where the graph is kept."""
    import planner.strategy_search.objectives
    from planner.limits import default_memory, limited

    if not is_kept(options):
        import planner.graph.trace  # noqa: F401, loads PyTorch
    memory = None if options.planner_memory is None else parse_memory(options.planner_memory, "--planner-memory")
    with limited(options.time_limit, default_memory() if memory is None else memory):
        yield
