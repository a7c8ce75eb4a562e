"""Coalesced asynchronous transfers: several tensors share one message per collective.

Collectives start asynchronously. Local steps of each tensor are done in between. A tensor that has been copied into a
flat buffer is not kept alive.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from planner.sharding.redistribute import COLLECTIVES, Step
from runtime.comm.collectives import (
    Collective,
    Pieces,
    coalesced_all_gather,
    coalesced_all_reduce,
    coalesced_all_to_all,
    coalesced_reduce,
    coalesced_reduce_scatter,
)
from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import apply_steps
from runtime.waiting import Pending, waiting_for_work

Groups = Sequence[dist.ProcessGroup | None]
"""The process group of each mesh axis."""


def _dims(steps: Sequence[Step]) -> list[int]:
    return [step.dim for step in steps]


def _extents(steps: Sequence[Step]) -> list[int]:
    return [step.extent for step in steps]


_COALESCED: Mapping[str, Callable[[Pieces, Sequence[Step], dist.ProcessGroup], Collective]] = {
    "all_gather": lambda pieces, steps, group: coalesced_all_gather(pieces, _dims(steps), group, _extents(steps)),
    "all_reduce": lambda pieces, steps, group: coalesced_all_reduce(pieces, group),
    "all_to_all": lambda pieces, steps, group: coalesced_all_to_all(
        pieces, _dims(steps), [step.to_dim for step in steps], group, _extents(steps)
    ),
    "reduce": lambda pieces, steps, group: coalesced_reduce(pieces, steps[0].root, group),
    "reduce_scatter": lambda pieces, steps, group: coalesced_reduce_scatter(pieces, _dims(steps), group),
}


class _Started(NamedTuple):
    """A collective in flight, with its send buffer where that must be kept alive."""

    work: Pending
    group: dist.ProcessGroup
    sent: torch.Tensor | None
    landed: Callable[[], Pieces]
    fill: Callable[[Pieces], None] | None


class Flight:
    """Tensors in flight, each on its own `steps`; the collectives among the steps are the same, on the same axes, for
    all tensors. The first collective starts at construction. The flight takes ownership of the tensors: it empties
    their list. A flight that `holds` keeps its send buffer until arrival, as asynchronous backends do, so that an audit
    counts it."""

    def __init__(
        self,
        steps: Sequence[Sequence[Step]],
        pieces: list[torch.Tensor],
        place: RankMesh,
        groups: Groups,
        *,
        holds: bool = False,
    ) -> None:
        self._place, self._groups, self._holds = place, groups, holds
        self._pieces = [piece.detach() for piece in pieces]
        pieces.clear()  # until here the caller's list has kept them alive
        self._steps = [
            [step for step in one if step.kind not in COLLECTIVES or place.mesh.sizes[step.axis] > 1] for one in steps
        ]
        self._started: _Started | None = None
        self.under_way: Step | None = None  # the collective that was started last
        self._go()

    def land(self, room: Callable[[], Pieces] | None = None) -> Pieces:
        """Wait, run the remaining collectives, and return the final tensors. Where the last step of all tensors is an
        all-gather, `room` may give the memory for them; it is called when they have arrived."""
        with torch.no_grad():
            while self._started is not None:
                self._pieces = self._arrived(None if any(self._steps) else room)
                self._go()
        return self._pieces

    def _arrived(self, room: Callable[[], Pieces] | None) -> Pieces:
        """The result of the collective in flight; its buffers are released before the next one starts."""
        assert self._started is not None
        started, self._started = self._started, None
        waiting_for_work(started.work, started.group)
        landed, fill = started.landed, started.fill
        del started
        if room is None:
            return landed()
        assert fill is not None, "the last step of all is an all-gather"
        pieces = room()
        fill(pieces)
        return pieces

    @torch.no_grad()
    def _go(self) -> None:
        """Run each tensor's steps up to its next collective, and start that collective for all of them."""
        following = []
        for at, steps in enumerate(self._steps):
            while steps and steps[0].kind not in COLLECTIVES:
                self._pieces[at] = apply_steps(self._pieces[at], [steps.pop(0)], self._place)
            if steps:
                following.append(steps.pop(0))
        if following:
            self.under_way = following[0]
            group = self._groups[self.under_way.axis]
            assert group is not None, "nothing moves along an axis of one device"
            collective = _COALESCED[self.under_way.kind](self._pieces, following, group)
            self._pieces = []
            sent = collective.sent if self._holds else None
            self._started = _Started(collective.call(async_op=True), group, sent, collective.landed, collective.fill)
