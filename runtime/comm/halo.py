"""Edges of pieces, exchanged between neighbours.

    device          0            1            2
    piece         a b c d      e f g h      i j k l
    before, after     · e      d     i      h     ·        one element each; the first and the last one get no use of it
                                                           and put padding there

Every device sends to both sides, the last one to the first too: all do the same, and the links have two directions.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.sharding.halo import Halo
from runtime.waiting import waiting_for_work

Sides = tuple[torch.Tensor | None, torch.Tensor | None]
"""What lies before a piece and what behind it; None where the halo has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The devices that have the pieces of one dim, in the order of their group, of which this is number `place`. What
    is outside of the whole dim is `outside`."""

    dim: int
    halo: Halo
    group: dist.ProcessGroup
    place: int
    outside: float

    @property
    def first(self) -> bool:
        """Whether nothing comes before the piece of this device."""
        return self.place == 0

    @property
    def last(self) -> bool:
        """Whether nothing comes behind the piece of this device."""
        return self.place == self.group.size() - 1

    def edges(self, piece: torch.Tensor) -> Sides:
        """The elements around a piece that the halo reads. Collective."""
        length = piece.shape[self.dim]
        last = piece.narrow(self.dim, length - self.halo.before, self.halo.before)
        before, after = self._swapped(last, piece.narrow(self.dim, 0, self.halo.after))
        if before is not None and self.first:
            before.fill_(self.outside)
        if after is not None and self.last:
            after.fill_(self.outside)
        return before, after

    def joined(self, piece: torch.Tensor, sides: Sides) -> torch.Tensor:
        """A piece with what is around it."""
        return torch.cat([part for part in (sides[0], piece, sides[1]) if part is not None], self.dim)

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a piece from that of what was `joined`: edges go back to whose they are. Collective."""
        before, after = self.halo.before, self.halo.after
        length = gradient.shape[self.dim] - before - after
        mine = gradient.narrow(self.dim, before, length).clone(memory_format=torch.contiguous_format)
        sides = gradient.narrow(self.dim, before + length, after), gradient.narrow(self.dim, 0, before)
        of_first, of_last = self._swapped(*sides)
        if of_first is not None and not self.first:
            mine.narrow(self.dim, 0, after).add_(of_first)
        if of_last is not None and not self.last:
            mine.narrow(self.dim, length - before, before).add_(of_last)
        return mine

    def _swapped(self, onward: torch.Tensor, back: torch.Tensor) -> Sides:
        """What the device before this one sends onward and what the next one sends back, as this one sends both; None
        of what has no elements."""
        size = self.group.size()
        after, before = (self.place + 1) % size, (self.place - 1) % size
        ways = [(onward.contiguous(), after, before), (back.contiguous(), before, after)]
        come = [torch.empty_like(sent) if sent.numel() else None for sent, *_ in ways]
        calls = []
        for (sent, to, origin), coming in zip(ways, come, strict=True):
            if coming is not None:  # both to the same one where there are two: in the same order on both
                calls.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
                calls.append(dist.P2POp(dist.irecv, coming, group=self.group, group_peer=origin))
        for work in dist.batch_isend_irecv(calls):
            waiting_for_work(work, self.group)
        return come[0], come[1]
