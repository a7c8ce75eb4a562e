"""Consecutive blocks, of one kind or of several, and every range of them that a stage can hold.

    kinds       0 0 0 1 1 1 1 ...           first dense blocks, then blocks with experts
    ranges      -   0   1   00   01   11   000   001 ...        equal ones count once, wherever they are

The cost of a stage depends on which blocks it holds, not on where they are. n equal blocks have n + 1 ranges, numbered
by their length; a blocks of one kind before b of another have a + b + a b ranges that are not empty.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.limits import checked, room

Numbers = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockRanges:
    """All ranges of some blocks.

    Attributes:
        kinds: the kind of each block.
        number: `number[i, j]` is the number of the range of blocks i ... j - 1, or -1 if there is none.
        starts: for every range, a block at which such a range starts.
        lengths: how many blocks each range has.
        counts: how many blocks of each kind each range has, (kinds, ranges of blocks)."""

    kinds: tuple[int, ...]
    number: Numbers
    starts: Numbers
    lengths: Numbers
    counts: Numbers

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """`counts` as floats, for products."""
        return self.counts.astype(np.float64)

    @cached_property
    def along(self) -> NDArray[np.float64]:
        """How many of the first 0, 1, ... blocks are of each kind, (kinds, blocks + 1)."""
        held = np.array(self.kinds, dtype=np.intp)[None, :] == np.arange(len(self.counts))[:, None]
        return np.concatenate([np.zeros((len(self.counts), 1)), np.cumsum(held, axis=1)], axis=1)

    @cached_property
    def before(self) -> NDArray[np.float64]:
        """How many blocks of each kind come before the start of each range, (kinds, ranges of blocks)."""
        found: NDArray[np.float64] = self.along[:, self.starts]
        return found

    def only(self, some: Numbers) -> "BlockRanges":
        """A subset of the ranges, to be priced; `number` still numbers all of them."""
        return replace(self, starts=self.starts[some], lengths=self.lengths[some], counts=self.counts[:, some])

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.kinds)

    @property
    def whole(self) -> int:
        """The number of the range of all blocks."""
        return int(self.number[0, -1])

    @property
    def totals(self) -> tuple[int, ...]:
        """How many blocks of each kind there are."""
        return tuple(self.counts[:, self.whole].tolist())

    def of(self, start: int, count: int) -> int:
        """The number of the range of `count` blocks that begins at block `start`."""
        return int(self.number[start, start + count])

    def wider(self, start: int, count: int) -> int | None:
        """The number of the range that is one block longer, at its end or else at its start; None if there is none."""
        if start + count < self.blocks:
            return self.of(start, count + 1)
        return self.of(start - 1, count + 1) if start else None


@lru_cache(maxsize=64)
def block_ranges_of(kinds: tuple[int, ...]) -> BlockRanges:
    """All ranges of some blocks, shorter ones first."""
    blocks = len(kinds)
    room(2 * 8 * (blocks + 1) ** 2, f"the block_ranges of {blocks} blocks")
    if blocks and not any(kinds):
        return _ranges_alike(blocks)
    number = np.full((blocks + 1, blocks + 1), -1, dtype=np.intp)
    known: dict[tuple[int, ...], int] = {}
    starts: list[int] = []
    for length in checked(range(blocks + 1)):
        for start in range(blocks - length + 1):
            held = kinds[start : start + length]
            if held not in known:
                known[held] = len(known)
                starts.append(start)
            number[start, start + length] = known[held]
    count = max(kinds, default=-1) + 1
    counts = np.array([[held.count(kind) for held in known] for kind in range(count)], dtype=np.intp)
    return BlockRanges(
        kinds=kinds,
        number=number,
        starts=np.array(starts, dtype=np.intp),
        lengths=np.array([len(held) for held in known], dtype=np.intp),
        counts=counts.reshape(count, len(known)),
    )


def _ranges_alike(blocks: int) -> BlockRanges:
    """All ranges of blocks of one kind: all ranges of a length are the same."""
    ends = np.arange(blocks + 1, dtype=np.intp)
    number = ends[None, :] - ends[:, None]
    return BlockRanges(
        kinds=(0,) * blocks,
        number=np.where(number < 0, -1, number),
        starts=np.zeros(blocks + 1, dtype=np.intp),
        lengths=ends,
        counts=ends[None, :].copy(),
    )
