"""The keys that a mask hides in a block of scores, computed for that block alone.

Blocks are those of `planner.sharding.window`: keys that no query of a block sees are not computed, and a mask of
queries x keys is never built.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from planner.sharding.window import Block, Run, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Which positions see each other (`window`), and document numbers of all tokens of the samples here, (B, S): tokens
    see only tokens of the same document. A token whose number in `seen` is 0 is padding, hidden as a key."""

    window: Window
    documents: torch.Tensor | None = None
    seen: torch.Tensor | None = None

    def blocks(
        self, queries: Sequence[Run], keys: Sequence[Run], width: int
    ) -> Iterator[tuple[slice, slice, "Hidden"]]:
        """The rows of queries and keys of each block, and what is hidden in it."""
        for block in self.window.blocks(queries, keys, width):
            rows = slice(block.row, block.row + block.queries)
            yield rows, slice(block.column, block.column + block.keys), Hidden(mask=self, block=block)

    def whole(self, length: int) -> "Hidden":
        """What is hidden for all queries and keys of a sequence."""
        return Hidden(mask=self, block=Block(row=0, queries=length, column=0, keys=length, query=0, key=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """The hidden keys of a block."""

    mask: Mask
    block: Block

    def bias(self, query_BHQD: torch.Tensor) -> torch.Tensor | None:
        """0 where a key is seen, minus infinity elsewhere, (B or 1, 1, Q, K); None where all are seen."""
        window, block, device = self.mask.window, self.block, query_BHQD.device
        documents, seen = self.mask.documents, self.mask.seen
        if documents is None and seen is None and window.shows_all(block):
            return None
        queries, keys = slice(block.query, block.query + block.queries), slice(block.key, block.key + block.keys)
        rows = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
        columns = torch.arange(keys.start, keys.stop, device=device)
        shown = torch.ones((block.queries, block.keys), dtype=torch.bool, device=device)
        if window.back is not None:
            shown &= columns >= rows - window.back
        if window.ahead is not None:
            shown &= columns <= rows + window.ahead
        if window.chunk is not None:
            shown &= columns // window.chunk == rows // window.chunk
        if window.prefix:
            shown |= columns < window.prefix
        shown = shown[None, None]
        if documents is not None:
            shown = shown & (documents[:, None, queries, None] == documents[:, None, None, keys])
        if seen is not None:
            shown = shown & (seen[:, None, None, keys] != 0)
        return query_BHQD.new_zeros(shown.shape).masked_fill_(~shown, -torch.inf)
