"""How long a rank waits for others: the calls of torch.distributed that return only when others have come.

    with timing_waits() as waits:            # somebody asks, as `plan run` does
        step(batch)                          #   ... waiting_for(dist.recv, value, source) ...
    waits.seconds

Where nobody asks, a call costs one look at a variable. Seconds are those of the host: they are what a rank waits where
calls return when their work is done, as on CPUs. On an accelerator they return at once, and say nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from hardware_profiles import Seconds

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(slots=True)
class Waits:
    """Seconds of waiting so far."""

    seconds: Seconds = 0.0


_ASKED: ContextVar[Waits | None] = ContextVar("who asks for the seconds of waiting", default=None)


@contextmanager
def timing_waits() -> Iterator[Waits]:
    """Collects what this thread waits from here on."""
    waits = Waits()
    token = _ASKED.set(waits)
    try:
        yield waits
    finally:
        _ASKED.reset(token)


def waiting_for(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What a call returns that waits for other ranks; its seconds are counted where somebody asks for them."""
    waits = _ASKED.get()
    if waits is None:
        return call(*args, **kwargs)
    started = time.perf_counter()
    try:
        return call(*args, **kwargs)
    finally:
        waits.seconds += time.perf_counter() - started
