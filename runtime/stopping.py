"""Signals that end a process, as errors: what is held is given up, and what was started is ended, on the way out."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from planner.errors import StoppedError


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Meanwhile SIGTERM and SIGHUP raise StoppedError, where this is the main thread; the handlers before come back."""
    ours = threading.current_thread() is threading.main_thread()  # only there can a signal be handled
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP) if ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise StoppedError(128 + number)
