"""One collective along a dim of a tensor as several smaller ones, so that computation overlaps with them.

    all_gather       for rows in Arriving(...):           chunk k + 1 is in flight while chunk k is used
    reduce_scatter   leaving.send(rows)  ..  land()       chunk k is in flight while chunk k + 1 is computed
    all_reduce       likewise

The rows of a tensor are all of its dims but the last. Chunks are cut along one of these dims in the piece of each rank.
Chunk k of the whole consists of the chunks k of all ranks' pieces: n blocks, which lie side by side where the gathered
dim is also the chunked one. Shapes: a piece (.., d, .., h), the whole (.., n d, .., h), and for gathers and scatters
a chunk of the whole (n, .., d / chunks, .., h). No autograd.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from planner.sharding.redistribute import Step
from runtime.waiting import Pending, waiting_for_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """`count` chunks along a `dim`. The whole consists of the pieces of `ranks` ranks along the dim `moved`, or is the
    piece itself where that is None."""

    dim: int
    count: int
    moved: int | None = None
    ranks: int = 1

    @property
    def together(self) -> "Chunks":
        """All as one chunk."""
        return replace(self, count=1)

    def piece(self, piece: torch.Tensor, number: int) -> torch.Tensor:
        """A chunk of a piece, a view."""
        width = piece.shape[self.dim] // self.count
        return piece.narrow(self.dim, number * width, width)

    def whole(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """A chunk of a whole, a view: of all pieces, whose number is the first dim."""
        if self.moved is None:
            return self.piece(whole, number)
        pieces = torch.unflatten(whole, self.moved, (self.ranks, -1)).movedim(self.moved, 0)
        width = pieces.shape[self.dim + 1] // self.count
        return pieces.narrow(self.dim + 1, number * width, width)

    def shape(self, piece: torch.Size) -> torch.Size:
        """The shape of the whole of such pieces."""
        if self.moved is None:
            return piece
        return torch.Size((*piece[: self.moved], piece[self.moved] * self.ranks, *piece[self.moved + 1 :]))

    def shape_of_piece(self, whole: torch.Size) -> torch.Size:
        """The shape of the pieces of such a whole."""
        if self.moved is None:
            return whole
        return torch.Size((*whole[: self.moved], whole[self.moved] // self.ranks, *whole[self.moved + 1 :]))


def chunks_of(step: Step | None, dim: int, count: int, group: dist.ProcessGroup | None) -> Chunks:
    """The chunks of a redistribution step."""
    if step is None or step.kind == "all_reduce":
        return Chunks(dim=dim, count=count)
    assert group is not None, "nothing moves along an axis of one device"
    return Chunks(dim=dim, count=count, moved=step.dim, ranks=group.size())


class Arriving:
    """A chunked all-gather into `whole`; one chunk is in flight while another is used."""

    def __init__(self, piece: torch.Tensor, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self._piece, self._chunks, self._group = piece, chunks, group
        self.whole = piece.new_empty(chunks.shape(piece.shape))
        self._first: tuple[Pending, torch.Tensor, torch.Tensor] | None = None

    def begun(self) -> "Arriving":
        """The same, with the gather of its first chunk started."""
        self._first = self._start(0)
        return self

    def all(self) -> torch.Tensor:
        """The whole, when all of it has arrived."""
        for _ in self:
            pass
        return self.whole

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Each chunk of the whole, contiguous, once it has arrived; it is also copied into the whole."""
        chunks, coming = self._chunks, self._first or self._start(0)
        for number in range(chunks.count):
            work, _, arrived = coming
            waiting_for_work(work, self._group)
            if number + 1 < chunks.count:
                coming = self._start(number + 1)
            chunks.whole(self.whole, number).copy_(arrived)
            yield arrived

    def _start(self, number: int) -> tuple[Pending, torch.Tensor, torch.Tensor]:
        sent = self._chunks.piece(self._piece, number).contiguous()
        arriving = sent.new_empty((self._chunks.ranks * sent.shape[0], *sent.shape[1:]))
        work = dist.all_gather_single(arriving, sent, group=self._group, async_op=True)
        return work, sent, arriving.view(self._chunks.ranks, *sent.shape)


class Leaving:
    """A chunked reduction of all ranks' terms into a `piece`: each rank gets its piece of the sum, or the whole sum
    where `moved` is None. One chunk is in flight while the next is computed: `send` first waits for the chunk before.
    That takes no longer than to start all chunks at once, because messages go one after the other anyway, and it holds
    only two chunks. The last two chunks are in flight together while the caller does something else."""

    def __init__(self, chunks: Chunks, group: dist.ProcessGroup, piece: torch.Tensor) -> None:
        self._chunks, self._group, self._piece = chunks, group, piece
        self._sent = deque[tuple[Pending, torch.Tensor, torch.Tensor]]()
        self._landed = 0

    def send(self, term: torch.Tensor) -> None:
        """Start the reduction of the next chunk of the whole, contiguous; the caller must not use its memory any
        more."""
        if self._chunks.moved is None:
            self._sent.append((dist.all_reduce(term, group=self._group, async_op=True), term, term))
        else:
            own = term.new_empty(term.shape[1:])
            flat = term.view(self._chunks.ranks * own.shape[0], *own.shape[1:])
            work = dist.reduce_scatter_single(own, flat, group=self._group, async_op=True)
            self._sent.append((work, flat, own))
        if self._landed + len(self._sent) < self._chunks.count:  # another chunk will be computed
            self._land_all_but(1)

    def land(self) -> torch.Tensor:
        """Wait for all chunks; returns the piece."""
        self._land_all_but(0)
        return self._piece

    def _land_all_but(self, last: int) -> None:
        while len(self._sent) > last:
            work, _, own = self._sent.popleft()
            waiting_for_work(work, self._group)
            self._chunks.piece(self._piece, self._landed).copy_(own)
            self._landed += 1


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a matrix of its rows; a copy where the rows are not contiguous."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
