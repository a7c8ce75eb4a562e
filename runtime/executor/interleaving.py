"""Copies of a stage that take turns, operator by operator: while what one of them sends is on its way, others compute.

    batch 0  compute ─depart─┐                 ┌─arrive─ compute ─depart─┐
    batch 1                  compute ─depart─┐ :                         ┌─arrive─ compute

A transfer is taken apart into a departure, which starts its first collective, and an arrival, which waits for it;
others go on in between. Autograd goes back through what it has recorded in the opposite order, the newest operator that
has its gradient first: the gradient's collective starts behind the arrival and is waited for before the departure, with
the same work of the other micro-batches between the two.

Where a gradient alone is sent, as that of the input of a column-parallel product, nobody goes on forward, as nothing is
waited for. Its departure is recorded as if it were older than all that the others have done in their turns since
(`Turn.before`), so that autograd goes on with them first:

    forward    0: add, norm | product .. ─depart─   1: add, norm | product .. ─depart─   0: ─arrive─ add ..
    backward   1: .. product ─depart─   0: .. product ─depart─   1: ─arrive─ norm, add, .. product ─depart─   0: ..

This holds for the micro-batches of one call of `torch.autograd.backward`.

Where one sends twice without a product in between, as under sequence parallelism, it does that in the middle of what
another one computes (`planner.plan.layout.micro_batch_turns`); autograd does the same, from the last to the first:

    forward    1: .. product   0: ─arrive─ add, norm ─depart─   1: product .. ─depart─   0: ─arrive─ product ..

The idea is that of interleaved halves of a batch in MindSpore's fine-grained multi-copy parallelism and in Domino
(Wang et al. 2024, arXiv 2409.15241).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from costmodels import Then, take_turns
from planner.sharding.redistribute import Step
from runtime.comm.async_collectives import Flight
from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import Transfer


@dataclass(slots=True)
class Turn:
    """The turn of a micro-batch, the `number` of those that take turns. `began` has for each of them the first node
    that autograd recorded in its last turn; before the first ones those are older than any. The oldest node of the
    turns that the others had since the last one of this is `before`."""

    number: int
    began: list[int]
    before: int = 0
    runs: bool = False

    @classmethod
    def of_each(cls, count: int) -> list["Turn"]:
        """Those of so many micro-batches."""
        began = [*range(count)]
        return [cls(number, began) for number in range(count)]

    def begin(self) -> None:
        """It begins."""
        self.runs, self.before = True, self.began[(self.number + 1) % len(self.began)]
        self.began[self.number] = torch._C._autograd._get_sequence_nr()


class _Way:
    """A transfer under way, forward and later back."""

    def __init__(self, steps: Transfer, place: RankMesh, piece: torch.Tensor, reader: object) -> None:
        self._steps, self._place = steps, place
        self.reader = reader
        self._flight: Flight | None = self._start(steps.forward, piece)

    def _start(self, steps: Sequence[Step], piece: torch.Tensor) -> Flight:
        """A flight takes its sums in the memory that it is given, and others may read the piece."""
        sums = any(step.kind == "all_reduce" for step in steps)
        given = piece.clone() if sums else piece
        return Flight([steps], [given], self._place, self._place.groups, holds=True)

    def land(self) -> torch.Tensor:
        """What the consumer gets, or what the producer gets back."""
        assert self._flight is not None, "it has departed"
        (landed,), self._flight = self._flight.land(), None
        return landed

    def turn_back(self, gradient: torch.Tensor) -> None:
        """Start the way of the gradient."""
        self._flight = self._start(self._steps.backward, gradient.to(self._steps.reduced_in or gradient.dtype))

    def arrived(self) -> torch.Tensor:
        """What the consumer gets. The last cut is copied where autograd must not keep the whole (see `Transfer`)."""
        landed = self.land()
        return landed.clone(memory_format=torch.contiguous_format) if self._steps.copies else landed


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """An operand that has departed. `token` has no elements, it ties the arrival to the departure in the graph of
    autograd; None where no gradient comes back."""

    way: _Way
    token: torch.Tensor | None

    def arrive(self) -> torch.Tensor:
        """Wait for it."""
        if self.token is None:
            return self.way.arrived()
        return _Arrival.apply(self.token, self.way)  # type: ignore[no-any-return, no-untyped-call]


def depart(
    piece: torch.Tensor,
    steps: Transfer,
    place: RankMesh,
    stub: torch.Tensor | None,
    reader: object,
    turn: Turn | None,
) -> Departed:
    """Start to move an operand of the instruction `reader`. As `Transfer.__call__`: where there is a `stub`, the
    gradient goes to it. On the way back others go on until they have been through all that they did since the `turn`
    before, where one is given; else until what they did since the departure."""
    source = stub if stub is not None and stub.requires_grad else piece
    way = _Way(steps, place, piece, reader)
    returns = source.requires_grad and torch.is_grad_enabled()
    token = _Departure.apply(source, way) if returns else None  # type: ignore[no-untyped-call]
    if token is not None and turn is not None:
        token.grad_fn._set_sequence_nr(turn.before)
    return Departed(way=way, token=token)


def in_turns(programs: Sequence[Iterator[Then]], turns: Sequence[Turn]) -> None:
    """Run all of them to their ends (`costmodels.take_turns`). A turn goes on from one call to the next."""
    gone_on: set[int] = set()

    def begin(number: int) -> None:
        if number in gone_on or not turns[number].runs:
            turns[number].begin()
        gone_on.add(number)

    take_turns(programs, begin)


class _Departure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return source.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.way.land(), None


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return way.arrived()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.way.turn_back(gradients[0])
        return gradients[0].new_empty(0), None
