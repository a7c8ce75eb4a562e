"""Tables off the devices without rows: for an imitated step, where ids have no values."""

from collections.abc import Iterable

import torch

from planner.graph.placed import OutsideTable
from runtime.optimizers.narrow import wide_dtype
from runtime.servers.served import Moved, leaf_of


class ImaginedTables:
    """Gives rows as if all ids of a look-up were different, as in the plan's price; discards their gradients."""

    def __init__(self, tables: Iterable[OutsideTable]) -> None:
        self._tables = {table.name: table for table in tables}

    def rows(
        self, name: str, ids: torch.Tensor, *, trained: bool, pushes: bool, moved: Moved
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ServedTables.rows`: rows without contents, U H, and an index into them for every id."""
        table = self._tables[name]
        wide = wide_dtype(getattr(torch, table.dtype))
        rows = torch.empty(min(ids.numel(), table.rows), table.width, dtype=wide, device=ids.device)
        push = _drop if pushes else None
        return leaf_of(rows, trained=trained, push=push, moved=moved), torch.empty_like(ids, dtype=torch.int64)


def _drop(gradient: torch.Tensor) -> None:
    """Discard the gradient."""
