"""Turns signals that end a process into errors, so that cleanup code runs."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from planner.errors import StoppedError


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside of this context SIGTERM and SIGHUP raise StoppedError, if this is the main thread; then old handlers
    return."""
    ours = threading.current_thread() is threading.main_thread()  # signals can be handled only there
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP) if ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise StoppedError(128 + number)
