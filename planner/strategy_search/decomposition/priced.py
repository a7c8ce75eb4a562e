"""Pieces solved for one price of memory, and their values over the states of the boundary."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.pieces import Column, Passes, Solved
from planner.strategy_search.request.template import Key

Array = NDArray[np.float64]
State: TypeAlias = tuple[int, ...]
States: TypeAlias = tuple[NDArray[np.intp], ...]
"""Some states of the boundary: one array per axis, all of the same length."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """The pieces solved for one price of memory, and their values over all states of the boundary."""

    price: float
    flights: float
    under: Passes
    proves: bool  # whether the values bound the busy time of a rank
    at_tail: float  # share of transient bytes that is counted at the tail
    head: tuple[Solved, ...]
    inner: tuple[tuple[Solved, ...], ...]  # for each kind of block
    tail: tuple[Solved, ...]
    values: tuple[Array, Array, Array]  # head, inner (kinds, *states) and tail
    hosted: float = 0.0  # the price of memory of the host
    known: dict[tuple[int, State], Column] = field(default_factory=dict)  # by piece
    every: dict[tuple[int, State], tuple[Column, ...]] = field(default_factory=dict)  # by the pieces of all ways
    best: dict[tuple[int, State], Column] = field(default_factory=dict)  # the same

    def columns(self, pieces: tuple[Solved, ...], state: State, chain: Chain) -> tuple[Column, ...]:
        """The chosen columns of the head, the tail, or one kind of block at a state, one for each way to run the
        blocks."""
        key = (id(pieces), state)
        if key not in self.every:
            self.every[key] = tuple([self._column(solved, state, chain) for solved in pieces])
        return self.every[key]

    def best_column(self, pieces: tuple[Solved, ...], state: State, chain: Chain) -> Column | None:
        """The column of the piece that costs least at this price and state; None without pieces."""
        key = (id(pieces), state)
        if pieces and key not in self.best:
            costs = [float(over(chain, solved)[state]) for solved in pieces]
            self.best[key] = self._column(pieces[costs.index(min(costs))], state, chain)
        return self.best.get(key)

    def _column(self, solved: Solved, state: State, chain: Chain) -> Column:
        inside = tuple([state[axis] for axis in _axes(chain.boundary, solved.piece.boundary)])
        key = (id(solved), inside)
        if key not in self.known:
            self.known[key] = solved.column(inside)
        return self.known[key]


def of_all_blocks(counts: Sequence[int], inner: Array) -> Array:
    """The values of all inner blocks together, from the value of one block of each kind and their `counts`."""
    return sum((count * values for count, values in zip(counts, inner, strict=True)), np.zeros(inner.shape[1:]))


def picked(values: Array, some: States | None) -> Array:
    """The values of `some` states, or of all if None. Axes in front of those of the boundary stay."""
    return values if some is None else values[(..., *some)]  # type: ignore[arg-type]  # numpy's stubs


def over(chain: Chain, solved: Solved) -> Array:
    """Values of a piece over all states of the chain's boundary."""
    return np.broadcast_to(_own(chain, solved), chain.shape)


def least_value(chain: Chain, solved: Sequence[Solved]) -> Array:
    """The least values of some pieces over all states of the chain's boundary."""
    return np.broadcast_to(_own_least(chain, solved), chain.shape)


def least_values(chain: Chain, kinds: Sequence[Sequence[Solved]]) -> Array:
    """The least values of the pieces of each kind of block, (kinds, *states)."""
    least = [_own_least(chain, solved) for solved in kinds]
    together = np.stack(np.broadcast_arrays(*least)) if least else np.zeros((0, *chain.shape))
    return np.broadcast_to(together, (len(kinds), *chain.shape))


def _own_least(chain: Chain, solved: Sequence[Solved]) -> Array:
    """The least values of some pieces, with axes of length one for variables that are not on their boundary. A piece
    may know only few of the many states of a chain."""
    own = [_own(chain, one) for one in solved] or [np.zeros((1,) * len(chain.shape))]
    return functools.reduce(np.minimum, own)


def _own(chain: Chain, solved: Solved) -> Array:
    """Values of a piece, with axes of length one for variables that are not on its boundary."""
    shape = [1] * len(chain.boundary)
    for axis, size in zip(_axes(chain.boundary, solved.piece.boundary), solved.values.shape, strict=True):
        shape[axis] = size
    return solved.values.reshape(shape)


@functools.lru_cache(maxsize=1024)
def _axes(boundary: tuple[Key, ...], own: tuple[Key, ...]) -> tuple[int, ...]:
    """The axes of the chain's boundary that the boundary of a piece has."""
    return tuple([boundary.index(name) for name in own])
