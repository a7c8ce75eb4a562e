"""Copies between the device and what is outside of it, beside the work: one lane for each direction.

    main       ... update 0 ........ update 1 ........ update 2 ...
    inward     [fetch 0][fetch 1]        [fetch 2]                     a thread, and a stream of the device
    outward                      [store 0]        [store 1]            another one

A lane does one thing after the other. Each leaves a mark, for which the main thread, or the other lane, waits: first
until the thread has issued it, then, where the device has streams, in the stream that goes on. A CPU has none, and the
thread itself copies. Where nothing is real (tensors without data have nothing to copy) a lane does nothing.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Mark:
    """A point in what a lane, or the main thread, does."""

    def __init__(self, issued: "Future[Any] | None", event: Any = None) -> None:
        self._issued, self._event = issued, event

    def wait(self) -> None:
        """What the calling thread does from here on comes behind this point. Raises what the lane met."""
        event = self._issued.result() if self._issued is not None else self._event
        if event is not None:
            event.wait()

    def finish(self) -> None:
        """What the host does from here on comes behind this point."""
        event = self._issued.result() if self._issued is not None else self._event
        if event is not None:
            event.synchronize()


class Lane:
    """One direction between a device and its host."""

    def __init__(self, device: torch.device, *, pretended: bool = False) -> None:
        self._pool = None if pretended else ThreadPoolExecutor(max_workers=1, thread_name_prefix="lane")
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def run(self, work: Callable[[], None], after: Sequence[Mark] = ()) -> Mark:
        """Do something once these points are reached."""
        if self._pool is None:
            return Mark(None)
        return Mark(self._pool.submit(self._go, work, tuple(after)))

    def _go(self, work: Callable[[], None], after: Sequence[Mark]) -> Any:
        with self._beside():
            for mark in after:
                mark.wait()
            work()
            return None if self._stream is None else self._stream.record_event()

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._stream


def here(device: torch.device) -> Mark:
    """What the calling thread has issued so far."""
    if device.type == "cpu":
        return Mark(None)
    return Mark(None, torch.accelerator.current_stream().record_event())
