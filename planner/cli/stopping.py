"""Ctrl-C as a request to stop: what is known so far is shown."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SAID = "Stopped by Ctrl-C"


@contextlib.contextmanager
def stoppable(notice: Callable[[], None], searching: Callable[[], bool] = lambda: True) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request to stop: the yielded function then returns True, and `notice` is called. The
    next Ctrl-C raises KeyboardInterrupt as usual; so does the first while nothing is `searching`, as when a model is
    traced, which asks for no request."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def stop(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        notice()
        if not searching():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
