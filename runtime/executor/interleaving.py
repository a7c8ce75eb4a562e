"""Interleaved micro-batches of a stage, which alternate operator by operator: one computes while another communicates.

    batch 0  compute ─depart─┐                 ┌─arrive─ compute ─depart─┐
    batch 1                  compute ─depart─┐ :                         ┌─arrive─ compute

A transfer is split into a departure, which starts its first collective, and an arrival, which waits for it; the other
micro-batches run in between. Autograd goes through the recorded nodes in reverse order: of the nodes that have their
gradients, the newest runs first. So the collective of the gradient starts after the arrival's node and is waited for
before the departure's node, with the same work of the other micro-batches in between.

Where only a gradient is sent, such as the gradient of the input of a column-parallel product, no switch happens in the
forward pass, because nothing is waited for. Its departure is recorded with an older sequence number than everything
that the other micro-batches have recorded in their turns since (`Turn.before`), so that autograd runs theirs first:

    forward    0: add, norm | product .. ─depart─   1: add, norm | product .. ─depart─   0: ─arrive─ add ..
    backward   1: .. product ─depart─   0: .. product ─depart─   1: ─arrive─ norm, add, .. product ─depart─   0: ..

This holds for the micro-batches of one call of `torch.autograd.backward`.

Where a micro-batch sends twice without a product in between, as under sequence parallelism, it does so in the middle of
the computation of another one (`planner.plan.layout.micro_batch_turns`); autograd does the same in reverse order:

    forward    1: .. product   0: ─arrive─ add, norm ─depart─   1: product .. ─depart─   0: ─arrive─ product ..

The idea is that of interleaved halves of a batch in MindSpore's fine-grained multi-copy parallelism and in Domino (Wang
et al. 2024, arXiv 2409.15241).
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
    """The turn of interleaved micro-batch number `number`. `began` has for each micro-batch the sequence number of the
    first autograd node of its last turn; initial values are older than any node. `before` is the oldest node of the
    other micro-batches' turns since the last turn of this one."""

    number: int
    began: list[int]
    before: int = 0
    runs: bool = False

    @classmethod
    def of_each(cls, count: int) -> list["Turn"]:
        """One for each of `count` micro-batches."""
        began = [*range(count)]
        return [cls(number, began) for number in range(count)]

    def begin(self) -> None:
        """Begin a turn."""
        self.runs, self.before = True, self.began[(self.number + 1) % len(self.began)]
        self.began[self.number] = torch._C._autograd._get_sequence_nr()


class _Way:
    """A transfer in flight, forward and later backward."""

    def __init__(self, steps: Transfer, place: RankMesh, piece: torch.Tensor, reader: object) -> None:
        self._steps, self._place = steps, place
        self.reader = reader
        self._flight: Flight | None = self._start(steps.forward, piece)

    def _start(self, steps: Sequence[Step], piece: torch.Tensor) -> Flight:
        """A flight reduces in place, and others may read the piece, so a piece that is all-reduced is copied."""
        sums = any(step.kind == "all_reduce" for step in steps)
        given = piece.clone() if sums else piece
        return Flight([steps], [given], self._place, self._place.groups, holds=True)

    def land(self) -> torch.Tensor:
        """The received tensor: for the consumer, or on the way back for the producer."""
        assert self._flight is not None, "it has departed"
        (landed,), self._flight = self._flight.land(), None
        return landed

    def turn_back(self, gradient: torch.Tensor) -> None:
        """Start the transfer of the gradient."""
        self._flight = self._start(self._steps.backward, gradient.to(self._steps.reduced_in or gradient.dtype))

    def arrived(self) -> torch.Tensor:
        """The tensor for the consumer. The last cut is copied where autograd must not keep the whole (see
        `Transfer`)."""
        landed = self.land()
        return landed.clone(memory_format=torch.contiguous_format) if self._steps.copies else landed


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """An operand that has departed. `token` has no elements; it connects the arrival to the departure in the autograd
    graph. None where no gradient comes back."""

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
    """Start to move an operand of the instruction `reader`. As in `Transfer.__call__`, the gradient goes to the `stub`
    if there is one. In the backward pass the other micro-batches first run back through all nodes since the `turn`
    before, if it is given; else only through those since this departure."""
    source = stub if stub is not None and stub.requires_grad else piece
    way = _Way(steps, place, piece, reader)
    returns = source.requires_grad and torch.is_grad_enabled()
    token = _Departure.apply(source, way) if returns else None  # type: ignore[no-untyped-call]
    if token is not None and turn is not None:
        token.grad_fn._set_sequence_nr(turn.before)
    return Departed(way=way, token=token)


def in_turns(programs: Sequence[Iterator[Then]], turns: Sequence[Turn]) -> None:
    """Run all programs to their ends (`costmodels.take_turns`). A turn continues from one call to the next."""
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
