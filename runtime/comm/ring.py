"""Tensors sent round a ring: every process gives its own to the next one and gets those of the one before.

0 -> 1 -> 2 -> 3 -> 0        started without being waited for, so that work can be done meanwhile
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime.waiting import waiting_for_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Tensors on their way round. What is sent is held until it has gone."""

    sent: tuple[torch.Tensor, ...]
    coming: list[torch.Tensor]
    works: tuple[Any, ...]
    group: dist.ProcessGroup

    def wait(self) -> list[torch.Tensor]:
        """What has come, once all of it is there and all that was sent has gone."""
        for work in self.works:
            waiting_for_work(work, self.group)
        return self.coming


def around(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, place: int) -> Round:
    """Start to send contiguous tensors to the process after number `place` of a group, and to receive tensors like
    them from the one before. Collective."""
    size = group.size()
    coming = [torch.empty_like(tensor) for tensor in tensors]
    calls = [dist.P2POp(dist.isend, tensor, group=group, group_peer=(place + 1) % size) for tensor in tensors]
    calls += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=(place - 1) % size) for tensor in coming]
    return Round(sent=tuple(tensors), coming=coming, works=tuple(dist.batch_isend_irecv(calls)), group=group)
