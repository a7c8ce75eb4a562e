"""Tables in the host memory of the ranks themselves: every rank holds a part of the rows, and is worker and server at
once. There is no socket and no log: ranks communicate over their process group.

    pull    ids ──to their owners──> numbers of rows ──looked up on the host──> rows ──back──> the rank that asked
    push    gradients ──to the owners of their rows──> summed in the order of the ranks, applied once

Rows are looked up, summed and updated on the host, by the code of a server (`shard.py`); a device holds only the rows
that it touches. Every method is collective.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from runtime.servers.client import Traffic
from runtime.servers.frames import Frame
from runtime.servers.shard import WEIGHT, Shard
from runtime.servers.tables import Ids, Table, check_ids, partition_of, pieces
from runtime.waiting import waiting_for

Array = NDArray[Any]


class HostTables:
    """The tables of a group of ranks (None: this rank alone), in which this one is number `rank`. Each rank takes its
    own rows from `values`, the whole tables, which are equal on all ranks."""

    collective = True

    def __init__(
        self,
        tables: Iterable[Table],
        values: Mapping[str, Array],
        group: dist.ProcessGroup | None,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        self.tables = {table.name: table for table in tables}
        self._group, self._device = group, device
        self.worker, self.workers = rank, 1 if group is None else group.size()
        self.step = 0
        self.traffic = Traffic()
        self._shard = Shard(number=rank, count=self.workers)
        self._apply(Frame(kind="open", fields={"workers": self.workers, "staleness": None}))
        self._parts = {}
        for table in self.tables.values():
            self._parts[table.name] = part = partition_of(table, self.workers)
            self._apply(Frame(kind="create", fields={"table": table.content()}))
            own = part.ids_of(rank, 0, part.held(rank))
            first = values[table.name][own].astype(table.dtype, copy=False)
            arrays = {"rows": np.arange(len(own), dtype=np.int64), "values": first}
            self._apply(Frame(kind="load", fields={"table": table.name, "part": WEIGHT}, arrays=arrays))
        self.ready()

    @property
    def nbytes(self) -> int:
        """Bytes of rows and of their optimizer states on this rank's host."""
        held = self._shard.tables.values()
        return sum(array.nbytes for one in held for array in (one.weight, *one.state.values()))

    def pull(self, ids: Mapping[str, Ids]) -> dict[str, Array]:
        """Rows of tables, (ids, width) each; each id once, the same tables on every rank."""
        found = {}
        for name, wanted in ids.items():
            found[name] = self.read(name, WEIGHT, wanted)
            self.traffic.pulled_rows += len(wanted)
            self.traffic.pulled_bytes += found[name].nbytes
        return found

    def push(self, gradients: Mapping[str, tuple[Ids, Array]], learning_rate: float | None = None) -> None:
        """Apply the sums of all ranks' gradients for this step."""
        arrays: list[dict[str, Array]] = [{} for _ in range(self.workers)]
        for number, (name, (ids, values)) in enumerate(gradients.items()):
            split = self._parts[name].split(ids)
            rows = self._exchange([rows for _, rows in split])
            sums = self._exchange([values[positions] for positions, _ in split])
            for worker, (its, given) in enumerate(zip(rows, sums, strict=True)):
                arrays[worker] |= {f"rows{number}": its, f"gradients{number}": given}
            self.traffic.pushed_rows += len(ids)
            self.traffic.pushed_bytes += values.nbytes
        for worker, pushed in enumerate(arrays):
            fields = {"worker": worker, "step": self.step, "tables": list(gradients), "learning_rate": learning_rate}
            self._apply(Frame(kind="push", fields=fields, arrays=pushed))
        self.step += 1

    def whole(self, name: str) -> Array:
        """All rows of a table, (rows, width)."""
        table = self.tables[name]
        return np.concatenate([self.read(name, WEIGHT, ids) for ids in pieces(0, table.rows, table.width)])

    def read(self, name: str, part: str, ids: Ids) -> Array:
        """Rows of a table (`part` "weight") or of an optimizer state, (ids, width); each id once. Raises RequestError
        for an id that is not one of its rows."""
        table = self.tables[name]
        check_ids(table, ids)
        split = self._parts[name].split(ids.astype(np.int64, copy=False))
        asked = self._exchange([rows for _, rows in split])
        answers = self._exchange([self._shard.rows(name, rows, part) for rows in asked])
        found = np.empty((len(ids), table.width), table.dtype)
        for (positions, _), rows in zip(split, answers, strict=True):
            found[positions] = rows
        return found

    def restart(self, step: int) -> None:
        """Continue after `step` steps with other contents: `write` gives them next, then `ready` is called."""
        self._apply(Frame(kind="restart", fields={"step": step}))
        self.step = step

    def write(self, name: str, part: str, ids: Ids, values: Array) -> None:
        """Set the contents of rows of a table, or of an optimizer state, between `restart` and `ready`; every rank
        gives its own ids, possibly none."""
        split = self._parts[name].split(ids)
        given = values.astype(self.tables[name].dtype, copy=False)
        rows = self._exchange([rows for _, rows in split])
        contents = self._exchange([given[positions] for positions, _ in split])
        for its, content in zip(rows, contents, strict=True):
            arrays = {"rows": its, "values": content}
            self._apply(Frame(kind="load", fields={"table": name, "part": part}, arrays=arrays))

    def ready(self) -> None:
        """Declare that all tables have their contents."""
        for name in self.tables:
            self._apply(Frame(kind="ready", fields={"table": name}))

    def close(self) -> None:
        """Free the rows."""
        self._shard.tables.clear()

    def _apply(self, record: Frame) -> None:
        if self._shard.check(record):
            self._shard.apply(record)

    def _exchange(self, parts: list[Array]) -> list[Array]:
        """Send one array to every rank, equal except for their first dim; returns the arrays that all ranks have sent
        to this one."""
        if self._group is None:
            return parts
        counts = torch.tensor([len(part) for part in parts], device=self._device)
        coming = torch.empty_like(counts)
        waiting_for(dist.all_to_all_single, coming, counts, group=self._group)
        sent = torch.from_numpy(np.concatenate(parts)).to(self._device)
        received = sent.new_empty((int(coming.sum()), *sent.shape[1:]))
        waiting_for(dist.all_to_all_single, received, sent, coming.tolist(), counts.tolist(), group=self._group)
        return list(np.split(received.cpu().numpy(), np.cumsum(coming.tolist())[:-1]))
