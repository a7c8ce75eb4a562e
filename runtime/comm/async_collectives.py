"""Tensors on their way together: what they would have sent one by one, as one message for each collective.

    all_reduce       [ a | b | c ]                     as they are, end to end
    reduce_scatter   [ a0 b0 c0 | a1 b1 c1 | .. ]      what goes to each process in one row
    all_gather       [ a b c ]  ->  [ a0 b0 c0 | .. ]  rows come in, and are dealt out again
    all_to_all       as reduce_scatter, and back

Sums are of the same elements as if each member went by itself. Collectives start without being waited for; steps that
send nothing are done in between, each member's own. What has been copied into a flat buffer is not held on to.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from planner.sharding.redistribute import COLLECTIVES, Step
from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import apply_steps
from runtime.waiting import waiting_for

Pieces = list[torch.Tensor]
Groups = Sequence[dist.ProcessGroup | None]
"""Processes to talk to on each axis."""


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self) -> object: ...


Started = tuple[Pending, torch.Tensor, Callable[[], Pieces]]
"""What to wait for, what is there because it is sent, and what then makes the members' new pieces."""


def _all_reduce(pieces: Pieces, steps: Sequence[Step], group: dist.ProcessGroup) -> Started:
    # a lone gradient is not read again, so that its own memory may take the sum
    flat = torch.cat([p.reshape(-1) for p in pieces]) if len(pieces) > 1 else pieces[0].contiguous().view(-1)
    work = dist.all_reduce(flat, dist.ReduceOp.SUM, group, async_op=True)
    shapes = [piece.shape for piece in pieces]
    return work, flat, lambda: [f.view(s) for f, s in zip(torch.split(flat, _sizes(shapes)), shapes, strict=True)]


def _reduce_scatter(pieces: Pieces, steps: Sequence[Step], group: dist.ProcessGroup) -> Started:
    rows, dims = group.size(), [step.dim for step in steps]
    cut = [torch.unflatten(piece.movedim(dim, 0), 0, (rows, -1)) for piece, dim in zip(pieces, dims, strict=True)]
    flat, shapes = _in_rows(cut, rows), [one.shape[1:] for one in cut]
    own = flat.new_empty(flat.shape[1])
    work = dist.reduce_scatter_single(own, flat.view(-1), group=group, async_op=True)

    def landed() -> Pieces:
        parts = zip(torch.split(own, _sizes(shapes)), shapes, dims, strict=True)
        return [part.view(shape).movedim(0, dim).contiguous() for part, shape, dim in parts]

    return work, flat, landed


def _all_gather(pieces: Pieces, steps: Sequence[Step], group: dist.ProcessGroup) -> Started:
    rows, dims = group.size(), [step.dim for step in steps]
    first = [piece.movedim(dim, 0) for piece, dim in zip(pieces, dims, strict=True)]
    flat, shapes = torch.cat([one.reshape(-1) for one in first]), [one.shape for one in first]
    whole = flat.new_empty(rows * flat.numel())
    work = dist.all_gather_single(whole, flat, group, async_op=True)

    def landed() -> Pieces:
        parts = zip(torch.split(whole.view(rows, -1), _sizes(shapes), dim=1), shapes, dims, strict=True)
        return [part.reshape(-1, *shape[1:]).movedim(0, dim).contiguous() for part, shape, dim in parts]

    return work, flat, landed


def _all_to_all(pieces: Pieces, steps: Sequence[Step], group: dist.ProcessGroup) -> Started:
    rows, dims = group.size(), [step.dim for step in steps]
    cut = [torch.stack(piece.chunk(rows, step.to_dim)) for piece, step in zip(pieces, steps, strict=True)]
    flat, shapes = _in_rows(cut, rows), [one.shape[1:] for one in cut]
    del cut
    incoming = torch.empty_like(flat)
    work = dist.all_to_all_single(incoming.view(-1), flat.view(-1), group=group, async_op=True)

    def landed() -> Pieces:
        parts = zip(torch.split(incoming, _sizes(shapes), dim=1), shapes, dims, strict=True)
        return [torch.unflatten(part, 1, shape).movedim(0, dim).flatten(dim, dim + 1) for part, shape, dim in parts]

    return work, flat, landed


def _sizes(shapes: Sequence[torch.Size]) -> list[int]:
    return [shape.numel() for shape in shapes]


def _in_rows(cut: Pieces, rows: int) -> torch.Tensor:
    """Tensors whose first dim says to whom a part goes, side by side: one row for each process. A lone one is not
    copied where it lies in memory like that."""
    if len(cut) == 1:
        return cut[0].reshape(rows, -1).contiguous()  # of strided pieces a view may have rows with gaps
    sizes = [one[0].numel() for one in cut]
    flat = cut[0].new_empty((rows, sum(sizes)))
    for place, one in zip(torch.split(flat, sizes, dim=1), cut, strict=True):
        torch.unflatten(place, 1, one.shape[1:]).copy_(one)
    return flat


_START: Mapping[str, Callable[[Pieces, Sequence[Step], dist.ProcessGroup], Started]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
}


class Flight:
    """Pieces under way, each on its `steps`, which are the same collectives on the same axes for all; the first
    collective starts when it is made. The pieces are its own from then. One that `holds` has what it sends until it has
    arrived, as backends do that run asynchronously: so an audit sees it."""

    def __init__(
        self,
        steps: Sequence[Sequence[Step]],
        pieces: Sequence[torch.Tensor],
        place: RankMesh,
        groups: Groups,
        *,
        holds: bool = False,
    ) -> None:
        self._place, self._groups, self._holds = place, groups, holds
        self._pieces = [piece.detach() for piece in pieces]
        self._steps = [
            [step for step in one if step.kind not in COLLECTIVES or place.mesh.sizes[step.axis] > 1] for one in steps
        ]
        self._started: tuple[Pending, torch.Tensor | None, Callable[[], Pieces]] | None = None
        self.under_way: Step | None = None  # the collective that was started last
        self._go()

    def land(self) -> Pieces:
        """Wait, and take the collectives that are left; the pieces at the end of their way."""
        with torch.no_grad():
            while self._started is not None:
                work, _, landed = self._started
                waiting_for(work.wait)
                self._started = _ = None
                self._pieces = landed()
                self._go()
        return self._pieces

    @torch.no_grad()
    def _go(self) -> None:
        """Each member's steps up to its next collective, which is started for all of them."""
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
            work, sent, landed = _START[self.under_way.kind](self._pieces, following, group)
            self._started = work, sent if self._holds else None, landed
            self._pieces = []
