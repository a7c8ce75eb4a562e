"""Two passes of a rank that take turns: the backward pass of one micro-batch and the forward pass of another.

    backward   ── gradients depart ┐        ┌ land ── ... ── depart ┐
    forward                        └ ... ── depart ┐       ...      └ land ── ...

Each goes on until it would wait for rows of experts (`runtime.ops.experts`), and lets the other one go on then, whose
work covers what is on its way. Only one of them runs at a time, and which is decided by what they do, not by a clock:
so all ranks start their collectives in the same order. The forward pass runs on a thread of its own, as autograd has
the other one in a call that returns when it is through; what records it is the thread's, and its graph whole.

DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1 (DualPipe).
"""

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_One = TypeVar("_One")
_Other = TypeVar("_Other")


class Alternation:
    """The passes of a rank that take turns at the moment, if any do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: int | None = None  # number of the pass that runs; None where nothing takes turns
        self._done = [True, True]
        self._go = (threading.Semaphore(0), threading.Semaphore(0))

    def switch(self) -> None:
        """The other pass goes on, until it would wait, or is through. Nothing happens where there is none."""
        own = self._running
        if own is None or self._done[1 - own]:
            return
        self._resume(1 - own)
        self._go[own].acquire()

    def run(self, one: Callable[[], _One], other: Callable[[], _Other]) -> tuple[_One, _Other]:
        """What both make. `one` runs in this thread and begins. Raises what one of them raises, when both are
        through."""
        assert self._running is None, "two passes take turns, not three"
        self._done, self._running = [False, False], 0
        made: list[_Other] = []
        raised: list[BaseException] = []
        context = contextvars.copy_context()
        stream = None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)

        def beside() -> None:
            self._go[1].acquire()
            try:
                if stream is not None:  # the device is the thread's own, too, and follows from the stream
                    torch.accelerator.set_stream(stream)
                made.append(context.run(other))
            except BaseException as error:  # handed on to the thread that waits for it
                raised.append(error)
            finally:
                self._end(1)

        thread = threading.Thread(target=beside, name="forward beside backward", daemon=True)
        thread.start()
        try:
            found = one()
        finally:
            self._end(0)
            thread.join()
            self._running = None
        if raised:
            raise raised[0]
        return found, made[0]

    def _resume(self, number: int) -> None:
        self._running = number
        self._go[number].release()

    def _end(self, number: int) -> None:
        """A pass is through; the other one goes on alone."""
        self._done[number] = True
        if not self._done[1 - number]:
            self._resume(1 - number)
