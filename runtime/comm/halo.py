"""Halo exchange: neighbours exchange the edges of their pieces.

    device          0            1            2
    piece         a b c d      e f g h      i j k l
    before, after     · e      d     i      h     ·        one element each; the first and the last device replace what
                                                           they get from outside by padding

Every device sends to both sides, the last one to the first too: all do the same, and links are bidirectional. Where a
halo is longer than a piece, received elements are forwarded until they reach the device that reads them:

    device          0            1            2            3          two elements before pieces of one
    piece           a            b            c            d
    first hop       ·            a            b            c
    second hop      ·            ·            a            b
    before          · ·          · a          a b          b c

Gradients go the same way back. Each device adds a received gradient to its own gradient of the same piece before it
forwards the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.sharding.halo import Halo
from runtime.waiting import waiting_for_work

Sides = tuple[torch.Tensor | None, torch.Tensor | None]
"""The elements before a piece and behind it; None where the halo has none on that side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The devices that have the pieces of one dim, in the order of their group; this one is number `place`. `outside`
    is the value of elements outside of the whole dim."""

    dim: int
    halo: Halo
    group: dist.ProcessGroup
    place: int
    outside: float

    @property
    def first(self) -> bool:
        """Whether this device has the first piece."""
        return self.place == 0

    @property
    def last(self) -> bool:
        """Whether this device has the last piece."""
        return self.place == self.group.size() - 1

    def edges(self, piece: torch.Tensor) -> Sides:
        """The elements around a piece that the halo reads. Collective."""
        onward = back = piece
        before: list[torch.Tensor] = []
        behind: list[torch.Tensor] = []
        for hop, (rows_before, rows_behind) in enumerate(self._hops(piece.shape[self.dim])):
            come = self._swapped(self._last(onward, rows_before), self._first(back, rows_behind))
            onward, back = (new if new is not None else old for new, old in zip(come, (onward, back), strict=True))
            for found, new, here in ((before, come[0], self.place > hop), (behind, come[1], self._follow > hop)):
                if new is not None:
                    found.append(new if here else torch.full_like(new, self.outside))
        return self._side(before[::-1]), self._side(behind)

    def joined(self, piece: torch.Tensor, sides: Sides) -> torch.Tensor:
        """A piece with the elements around it."""
        return torch.cat([part for part in (sides[0], piece, sides[1]) if part is not None], self.dim)

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a piece from the gradient of the `joined` tensor: gradients of edges go back to their owners.
        Collective."""
        before = self.halo.before
        length = gradient.shape[self.dim] - before - self.halo.after
        mine = gradient.narrow(self.dim, before, length).clone(memory_format=torch.contiguous_format)
        hops = self._hops(length)
        of_earlier = [mine]  # gradients of the pieces before this one, the nearest first
        of_later = [mine]
        for hop, (rows_before, rows_behind) in enumerate(hops):
            start = before - sum(rows for rows, _ in hops[: hop + 1])
            of_earlier.append(self._of_piece(gradient, start, rows_before, self.place > hop))
            start = before + length + sum(rows for _, rows in hops[:hop])
            of_later.append(self._of_piece(gradient, start, rows_behind, self._follow > hop))
        for hop in reversed(range(len(hops))):
            from_before, from_behind = self._swapped(of_later[hop + 1], of_earlier[hop + 1])
            if from_before is not None and self.place > 0:
                self._first(of_later[hop], from_before.shape[self.dim]).add_(from_before)
            if from_behind is not None and self._follow > 0:
                self._last(of_earlier[hop], from_behind.shape[self.dim]).add_(from_behind)
        return mine

    @property
    def _follow(self) -> int:
        """The number of pieces behind the one of this device."""
        return self.group.size() - 1 - self.place

    def _hops(self, length: int) -> list[tuple[int, int]]:
        """The elements that each hop brings from before and from behind, for pieces of this length: whole pieces, and
        the rest in the last hop."""
        reach = max(self.halo.before, self.halo.after)
        return [
            (min(length, max(0, self.halo.before - done)), min(length, max(0, self.halo.after - done)))
            for done in range(0, reach, length)
        ]

    def _of_piece(self, gradient: torch.Tensor, start: int, rows: int, there: bool) -> torch.Tensor:
        """The gradient of the elements that were read from a piece; zero where they are outside."""
        part = gradient.narrow(self.dim, start, rows)
        return part.clone(memory_format=torch.contiguous_format) if there else torch.zeros_like(part)

    def _first(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        return tensor.narrow(self.dim, 0, rows)

    def _last(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        return tensor.narrow(self.dim, tensor.shape[self.dim] - rows, rows)

    def _side(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return None if not parts else parts[0] if len(parts) == 1 else torch.cat(list(parts), self.dim)

    def _swapped(self, onward: torch.Tensor, back: torch.Tensor) -> Sides:
        """What the device before this one sends onward and the next one sends back, while this one sends both; None for
        empty tensors."""
        size = self.group.size()
        after, before = (self.place + 1) % size, (self.place - 1) % size
        ways = [(onward.contiguous(), after, before), (back.contiguous(), before, after)]
        come = [torch.empty_like(sent) if sent.numel() else None for sent, *_ in ways]
        calls = []
        for (sent, to, origin), coming in zip(ways, come, strict=True):
            if coming is not None:  # with two devices both messages go to the same peer: in the same order on both
                calls.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
                calls.append(dist.P2POp(dist.irecv, coming, group=self.group, group_peer=origin))
        for work in dist.batch_isend_irecv(calls):
            waiting_for_work(work, self.group)
        return come[0], come[1]
