"""Prices of memory, and what they prove.

With a price y (seconds per byte) in place of the limit, every piece is a problem without limits, solved exactly for
every state of the boundary. No stage of n blocks that fits is then busy for less than

    head + n inner + tail - y capacity                                                  (Lagrange)

and that for every y. The pieces of a larger micro-batch prove the same for its k-th parts: k parts take no less time
together than the whole, and hold no less than a k-th of its activations each.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.search.pieces import Chain, Column, Piece, Solved, Weights

Array = NDArray[np.float64]
State = tuple[int, ...]

_LEAN = 1e-6
"""Bytes that a second is worth where the least memory is asked for: only breaks ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the pipeline is run: ranks, virtual stages on each, micro-batches, micro-batches in flight of every chunk
    (ranks, chunks), and the bytes that a device may fill."""

    ranks: int
    chunks: int
    micro_batches: int
    in_flight: tuple[tuple[float, ...], ...]
    capacity: float

    def flights(self, rank: int) -> float:
        """Micro-batches in flight of a rank, on average over its chunks."""
        return math.fsum(self.in_flight[rank]) / self.chunks


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """The pieces solved for one price of memory, and their values over all states of the boundary."""

    price: float
    flights: float
    head: tuple[Solved, ...]
    inner: tuple[Solved, ...]
    tail: tuple[Solved, ...]
    values: tuple[Array, Array, Array]
    known: dict[tuple[int, State], Column] = field(default_factory=dict)

    def columns(self, side: int, state: State, chain: Chain) -> list[Column]:
        """The choices of head, inner or tail at a state, one for each way to run blocks."""
        pieces = (self.head, self.inner, self.tail)[side]
        found = []
        for solved in pieces:
            key = (id(solved), state)
            if key not in self.known:
                inside = [chain.boundary.index(name) for name in solved.piece.boundary]
                self.known[key] = solved.column([state[axis] for axis in inside])
            found.append(self.known[key])
        return found

    def best_column(self, side: int, state: State, chain: Chain) -> Column | None:
        """The cheaper way to run the blocks in the head or the tail at this price."""
        pieces = (self.head, self.inner, self.tail)[side]
        columns = self.columns(side, state, chain)
        costs = [float(over(chain, solved)[state]) for solved in pieces]
        return columns[costs.index(min(costs))] if columns else None


class Duals:
    """The pieces of a chain solved for any number of prices.

    `micro_batches`: how many of the chain's make up a step. `allowed`: the candidates that some operators may choose.
    """

    def __init__(
        self, chain: Chain, micro_batches: int, allowed: Mapping[int, NDArray[np.bool_]] | None = None
    ) -> None:
        self.chain, self.micro_batches = chain, micro_batches
        pieces = (*chain.head, *chain.inner, *chain.tail)
        self.banned = {id(piece): piece.banned(allowed) for piece in pieces} if allowed else {}
        blocks = chain.tables.template.blocks.count
        self.blocks = max(0, blocks - chain.blocks_in_head - chain.blocks_in_tail) if chain.inner else 0
        self.priced: list[Priced] = []
        self._parts: Array | None = None

    def solve(self, price: float, flights: float) -> None:
        """Solve the pieces at a price of memory, for so many micro-batches in flight; an infinite price asks for the
        least memory."""
        m, blocks = self.micro_batches, max(1, self.chain.tables.template.blocks.count)
        if math.isinf(price):
            weights = Weights(part=m * _LEAN, step=_LEAN, fixed=1.0, live=flights, replay=1.0 / blocks)
        else:
            weights = Weights(part=m, step=1.0, fixed=price, live=price * flights, replay=price / blocks)
        head, inner, tail = (
            tuple(piece.solve(weights, self.banned.get(id(piece))) for piece in _worth(pieces, price))
            for pieces in (self.chain.head, self.chain.inner, self.chain.tail)
        )
        values = (self._least_value(head), self._least_value(inner), self._least_value(tail))
        self.priced.append(Priced(price=price, flights=flights, head=head, inner=inner, tail=tail, values=values))

    def bounds(self, setting: Setting) -> Array:
        """Least seconds of a step for every state of the boundary. `setting` may have k times the micro-batches of the
        chain, with flights counted in those of the chain.

        With a_s + n b_s the least busy time of rank s with n inner blocks, the slowest of the ranks that share N blocks
        is busy for (N + sum a_s / b_s) / sum 1 / b_s or more: less would leave blocks over.
        """
        if setting.ranks == 1:
            return self._rank_bound(setting, 0)[2]
        inverse, weighed = np.zeros(self.chain.shape), np.zeros(self.chain.shape)
        possible = np.isfinite(self._sum_of_parts(setting))
        for rank in range(setting.ranks):
            ends, slope, _ = self._rank_bound(setting, rank)
            slope = np.where(possible, np.maximum(slope, 1e-30), 1.0)
            inverse, weighed = inverse + 1 / slope, weighed + np.where(possible, ends, 0.0) / slope
        slowest = np.maximum(0.0, (self.blocks + weighed) / inverse)
        ratio = self.micro_batches / setting.micro_batches
        lone = self._sum_of_parts(setting) * (ratio / setting.chunks)
        return slowest * (1 - 1 / (setting.micro_batches * setting.chunks)) + lone

    def crossing_seconds(self, setting: Setting, rank: int) -> Array:
        """Seconds of a micro-batch of the chain to receive and to send back, of every state."""
        crossing = self.chain.crossing
        if setting.ranks == 1:
            return np.zeros(self.chain.shape)
        received = setting.chunks - (rank == 0)
        sent = setting.chunks - (rank == setting.ranks - 1)
        return received * crossing.forward + sent * crossing.backward

    def _rank_bound(self, setting: Setting, rank: int) -> tuple[Array, Array, Array]:
        """The best proved a + n b of a rank at its share of the blocks: a, b, and the value there."""
        share, flights = self.blocks / setting.ranks, setting.flights(rank)
        first, last = rank == 0, rank == setting.ranks - 1
        crossing = self.crossing_seconds(setting, rank) * self.micro_batches
        best: tuple[Array, Array, Array] | None = None
        for priced in self.priced:
            if math.isinf(priced.price) or (priced.price and priced.flights > flights * (1 + 1e-12)):
                continue
            head, slope, tail = priced.values
            ends = crossing + (head if first else 0.0) + (tail if last else 0.0) - priced.price * setting.capacity
            value = ends + share * slope
            if best is None:
                best = (ends, slope, value)
            else:
                better = value > best[2]
                ours = zip((ends, slope, value), best, strict=True)
                ends, slope, value = (np.where(better, new, old) for new, old in ours)
                best = (ends, slope, value)
        assert best is not None, "the free price is always tried"
        return best

    def _sum_of_parts(self, setting: Setting) -> Array:
        """Least seconds of one micro-batch of the chain on all ranks."""
        if self._parts is None:
            weights = Weights(part=1.0)
            head, inner, tail = (
                self._least_value(
                    tuple(piece.solve(weights, self.banned.get(id(piece))) for piece in _worth(pieces, 0.0))
                )
                for pieces in (self.chain.head, self.chain.inner, self.chain.tail)
            )
            self._parts = head + self.blocks * inner + tail
        crossings = [self.crossing_seconds(setting, rank) for rank in range(setting.ranks)]
        return sum(crossings, self._parts)

    def _least_value(self, solved: tuple[Solved, ...]) -> Array:
        total = np.full(self.chain.shape, 0.0 if not solved else math.inf)
        for one in solved:
            total = np.minimum(total, over(self.chain, one))
        return total


def _worth(pieces: tuple[Piece, ...], price: float) -> tuple[Piece, ...]:
    """Recomputation never pays where memory is free."""
    if price == 0.0 and pieces and not pieces[0].recompute:
        return pieces[:1]
    return pieces


def over(chain: Chain, solved: Solved) -> Array:
    """Values of a piece over all states of the chain's boundary."""
    axes = [chain.boundary.index(name) for name in solved.piece.boundary]
    shape = [1] * len(chain.boundary)
    for axis, size in zip(axes, solved.values.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(solved.values.reshape(shape), chain.shape)
