"""Measures how long a rank waits for others, in torch.distributed calls that return only when other ranks have come.

    with timing_waits() as waits:            # on request, as in `plan run`
        step(batch)                          #   ... waiting_for(dist.recv, value, source) ...
    waits.seconds

Without a request a call costs one read of a variable. Seconds are those of the host. On CPUs calls return when their
work is done, so these are the seconds that a rank waits. On an accelerator calls return at once, so they say nothing.

A collective returns on all ranks of its group when the last one arrives, so the last rank waits least. All ranks of a
group make the same calls on it in the same order. `Waits.by_group` has the seconds of each call, so that ranks can find
the minimum of every call; beyond it they wait for a later rank.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from hardware_profiles import Seconds

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self) -> object: ...


@dataclass(slots=True)
class Calls:
    """Calls of one function in one phase: their number, seconds, and the bytes of the tensors that they send."""

    count: int = 0
    seconds: Seconds = 0.0
    nbytes: int = 0


@dataclass(slots=True)
class Waits:
    """Seconds of waiting so far. For every phase (`phase`): its seconds, the CPU seconds of this thread in it (other
    threads of the process move bytes for collectives), and its calls by function name. `by_group` has the phase and the
    seconds of every call on a group, in order. `settle` is called at the ends of phases: it waits for work that was
    only started."""

    seconds: Seconds = 0.0
    current: str = ""
    phases: dict[str, tuple[Seconds, Seconds]] = field(default_factory=dict)
    calls: dict[tuple[str, str], Calls] = field(default_factory=dict)
    by_group: dict[dist.ProcessGroup, list[tuple[str, Seconds]]] = field(default_factory=dict)
    settle: Callable[[], None] = lambda: None

    def waited(
        self, call: Callable[..., object], seconds: Seconds, sent: object, group: dist.ProcessGroup | None
    ) -> None:
        """Count a call, on a group or without one."""
        self.seconds += seconds
        named = call.func if isinstance(call, partial) else call
        one = self.calls.setdefault((self.current, getattr(named, "__name__", "call")), Calls())
        one.count += 1
        one.seconds += seconds
        one.nbytes += int(getattr(sent, "nbytes", 0))
        if group is not None:
            self.by_group.setdefault(group, []).append((self.current, seconds))


_ASKED: ContextVar[Waits | None] = ContextVar("who asks for the seconds of waiting", default=None)


@contextmanager
def timing_waits(settle: Callable[[], None] = lambda: None) -> Iterator[Waits]:
    """Collect the waiting of this thread from here on."""
    waits = Waits(settle=settle)
    token = _ASKED.set(waits)
    try:
        yield waits
    finally:
        _ASKED.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A part of a step ("forward", "backward" or "update"), whose seconds are counted on request."""
    waits = _ASKED.get()
    if waits is None:
        yield
        return
    outer, waits.current = waits.current, name
    started, busy = time.perf_counter(), time.thread_time()
    try:
        yield
        waits.settle()
    finally:
        seconds, cpu = waits.phases.get(name, (0.0, 0.0))
        waits.phases[name] = seconds + time.perf_counter() - started, cpu + time.thread_time() - busy
        waits.current = outer


def waiting_for(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """The result of a call that waits for other ranks; its seconds are counted on request."""
    waits = _ASKED.get()
    if waits is None:
        return call(*args, **kwargs)
    started = time.perf_counter()
    try:
        return call(*args, **kwargs)
    finally:
        seconds = time.perf_counter() - started
        given = (*call.args, *call.keywords.values(), *args) if isinstance(call, partial) else args
        waits.waited(call, seconds, _sent(given), _group((*given, *kwargs.values())))


def waiting_for_work(work: Pending, group: dist.ProcessGroup) -> None:
    """Return when a collective that was started on a group is done; its seconds are counted as by `waiting_for`."""
    waits = _ASKED.get()
    if waits is None:
        work.wait()
        return
    started = time.perf_counter()
    try:
        work.wait()
    finally:
        waits.waited(work.wait, time.perf_counter() - started, None, group)


def _sent(given: tuple[object, ...]) -> object:
    """The tensor that a call sends: its last tensor argument, which is the input where there is an output too."""
    return next((one for one in reversed(given) if hasattr(one, "nbytes")), None)


def _group(given: tuple[object, ...]) -> dist.ProcessGroup | None:
    """The group of a call among its arguments."""
    return next((one for one in given if isinstance(one, dist.ProcessGroup)), None)
