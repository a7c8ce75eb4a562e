"""Which keys a query sees, by their positions, and the number of pairs of queries and keys.

back 2, ahead 0     x . . . .        prefix 3     x x x . .
                    x x . . .                     x x x . .
                    x x x . .                     x x x . .        queries down, keys across
                    . x x x .                     x x x x .
                    . . x x x                     x x x x x

chunk 2, ahead 0    x . . . .
                    x x . . .
                    . . x . .
                    . . x x .
                    . . . . x
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

SCORES = 2**20
"""Scores of a block, over all samples and heads of a device. Kernels are told block by block what to hide."""

_ROWS = 16
"""Queries of a block, at least, where there are as many."""

Run = tuple[int, int]
"""First position and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`queries` queries from `row` on, and `keys` keys from `column` on; `query` and `key` are the positions of the
    first of each."""

    row: int
    queries: int
    column: int
    keys: int
    query: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Query i sees key j where i - `back` <= j <= i + `ahead` (None: any), or j < `prefix`. With a `chunk`, which
    excludes a prefix, both must also be in one chunk of that many positions."""

    back: int | None = None
    ahead: int | None = None
    prefix: int = 0
    chunk: int | None = None

    def keys(self, first: int, count: int, start: int, length: int) -> range:
        """Those of `length` keys from `start` on that any of `count` queries from `first` on sees: a contiguous run."""
        lowest = 0 if self.back is None else first - self.back
        highest = start + length if self.ahead is None else first + count + self.ahead
        if self.chunk is not None:
            lowest = max(lowest, first // self.chunk * self.chunk)
            highest = min(highest, -(-(first + count) // self.chunk) * self.chunk)
        begin = start if start < self.prefix else max(start, lowest)
        return range(begin, max(begin, min(start + length, max(highest, self.prefix))))

    def reach(self, length: int) -> int:
        """The most of `length` keys that any query sees."""
        most = length if self.back is None or self.ahead is None else self.back + self.ahead + 1 + self.prefix
        return min(length, most if self.chunk is None else min(most, self.chunk))

    def blocks(self, queries: Sequence[Run], keys: Sequence[Run], width: int) -> Iterator["Block"]:
        """The blocks that are computed one at a time, for queries and keys that lie in these runs one after the other:
        some queries of one run, and those keys of one run that any of them sees. `width` scores are made for each pair:
        samples x heads."""
        row = 0
        for first, count in queries:
            step = self._rows(count, keys, width)
            for offset in range(0, count, step):
                here, behind = min(step, count - offset), 0
                for start, length in keys:
                    met = self.keys(first + offset, here, start, length)
                    if met:
                        yield Block(row=row + offset, queries=here, column=behind + met.start - start, keys=len(met),
                                    query=first + offset, key=met.start)  # fmt: skip
                    behind += length
            row += count

    def _rows(self, count: int, keys: Sequence[Run], width: int) -> int:
        """Queries of a block: as many as `SCORES` allows, and no more than a window is wide, because a taller block
        would compute scores that are hidden."""
        reach = max([1, *(length for _, length in keys)])
        if self.back is not None and self.ahead is not None and not self.prefix:
            wide = self.back + self.ahead + 1
            count, reach = min(count, max(wide, _ROWS)), min(reach, 2 * wide)
        if self.chunk is not None:
            count, reach = min(count, max(self.chunk, _ROWS)), min(reach, 2 * self.chunk)
        return max(1, min(count, max(_ROWS, SCORES // (width * reach))))

    def shows_all(self, block: Block) -> bool:
        """Whether every query of a block sees every key of it."""
        behind = self.back is None or block.key >= block.query + block.queries - 1 - self.back
        before = self.ahead is None or block.key + block.keys - 1 <= block.query + self.ahead
        ends = (block.query, block.query + block.queries - 1, block.key, block.key + block.keys - 1)
        within = self.chunk is None or len({end // self.chunk for end in ends}) == 1
        return (behind and before and within) or block.key + block.keys <= self.prefix

    def pairs(self, first: int, count: int, length: int) -> int:
        """Pairs of `count` queries from `first` on and of the `length` keys that they see."""
        if self.chunk is not None:
            return sum(self._pairs_of_chunk(start, first, count, length) for start in range(0, length, self.chunk))
        prefix, seen = min(self.prefix, length), count * length
        if self.ahead is not None:  # up to ahead, and what of the prefix is behind that
            ends = (_clamped(first + self.ahead + 1, count, most) for most in (length, prefix))
            seen = next(ends) + count * prefix - next(ends)
        if self.back is not None:  # not from the first, but for the prefix
            seen -= _clamped(first - self.back, count, length) - _clamped(first - self.back, count, prefix)
        return seen

    def _pairs_of_chunk(self, start: int, first: int, count: int, length: int) -> int:
        """Pairs in the chunk from `start` on."""
        assert self.chunk is not None
        end = min(start + self.chunk, length)
        begin, queries = max(first, start), max(0, min(first + count, start + self.chunk) - max(first, start))
        return replace(self, chunk=None).pairs(begin - start, queries, end - start)


def computed_pairs(window: Window, queries: Sequence[Run], turns: Sequence[Sequence[Run]], width: int) -> int:
    """Pairs of queries and keys in all blocks, where the keys arrive in `turns`."""
    blocks = (block for keys in turns for block in window.blocks(queries, keys, width))
    return sum(block.queries * block.keys for block in blocks)


def _clamped(first: int, count: int, most: int) -> int:
    """Sum of `count` consecutive integers from `first` on, each clamped to 0 .. `most`."""
    low, high = min(max(first, 0), most), min(max(first + count, 0), most)
    return (low + high - 1) * (high - low) // 2 + most * (count - (min(max(most, first), first + count) - first))
