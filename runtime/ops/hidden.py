"""What a mask hides of a block of scores, made for that block alone.

    queries of this device    runs of positions, one or, in zigzag order, two        keys that are here    as well
    block                     some queries of one run, and the keys of one run that any of them may see

so that nothing is computed of keys that no query of a block sees, and a mask of queries x keys is never made.

    B batch, Q queries, K keys, S positions
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from planner.sharding.rules.windows import SCORES
from planner.sharding.window import Window

Run = tuple[int, int]
"""First position and length."""

_ROWS = 16
"""Queries of a block at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """What positions show (`window`), and numbers of all tokens of the samples here, (B, S): two of one document have
    the same one, and a token whose number in `seen` is 0 is padding, as a key."""

    window: Window
    documents: torch.Tensor | None = None
    seen: torch.Tensor | None = None

    def blocks(
        self, queries: Sequence[Run], keys: Sequence[Run], width: int
    ) -> Iterator[tuple[slice, slice, "Hidden"]]:
        """Rows of the queries and of the keys that meet, and what is hidden of each block. `width` scores are made for
        each pair of positions: samples x heads."""
        row = 0
        for first, count in queries:
            for offset in range(0, count, step := self._rows(count, keys, width)):
                here = min(step, count - offset)
                behind = 0
                for start, length in keys:
                    met = self.window.keys(first + offset, here, start, length)
                    if met:
                        rows = slice(row + offset, row + offset + here)
                        columns = slice(behind + met.start - start, behind + met.stop - start)
                        yield rows, columns, Hidden(mask=self, query=first + offset, key=met.start, keys=len(met))
                    behind += length
            row += count

    def _rows(self, count: int, keys: Sequence[Run], width: int) -> int:
        """Queries of a block: as many as `SCORES` allows, and no more than a window is wide, of which else a block
        would compute what is hidden."""
        reach = max(length for _, length in keys)
        if self.window.back is not None and self.window.ahead is not None and not self.window.prefix:
            wide = self.window.back + self.window.ahead + 1
            count, reach = min(count, max(wide, _ROWS)), min(reach, 2 * wide)
        return max(1, min(count, max(_ROWS, SCORES // (width * reach))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """What is hidden in a block whose first query and whose `keys` keys from the first on have these positions."""

    mask: Mask
    query: int
    key: int
    keys: int

    def bias(self, query_BHQD: torch.Tensor) -> torch.Tensor | None:
        """0 where a key is seen, minus infinity elsewhere, (B or 1, 1, Q, K); None where all are."""
        window, count, device = self.mask.window, query_BHQD.shape[2], query_BHQD.device
        documents, seen = self.mask.documents, self.mask.seen
        if documents is None and seen is None and self._all(count):
            return None
        rows = torch.arange(self.query, self.query + count, device=device).unsqueeze(1)
        columns = torch.arange(self.key, self.key + self.keys, device=device)
        shown = torch.ones((count, self.keys), dtype=torch.bool, device=device)
        if window.back is not None:
            shown &= columns >= rows - window.back
        if window.ahead is not None:
            shown &= columns <= rows + window.ahead
        if window.prefix:
            shown |= columns < window.prefix
        shown = shown[None, None]
        if documents is not None:
            of_queries = documents[:, self.query : self.query + count]
            shown = shown & (of_queries[:, None, :, None] == documents[:, None, None, self.key : self.key + self.keys])
        if seen is not None:
            shown = shown & (seen[:, None, None, self.key : self.key + self.keys] != 0)
        bias = query_BHQD.new_zeros(shown.shape)
        return bias.masked_fill_(~shown, -torch.inf)

    def _all(self, count: int) -> bool:
        """Whether every query of the block sees every key of it, as far as positions say."""
        window, last = self.mask.window, self.query + count - 1
        behind = window.back is None or self.key >= last - window.back
        before = window.ahead is None or self.key + self.keys - 1 <= self.query + window.ahead
        return (behind and before) or self.key + self.keys <= window.prefix
