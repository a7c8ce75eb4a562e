"""Ctrl-C as a request to stop: what is known by then is shown."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SAID = "Stopped by Ctrl-C"


@contextlib.contextmanager
def stoppable(notice: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C a request to stop, which the function that is handed out tells of; the next one is as
    usual, and raises KeyboardInterrupt. `notice` is called where it was pressed."""
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
