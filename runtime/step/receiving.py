"""Receives that are posted ahead: the next message of every line is in flight while the rank computes.

    turn        F1        B0        F2             values    posted F2 ........ taken at F2, F3 posted
    posted      F2, B0    F2, B1    F3, B1         gradients posted B1 ........ taken at B1, B2 posted

A line has the messages of one chunk from one rank in one direction, on a separate group (`runtime.step.stage_links`),
in the order in which both ends run their turns. So its receives are posted in that order, whatever the schedule, and
one turn of each line is posted ahead (double buffering): gloo moves bytes only for a posted receive, on its own
threads, and NCCL on a stream of the line. The first values are posted at the beginning of the step. The first gradients
are posted when the chunk has sent its first values, because none can arrive earlier. Exactly as many receives are
posted as the turns of a step take, so none is left over.

Memory: what one turn of each chunk receives, values and gradients (`receive_buffers` of
`planner.plan.prediction.memory.moving`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from runtime.step.stage_links import Chunk, Crossing
from runtime.waiting import waiting_for


class Coming(NamedTuple):
    """A tensor whose receive has been posted."""

    crossing: Crossing
    value: torch.Tensor
    work: dist.Work


@dataclass(kw_only=True)
class Line:
    """The messages from `rank` on a group: the crossings of each micro-batch, `together` micro-batches per turn."""

    crossings: Sequence[Crossing]
    rank: int
    group: dist.ProcessGroup
    device: torch.device
    together: int = 1
    coming: deque[Coming] = field(default_factory=deque)
    left: int = 0

    def expect(self, turns: int, *, post: bool) -> None:
        """Prepare for `turns` turns that take messages here; the first receive is posted now or later."""
        self.left = turns
        if post:
            self.post()

    def post(self) -> None:
        """Post the receives of the next turn, unless that has been done, or no turn is left."""
        if self.coming or not self.left:
            return
        self.left -= 1
        for _ in range(self.together):
            for crossing in self.crossings:
                value = torch.empty(crossing.shape, dtype=crossing.dtype, device=self.device)
                work = dist.irecv(value, self.rank, group=self.group)
                assert work is not None, "this rank is a member of the group"
                self.coming.append(Coming(crossing, value, work))

    def take(self) -> Sequence[torch.Tensor]:
        """The received tensors of one turn: the crossings of its micro-batches, one micro-batch after the other. When
        all have arrived, the next turn's receives are posted."""
        self.post()  # if that has not been done
        found = [self._landed(self.coming.popleft()) for _ in range(len(self.coming))]
        self.post()
        return found

    def _landed(self, coming: Coming) -> torch.Tensor:
        waiting_for(recv, coming, coming.value)
        return coming.value


def recv(coming: Coming, value: torch.Tensor) -> None:
    """Return when `value` has arrived; on an accelerator, when the device's next work will wait for it."""
    coming.work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The lines on which a chunk receives: values from the stage before, gradients from the stage after; None where it
    receives nothing from another rank."""

    values: Line | None
    gradients: Line | None


def lines_of(chunk: Chunk, device: torch.device, together: int) -> Lines:
    """The lines of a chunk, with no turns expected yet."""

    def line(crossings: Sequence[Crossing], rank: int, group: dist.ProcessGroup | None) -> Line | None:
        if group is None or not crossings:
            return None
        return Line(crossings=tuple(crossings), rank=rank, group=group, device=device, together=together)

    before, after = chunk.before, chunk.after
    back = [departure for departure in chunk.departures if departure.differentiable]
    return Lines(
        values=None if before is None else line(chunk.arrivals, before.rank, before.values),
        gradients=None if after is None else line(back, after.rank, after.gradients),
    )


def connect(chunks: Sequence[Chunk], device: torch.device) -> None:
    """Send one element along every line. Collective: every rank calls it, with its chunks.

    NCCL connects two ranks when both have called, and blocks the host of the first until then. A receive that is posted
    before its sender calls could block turns for which the sender waits. Each line is an open chain, so connecting line
    after line does not deadlock; ranks that are not in a line skip it.
    """
    for chunk in chunks:
        before, after = chunk.before, chunk.after
        if before is not None and before.values is not None:
            waiting_for(dist.recv, torch.zeros(1, device=device), before.rank, group=before.values)
        if after is not None and after.values is not None:
            waiting_for(dist.send, torch.zeros(1, device=device), after.rank, group=after.values)
    for chunk in reversed(chunks):
        before, after = chunk.before, chunk.after
        if after is not None and after.gradients is not None:
            waiting_for(dist.recv, torch.zeros(1, device=device), after.rank, group=after.gradients)
        if before is not None and before.gradients is not None:
            waiting_for(dist.send, torch.zeros(1, device=device), before.rank, group=before.gradients)
