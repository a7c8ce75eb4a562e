"""Blocks in a row, of one kind or of several, and every range of blocks of them that a stage can hold.

    kinds       0 0 0 1 1 1 1 ...           first dense blocks, then blocks with experts
    ranges of blocks   -   0   1   00   01   11   000   001 ...        equal ones are one, whatever place they stand at

What a stage costs depends on which blocks it holds, not on where they stand. Of n equal blocks there are n + 1
ranges of blocks, numbered by their length; of a blocks of one kind before b of another a + b + a b.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.limits import checked, room

Numbers = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockRanges:
    """`kinds` of all blocks; `number[i, j]` is that of the range of blocks i ... j - 1, or -1; for every range of
    blocks where one like it starts, how long it is, and how many blocks of each kind (kinds, ranges of blocks) it
    has."""

    kinds: tuple[int, ...]
    number: Numbers
    starts: Numbers
    lengths: Numbers
    counts: Numbers

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """`counts`, to multiply with."""
        return self.counts.astype(np.float64)

    @cached_property
    def along(self) -> NDArray[np.float64]:
        """How many of the first 0, 1, ... of all blocks are of each kind, (kinds, blocks + 1)."""
        held = np.array(self.kinds, dtype=np.intp)[None, :] == np.arange(len(self.counts))[:, None]
        return np.concatenate([np.zeros((len(self.counts), 1)), np.cumsum(held, axis=1)], axis=1)

    @cached_property
    def before(self) -> NDArray[np.float64]:
        """How many blocks of each kind stand before where a range of blocks like each starts, (kinds, ranges of
        blocks)."""
        found: NDArray[np.float64] = self.along[:, self.starts]
        return found

    def only(self, some: Numbers) -> "BlockRanges":
        """These ranges of blocks alone, to be priced; `number` still has those of all."""
        return replace(self, starts=self.starts[some], lengths=self.lengths[some], counts=self.counts[:, some])

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return len(self.kinds)

    @property
    def whole(self) -> int:
        """Number of the range of all blocks."""
        return int(self.number[0, -1])

    @property
    def totals(self) -> tuple[int, ...]:
        """Blocks of each kind."""
        return tuple(self.counts[:, self.whole].tolist())

    def of(self, start: int, count: int) -> int:
        """Number of the range of blocks of `count` blocks from one on."""
        return int(self.number[start, start + count])

    def wider(self, start: int, count: int) -> int | None:
        """Number of the range of blocks with one block more, at its end or else before it; None where there is none."""
        if start + count < self.blocks:
            return self.of(start, count + 1)
        return self.of(start - 1, count + 1) if start else None


@lru_cache(maxsize=64)
def block_ranges_of(kinds: tuple[int, ...]) -> BlockRanges:
    """All ranges of blocks of some blocks, shorter ones first."""
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
    """All ranges of blocks of one kind: those of a length are one."""
    ends = np.arange(blocks + 1, dtype=np.intp)
    number = ends[None, :] - ends[:, None]
    return BlockRanges(
        kinds=(0,) * blocks,
        number=np.where(number < 0, -1, number),
        starts=np.zeros(blocks + 1, dtype=np.intp),
        lengths=ends,
        counts=ends[None, :].copy(),
    )
