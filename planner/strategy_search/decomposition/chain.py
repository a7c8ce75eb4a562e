"""All pieces of a template, and what crosses from one pipeline stage to the next."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.block_ranges import BlockRanges, block_ranges_of
from planner.strategy_search.decomposition.pieces import Passes, Piece
from planner.strategy_search.request.template import Key
from planner.strategy_search.tables.cost_table import CostTables

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """All pieces of a template on one mesh at one micro-batch size.

    `head` and `tail` may contain the first and the last block (`blocks_in_head`, `blocks_in_tail`): this is so where
    the input of the first block, or the output of the last one, is not that of the boundary. `head`, `inner` and `tail`
    have one piece for every way to run their blocks; `inner` for each kind of the remaining blocks. A model without
    repeated blocks has everything in `head`, and `inner` and `tail` are empty.
    """

    tables: CostTables
    alias: Mapping[Key, Key]  # operators and parameters that take the choice of another one
    boundary: tuple[Key, ...]
    shape: tuple[int, ...]  # candidates of each variable of the boundary
    head: tuple[Piece, ...]
    inner: tuple[Piece, ...]
    tail: tuple[Piece, ...]
    blocks_in_head: int
    blocks_in_tail: int
    crossing: "Crossing"
    handed: Array  # bytes of the outputs of a block that the next one keeps unchanged, per state
    ending: Array  # bytes that the last block keeps in addition to what others keep (may be negative), per state
    tied: tuple[Array, Array]  # seconds per micro-batch and per step that a rank with both head and tail saves
    relaxed: tuple[Key, ...] = ()  # shared weights and values for which each piece chooses by itself (see `cutting`)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the pieces take."""
        return sum(piece.nbytes for piece in (*self.head, *self.inner, *self.tail))

    @cached_property
    def block_ranges(self) -> BlockRanges:
        """The inner blocks, and the ranges of them that a stage may hold."""
        blocks = self.tables.template.blocks
        kinds = blocks.kinds[self.blocks_in_head : blocks.count - self.blocks_in_tail] if self.inner else ()
        order = {kind: number for number, kind in enumerate(dict.fromkeys(piece.kind for piece in self.inner))}
        return block_ranges_of(tuple(order[kind] for kind in kinds))

    @property
    def blocks_at_ends(self) -> int:
        """The number of blocks in head and tail."""
        return self.blocks_in_head + self.blocks_in_tail

    @property
    def interior_in_head(self) -> bool:
        """Whether the interior of the head is that of a block, or that of the whole model."""
        return self.blocks_in_head > 0 or not self.inner

    @cached_property
    def least_fixed(self) -> float:
        """Least bytes of the parameters of an inner block, over all kinds and ways to run it; 0 without inner
        blocks."""
        return min((piece.least_fixed for piece in self.inner), default=0.0)

    @cached_property
    def travels(self) -> bool:
        """Whether collectives of weights or gradients may overlap with the computation of other blocks."""
        return any(cells.any() for piece in self.inner for cells in piece.under or ())

    @cached_property
    def begins(self) -> bool:
        """Whether weights of operators before the blocks may share a coalesced all-gather."""
        return any(piece.uncovered is not None for piece in self.head)

    @cached_property
    def reduces(self) -> bool:
        """Whether gradient reductions may overlap with the last backward pass."""
        return any(piece.reduction is not None for piece in (*self.head, *self.inner, *self.tail))

    def shares(self, under: Passes, ranks: int) -> Passes:
        """The shares of `under` that apply to this chain. Reductions beyond the last backward pass count only without a
        pipeline: there a step takes at least that pass for every micro-batch."""
        forward, backward, last = under
        travels = (forward, backward) if self.travels else (0.0, 0.0)
        return (*travels, max(last, 0.0) if self.reduces and ranks == 1 else 0.0)

    @cached_property
    def kinds(self) -> tuple[tuple[Piece, ...], ...]:
        """The inner pieces by kind, in the order of `block_ranges`."""
        order = dict.fromkeys(piece.kind for piece in self.inner)
        return tuple(tuple(piece for piece in self.inner if piece.kind == kind) for kind in order)


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossing:
    """What crosses from one pipeline stage to the next. Arrays are per state of the boundary.

    A stage keeps the bytes that it receives: `nbytes` for the outputs of the block before it, `passing` for values that
    every block reads, and `staying` for those of either kind that have no gradients. Seconds are per micro-batch:
    `forward` to receive these values, `backward` for their gradients to come back, both for neighbouring ranks;
    `forward_around` and `backward_around` between the last rank and the first. `between` has the seconds forward and
    backward from each rank to the next if links differ from rank to rank; else it is empty.
    """

    nbytes: Array
    passing: Array
    staying: Array
    forward: Array
    backward: Array
    forward_around: Array
    backward_around: Array
    between: tuple[tuple[Array, Array], ...] = ()

    @cached_property
    def along_own_axes(self) -> tuple[Array, ...]:
        """Seconds forward, backward, forward around and backward around, each with axes of length one where it is
        constant."""
        return tuple(map(_own_axes, (self.forward, self.backward, self.forward_around, self.backward_around)))


def _own_axes(values: Array) -> Array:
    """The values of every state, with axes of length one where they are constant."""
    return values[tuple(slice(None) if stride else slice(1) for stride in values.strides)]
