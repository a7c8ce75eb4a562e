"""Who calls: commands say so while they run, so that errors name their options. Everybody else is a Python program."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_COMMAND: ContextVar[bool] = ContextVar("planner_command", default=False)


@contextlib.contextmanager
def from_command() -> Iterator[None]:
    """What runs inside is called by a command."""
    token = _COMMAND.set(True)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def is_command() -> bool:
    """Whether a command calls."""
    return _COMMAND.get()
