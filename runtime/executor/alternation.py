"""Two passes of a rank that alternate: the backward pass of one micro-batch and the forward pass of another.

    backward   ── gradients depart ┐        ┌ land ── ... ── depart ┐
    forward                        └ ... ── depart ┐       ...      └ land ── ...

Each pass runs until it would wait for an all-to-all of experts (`runtime.ops.experts`). Then the other pass runs, and
its work overlaps with the all-to-all. Only one of them runs at a time, and the switch points depend on the operators,
not on a clock, so all ranks start their collectives in the same order. The forward pass runs on a separate thread,
because the backward pass runs inside a call of autograd that returns only at its end. Autograd's recording state
belongs to the thread, and the recorded graph is complete.

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
    """The passes of a rank that currently alternate, if any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: int | None = None  # number of the running pass; None where no passes alternate
        self._done = [True, True]
        self._go = (threading.Semaphore(0), threading.Semaphore(0))

    def switch(self) -> None:
        """Let the other pass run until it would wait or ends. Does nothing where there is no other pass."""
        own = self._running
        if own is None or self._done[1 - own]:
            return
        self._resume(1 - own)
        self._go[own].acquire()

    def run(self, one: Callable[[], _One], other: Callable[[], _Other]) -> tuple[_One, _Other]:
        """The results of both passes. `one` runs in this thread and starts first. If a pass raises, the error is raised
        here after both have ended."""
        assert self._running is None, "two passes take turns, not three"
        self._done, self._running = [False, False], 0
        made: list[_Other] = []
        raised: list[BaseException] = []
        context = contextvars.copy_context()
        stream = None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)

        def beside() -> None:
            self._go[1].acquire()
            try:
                if stream is not None:  # the current device is per thread too, and follows from the stream
                    torch.accelerator.set_stream(stream)
                made.append(context.run(other))
            except BaseException as error:  # passed to the thread that waits for it
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
        """A pass has ended; the other one continues alone."""
        self._done[number] = True
        if not self._done[1 - number]:
            self._resume(1 - number)
