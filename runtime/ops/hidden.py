"""What a mask hides of a block of scores, made for that block alone.

Blocks are those of `planner.sharding.window`: nothing is computed of keys that no query of a block sees, and a mask of
queries x keys is never made.

    B batch, Q queries, K keys, S positions
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from planner.sharding.window import Block, Run, Window


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
        """Rows of the queries and of the keys that meet, and what is hidden of each block."""
        for block in self.window.blocks(queries, keys, width):
            rows = slice(block.row, block.row + block.queries)
            yield rows, slice(block.column, block.column + block.keys), Hidden(mask=self, block=block)

    def whole(self, length: int) -> "Hidden":
        """What is hidden of all queries and keys of a sequence."""
        return Hidden(mask=self, block=Block(row=0, queries=length, column=0, keys=length, query=0, key=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """What a mask hides of a block."""

    mask: Mask
    block: Block

    def bias(self, query_BHQD: torch.Tensor) -> torch.Tensor | None:
        """0 where a key is seen, minus infinity elsewhere, (B or 1, 1, Q, K); None where all are."""
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
