"""The state of one server: its rows of every table, and the progress of every worker. It has no sockets and no files:
it changes only by records, in the order in which they come, so replaying them gives a bit-identical state.

Every worker pushes once per step, also where it touched no row of this server; its clock counts its pushes.

    synchronous   the pushes of all workers for a step are collected, summed in the order of the workers and applied
                  once. Rows of step t are given out when t steps were applied.
    bounded       every push is applied when it comes. Rows of step t are given out when the slowest worker's clock is
                  at least t - s: the fastest is at most s steps ahead (Ho et al. 2013, stale synchronous parallel).

A push whose step is behind its worker's clock was applied before: it is acknowledged and changes nothing. A restart
sets all clocks, and the contents of tables and states are loaded again: this is how a checkpoint is restored.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware_profiles.units import bytes_text
from planner.errors import RequestError, unknown_name
from planner.limits import available_bytes, resident_bytes
from runtime.servers.frames import LARGEST_BODY, Frame
from runtime.servers.tables import Partition, Table, first_values, memory_of_drawing, partition_of, rows_at_a_time

Array = NDArray[Any]

RECORDS = ("open", "create", "load", "ready", "push", "restart")
"""Kinds of frames that change a shard."""

WEIGHT = "weight"
"""The part of a table that is looked up; the other parts are its optimizer states."""

MOST_WORKERS = 2**17
"""Maximum number of workers: their clocks, as text, go into the header of one frame."""

_CHUNK = 2**24  # maximum numbers in a snapshot's frame


@dataclass(kw_only=True)
class HeldTable:
    """The rows of a table that one server has, and their optimizer states. `ready`: they have their initial values."""

    table: Table
    partition: Partition
    weight: Array
    state: dict[str, Array]
    ready: bool

    def part(self, name: str) -> Array:
        """The weights, or the optimizer state of this name. Raises RequestError where there is no such state."""
        parts = {WEIGHT: self.weight, **self.state}
        if name not in parts:
            raise RequestError(f"table '{self.table.name}': " + unknown_name("part", name, parts))
        return parts[name]


@dataclass(kw_only=True)
class Shard:
    """Server number `number` of `count`. `staleness` is None in synchronous mode; `workers` is None before it is
    opened.

    `clocks` counts the pushes of every worker, `version` the updates; `pending` has the pushes that wait for others.
    """

    number: int
    count: int
    workers: int | None = None
    staleness: int | None = None
    clocks: list[int] = field(default_factory=list)
    version: int = 0
    tables: dict[str, HeldTable] = field(default_factory=dict)
    pending: dict[int, Frame] = field(default_factory=dict)

    def check(self, record: Frame) -> bool:
        """Whether a record changes anything: one that was applied before does not. Raises RequestError, without
        changing anything, for a record that this server cannot apply."""
        fields = record.fields
        if record.kind == "open":
            return self._check_open(int(fields["workers"]), fields["staleness"])
        self._check_opened()
        if record.kind == "create":
            return self._check_create(Table.of(fields["table"]))
        if record.kind in ("load", "ready"):
            held = self._held(str(fields["table"]))
            if record.kind == "load" and not held.ready:
                part = held.part(fields["part"])
                _check_rows(held, record.arrays["rows"], record.arrays["values"], part)
            return not held.ready
        if record.kind == "restart":
            return True
        worker, step = int(fields["worker"]), int(fields["step"])
        self._check_worker(worker)
        if step > self.clocks[worker]:
            raise RequestError(
                f"worker {worker} pushes step {step}, and server {self.number} has only {self.clocks[worker]} of its"
                " steps: it was started from an older snapshot; start workers and servers from the same one"
            )
        for number, name in enumerate(fields["tables"]):
            held = self.ready(name)
            _check_rows(held, record.arrays[f"rows{number}"], record.arrays[f"gradients{number}"], held.weight)
        return step == self.clocks[worker]

    def apply(self, record: Frame) -> None:
        """Change the state by a record for which `check` returned True."""
        fields = record.fields
        if record.kind == "open":
            self.workers, self.staleness = int(fields["workers"]), fields["staleness"]
            self.clocks = [0] * self.workers
        elif record.kind == "create":
            self._create(Table.of(fields["table"]))
        elif record.kind == "load":
            self.tables[fields["table"]].part(fields["part"])[record.arrays["rows"]] = record.arrays["values"]
        elif record.kind == "ready":
            self.tables[fields["table"]].ready = True
        elif record.kind == "restart":
            self._restart(int(fields["step"]))
        else:
            self._push(record)

    def may_pull(self, step: int, tables: Iterable[str]) -> bool:
        """Whether rows of these tables may be given out for this step yet. Raises RequestError for a step that is over,
        and for an unknown table."""
        held = [self._held(name) for name in tables]
        if not all(one.ready for one in held):
            return False
        if self.staleness is not None:
            return min(self.clocks) >= step - self.staleness
        if step < self.version:
            raise RequestError(
                f"a worker asks for rows of step {step}, but server {self.number} has made {self.version} steps: the"
                " worker was started again; start workers and servers from the same snapshot"
            )
        return step == self.version

    def waiting_for(self, step: int, tables: Iterable[str]) -> list[int]:
        """The workers for which requests of rows for this step wait; the first worker gives tables their initial
        values."""
        if not all(self._held(name).ready for name in tables):
            return [0]
        least = step if self.staleness is None else step - self.staleness
        return [worker for worker, clock in enumerate(self.clocks) if clock < least]

    def check_pull(self, tables: Iterable[str], arrays: Mapping[str, Array], part: str = WEIGHT) -> None:
        """Raise RequestError for more rows than fit into one message."""
        sizes = (arrays[f"rows{n}"].size * self.ready(name).part(part)[:1].nbytes for n, name in enumerate(tables))
        if (size := sum(sizes)) > LARGEST_BODY:
            raise RequestError(
                f"{size} bytes of rows are asked for at once, {LARGEST_BODY} are the most of a message: ask for fewer"
            )

    def rows(self, name: str, rows: Array, part: str = WEIGHT) -> Array:
        """Rows of a table, or of an optimizer state, by their numbers on this server. Raises RequestError for rows that
        it does not have."""
        held = self.ready(name)
        _check_rows(held, rows)
        return held.part(part)[rows]

    def _push(self, record: Frame) -> None:
        worker = int(record.fields["worker"])
        self.clocks[worker] += 1
        if self.staleness is not None:
            self._update([record])
            return
        self.pending[worker] = record
        if len(self.pending) == self.workers:
            pushes = [self.pending[one] for one in sorted(self.pending)]
            self.pending.clear()
            self._update(pushes)

    def _update(self, pushes: list[Frame]) -> None:
        """One update of every table from the sum of some pushes, at the learning rate of the first."""
        self.version += 1
        rate = pushes[0].fields["learning_rate"]
        parts: dict[str, list[tuple[Array, Array]]] = {name: [] for name in self.tables}
        for push in pushes:
            for number, name in enumerate(push.fields["tables"]):
                parts[name].append((push.arrays[f"rows{number}"], push.arrays[f"gradients{number}"]))
        for name, found in parts.items():
            held = self.tables[name]
            rows, gradient = summed(found, held.table)
            chosen = held.table.optimizer.learning_rate if rate is None else float(rate)
            held.table.optimizer.update(held.weight, held.state, rows, gradient, self.version, chosen)

    def _restart(self, step: int) -> None:
        """Set every worker's clock to `step`; all tables wait for their contents, and optimizer states start anew."""
        assert self.workers is not None
        self.clocks, self.version = [step] * self.workers, step
        self.pending.clear()
        for held in self.tables.values():
            held.ready, held.state = False, {}  # frees the old state before the new one
            held.state = held.table.optimizer.new_state(len(held.weight), held.table.width, held.table.dtype)

    def _create(self, table: Table, *, drawn: bool = True) -> None:
        """Create a table, with its initial values if `drawn`."""
        partition = partition_of(table, self.count)
        held = partition.held(self.number)
        weight = np.zeros((held, table.width), table.dtype)
        if drawn and table.deviation != 0.0:
            step = rows_at_a_time(table)
            for start in range(0, held, step):
                ids = partition.ids_of(self.number, start, min(held, start + step))
                weight[start : start + step] = first_values(table, ids)
        self.tables[table.name] = HeldTable(
            table=table,
            partition=partition,
            weight=weight,
            state=table.optimizer.new_state(held, table.width, table.dtype),
            ready=False,
        )

    def _check_open(self, workers: int, staleness: int | None) -> bool:
        if not 1 <= workers <= MOST_WORKERS or (staleness is not None and staleness < 0):
            raise RequestError(
                f"{workers} workers, staleness {staleness}: 1 to {MOST_WORKERS} workers, staleness 0 or more"
            )
        if self.workers is None:
            return True
        if (workers, staleness) != (self.workers, self.staleness):
            raise RequestError(
                f"server {self.number} works for {self.workers} workers, {_mode(self.staleness)}; this worker"
                f" says {workers} workers, {_mode(staleness)}: start all of them alike, or the servers in a new folder"
            )
        return False

    def _check_opened(self) -> None:
        if self.workers is None:
            raise RequestError(f"server {self.number} does not know yet how many workers there are")

    def _check_create(self, table: Table) -> bool:
        partition = partition_of(table, self.count)
        known = self.tables.get(table.name)
        if known is not None and known.table != table:
            theirs, ours = known.table.content(), table.content()
            (name, value), *_ = ((name, value) for name, value in theirs.items() if value != ours[name])
            raise RequestError(
                f"table '{table.name}' on server {self.number} has {name} {value}, this worker says {ours[name]}; to"
                " train"
                " another table start the servers in a new folder"
            )
        held = self._nbytes()
        needed = partition.held(self.number) * table.memory_of_row
        if known is None and held + needed > _memory_of_host():
            raise RequestError(
                f"table '{table.name}' needs {bytes_text(needed)} on server {self.number}, which has"
                f" {bytes_text(held)} of tables; its host has {bytes_text(_memory_of_host())}: start more"
                " servers, on other hosts"
            )
        if known is None and self.version:
            raise RequestError(
                f"table '{table.name}' is made after step {self.version}; make all tables before the first step"
            )
        return known is None

    def check_room(self, record: Frame) -> None:
        """Raise RequestError for a new table for which there is not enough memory now. Records that are already in a
        log are not checked: they fitted once."""
        if record.kind != "create":
            return
        table = Table.of(record.fields["table"])
        needed = partition_of(table, self.count).held(self.number) * table.memory_of_row + memory_of_drawing(table)
        promised = max(0.0, self._nbytes() - resident_bytes())  # zero pages that have not been written yet
        available = available_bytes()
        if available is not None and promised + needed > available:
            raise RequestError(
                f"table '{table.name}' needs {bytes_text(needed)} on server {self.number}, on whose host"
                f" {bytes_text(available)} are available: start more servers, on other hosts"
            )

    def _nbytes(self) -> int:
        return sum(part.nbytes for one in self.tables.values() for part in (one.weight, *one.state.values()))

    def _check_worker(self, worker: int) -> None:
        assert self.workers is not None
        if not 0 <= worker < self.workers:
            raise RequestError(f"worker {worker} of {self.workers}; the first one is 0")

    def _held(self, name: str) -> HeldTable:
        if name not in self.tables:
            known = ", ".join(self.tables) or "none"
            raise RequestError(f"server {self.number} has no table '{name}'; it has: {known}")
        return self.tables[name]

    def ready(self, name: str) -> HeldTable:
        """A table that has its initial values. Raises RequestError for one that has none, or is unknown."""
        held = self._held(name)
        if not held.ready:
            raise RequestError(f"table '{name}' has no initial values yet")
        return held

    def snapshot(self) -> Iterator[Frame]:
        """The whole state as frames, in pieces that stay small for any number of workers and tables."""
        yield Frame(
            kind="shard",
            fields={
                "number": self.number, "count": self.count, "workers": self.workers, "staleness": self.staleness,
                "version": self.version,
            },
        )  # fmt: skip
        yield Frame(kind="clocks", arrays={"clocks": np.array(self.clocks, np.int64)})
        for held in self.tables.values():
            yield Frame(kind="table", fields={"table": held.table.content(), "ready": held.ready})
        for name, held in self.tables.items():
            for part, array in {WEIGHT: held.weight, **held.state}.items():
                step = max(1, _CHUNK // max(1, array[:1].size))
                for start in range(0, len(array), step):
                    yield Frame(
                        kind="part",
                        fields={"table": name, "part": part, "start": start},
                        arrays={"values": array[start : start + step]},
                    )
        yield from (self.pending[worker] for worker in sorted(self.pending))
        yield Frame(kind="end")

    @staticmethod
    def restored(frames: Iterator[Frame]) -> "Shard":
        """The shard from the frames of `snapshot`; until version 0.1 all clocks and tables were in its first frame.
        Raises ValueError for an incomplete sequence of frames."""
        first = next(frames, None)
        if first is None or first.kind != "shard":
            raise ValueError("it has no beginning")
        known = dict(first.fields)
        tables = known.pop("tables", [])
        shard = Shard(**known)
        for content in tables:
            shard._restore_table(content)
        for frame in frames:
            if frame.kind == "end":
                return shard
            if frame.kind == "clocks":
                shard.clocks = frame.arrays["clocks"].tolist()
            elif frame.kind == "table":
                shard._restore_table(frame.fields)
            elif frame.kind == "push":
                shard.pending[int(frame.fields["worker"])] = frame
            else:
                held, values = shard.tables[frame.fields["table"]], frame.arrays["values"]
                start = frame.fields["start"]
                held.part(frame.fields["part"])[start : start + len(values)] = values
        raise ValueError("it has no end")

    def _restore_table(self, content: Mapping[str, Any]) -> None:
        """Restore a table of a snapshot; its rows follow."""
        table = Table.of(content["table"])
        self._create(table, drawn=False)
        self.tables[table.name].ready = content["ready"]


def summed(parts: list[tuple[Array, Array]], table: Table) -> tuple[Array, Array]:
    """Sums of row gradients. Each part has ascending rows; returns the rows, and their sums in the order of the
    parts."""
    if not parts:
        return np.zeros(0, np.int64), np.zeros((0, table.width), table.dtype)
    if len(parts) == 1:
        return parts[0]
    rows = np.unique(np.concatenate([rows for rows, _ in parts]))
    total = np.zeros((len(rows), table.width), table.dtype)
    for part, gradient in parts:
        total[np.searchsorted(rows, part)] += gradient
    return rows, total


def _check_rows(held: HeldTable, rows: Array, values: Array | None = None, part: Array | None = None) -> None:
    """Raise RequestError for rows that are not here, and for values with another form than this part of the table."""
    table = held.table
    ascending = rows.ndim == 1 and rows.dtype.kind == "i" and bool((rows[1:] > rows[:-1]).all())
    if not ascending or (len(rows) and (rows[0] < 0 or rows[-1] >= len(held.weight))):
        raise RequestError(
            f"table '{table.name}': {len(held.weight)} rows are here, and what was asked for are not some of them, each"
            " once and in ascending order"
        )
    if values is None or part is None:
        return
    if values.shape != (len(rows), *part.shape[1:]) or values.dtype != part.dtype:
        raise RequestError(
            f"table '{table.name}' has rows of {table.width} numbers, {table.dtype}; it was sent {values.shape},"
            f" {values.dtype}"
        )


def _memory_of_host() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _mode(staleness: int | None) -> str:
    return "synchronous" if staleness is None else f"at most {staleness} steps apart"
