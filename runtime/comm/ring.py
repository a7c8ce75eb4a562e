"""Tensors sent round a ring: every process sends its own to the next process and receives those of the one before.

0 -> 1 -> 2 -> 3 -> 0        asynchronous, so that computation overlaps with it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime.waiting import waiting_for_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Tensors in flight round the ring. What is sent is kept alive until it has been sent."""

    sent: tuple[torch.Tensor, ...]
    coming: list[torch.Tensor]
    works: tuple[Any, ...]
    group: dist.ProcessGroup

    def wait(self) -> list[torch.Tensor]:
        """The received tensors, once all of them have arrived and everything was sent."""
        for work in self.works:
            waiting_for_work(work, self.group)
        return self.coming


def around(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, place: int) -> Round:
    """Start to send contiguous tensors to the process after number `place` of a group, and to receive tensors of the
    same shapes from the process before. Collective."""
    size = group.size()
    coming = [torch.empty_like(tensor) for tensor in tensors]
    calls = [dist.P2POp(dist.isend, tensor, group=group, group_peer=(place + 1) % size) for tensor in tensors]
    calls += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=(place - 1) % size) for tensor in coming]
    return Round(sent=tuple(tensors), coming=coming, works=tuple(dist.batch_isend_irecv(calls)), group=group)
