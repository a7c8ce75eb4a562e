"""Limits of a command: the time of --time-limit, the memory of --planner-memory or most of what is available."""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from planner.cli.graph_folder import is_kept
from planner.cli.values import parse_memory

if TYPE_CHECKING:
    from planner.cli.options import Options


_BEGAN: ContextVar[float | None] = ContextVar("planner_began", default=None)


@contextlib.contextmanager
def whole_process() -> Iterator[None]:
    """What is run inside is all that this process does, so that a time limit counts from its start."""
    from planner.limits import process_seconds

    token = _BEGAN.set(time.monotonic() - process_seconds())
    try:
        yield
    finally:
        _BEGAN.reset(token)


def is_whole_process() -> bool:
    """Whether what runs is all that this process does."""
    return _BEGAN.get() is not None


@contextlib.contextmanager
def within_limits(options: "Options") -> Iterator[None]:
    """Limit what a command does from here on. The time is that of the whole process, where that was told: the import of
    libraries and whatever came before count too. PyTorch is not needed where the graph is kept."""
    from planner.limits import default_memory, limited

    memory = None if options.planner_memory is None else parse_memory(options.planner_memory, "--planner-memory")
    began = _BEGAN.get()
    with limited(options.time_limit, spent=0.0 if began is None else time.monotonic() - began):
        import planner.strategy_search.objectives

        if not is_kept(options):
            import planner.graph.trace  # noqa: F401, loads PyTorch

        with limited(memory=default_memory() if memory is None else memory):
            yield
