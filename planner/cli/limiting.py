"""Limits of a command: the time of --time-limit, the memory of --planner-memory or most of what is available."""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from planner.cli.graph_folder import is_kept
from planner.cli.values import parse_memory
from planner.errors import LateError

if TYPE_CHECKING:
    from planner.cli.options import Options


_BEGAN: ContextVar[float | None] = ContextVar("planner_began", default=None)


@contextlib.contextmanager
def whole_process() -> Iterator[None]:
    """The process does only what runs inside, so a time limit counts from the start of the process."""
    from planner.limits import process_seconds

    token = _BEGAN.set(time.monotonic() - process_seconds())
    try:
        yield
    finally:
        _BEGAN.reset(token)


def is_whole_process() -> bool:
    """Whether this process does nothing else."""
    return _BEGAN.get() is not None


@contextlib.contextmanager
def within_limits(options: "Options") -> Iterator[None]:
    """Limit a command from here on. Inside `whole_process` the time limit also counts imports and earlier work. PyTorch
    is not needed if the graph is cached."""
    from planner.limits import default_memory, limited

    memory = None if options.planner_memory is None else parse_memory(options.planner_memory, "--planner-memory")
    began = _BEGAN.get()
    with limited(options.time_limit, spent=0.0 if began is None else time.monotonic() - began):
        import planner.strategy_search.objectives

        if not (kept := is_kept(options)):
            import planner.graph.trace  # noqa: F401, loads PyTorch

        with limited(memory=default_memory() if memory is None else memory):
            try:
                yield
            except LateError as error:
                if kept or not is_kept(options):
                    raise
                raise LateError(f"{error}, or the same command again, which finds the graph of the model") from error
