"""Copies between the device and its offload storage, overlapped with computation: one copy stream per direction.

    main       ... update 0 ........ update 1 ........ update 2 ...
    inward     [fetch 0][fetch 1]        [fetch 2]                     a thread, and a stream of the device
    outward                      [store 0]        [store 1]            another one

A copy stream (`Lane`) does one thing after the other. Each leaves a mark, for which the main thread or the other stream
waits: first until the thread has issued the copy, then, where the device has streams, inside of the waiting stream. A
CPU has no streams, and the thread itself copies. Tensors without data have nothing to copy, so nothing is done for
them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Mark:
    """A point in the work of a copy stream, or of the main thread."""

    def __init__(self, issued: "Future[Any] | None", event: Any = None) -> None:
        self._issued, self._event = issued, event

    def wait(self) -> None:
        """Order the calling thread's further work after this point. Raises the error of the copy stream, if any."""
        event = self._issued.result() if self._issued is not None else self._event
        if event is not None:
            event.wait()

    def finish(self) -> None:
        """Block the host until this point is reached."""
        event = self._issued.result() if self._issued is not None else self._event
        if event is not None:
            event.synchronize()


class Lane:
    """One direction between a device and its host."""

    def __init__(self, device: torch.device, *, pretended: bool = False) -> None:
        self._pool = None if pretended else ThreadPoolExecutor(max_workers=1, thread_name_prefix="lane")
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def run(self, work: Callable[[], None], after: Sequence[Mark] = ()) -> Mark:
        """Do some work once these points are reached."""
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
    """A mark after everything that the calling thread has issued so far."""
    if device.type == "cpu":
        return Mark(None)
    return Mark(None, torch.accelerator.current_stream(device).record_event())
