"""A server of `plan ui` while tests ask it."""

from collections.abc import Iterator
from contextlib import contextmanager

from planner.ui import Server


@contextmanager
def serving() -> Iterator[Server]:
    """A server that runs in a thread, which must have ended ten seconds after it was closed."""
    found = Server()
    thread = found.start()
    yield found
    found.close()
    thread.join(10)
    assert not thread.is_alive()
