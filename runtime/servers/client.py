"""A worker's side of tables on servers: it pulls the rows that it touches, and pushes their gradients.

    rows = client.pull({"users": ids})              unique rows of any tables, one message to every server
    client.push({"users": (ids, gradients)})        the end of the worker's step

Rows are numbered as in the whole table; the client knows which server has them. It counts bytes: of rows, of row
numbers, and of everything that was sent and received.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from planner.errors import RequestError, unknown_name
from runtime.servers.addresses import Addresses
from runtime.servers.connection import PATIENCE, Link, ask_all, program_name
from runtime.servers.frames import Frame
from runtime.servers.shard import WEIGHT
from runtime.servers.tables import Ids, Table, check_ids, partition_of, pieces

Array = NDArray[Any]


@dataclass(kw_only=True)
class Traffic:
    """What a worker has transferred so far: the number of rows, their bytes, and the bytes of the row numbers."""

    pulled_rows: int = 0
    pulled_bytes: int = 0
    pushed_rows: int = 0
    pushed_bytes: int = 0
    id_bytes: int = 0


class TableClient:
    """Worker number `worker` of `workers`. `staleness` is None for synchronous steps, else how many steps the fastest
    worker may be ahead of the slowest. Every worker gives the same `tables`, in the same order.

    Worker 0 may give initial values of tables (`load`); then every worker calls `begin`. Raises RequestError for
    requests that the servers refuse, RunError where the servers, or other workers, do not respond for `patience`
    seconds.
    """

    collective = False

    def __init__(
        self,
        addresses: Addresses,
        tables: Iterable[Table],
        *,
        worker: int = 0,
        workers: int = 1,
        staleness: int | None = None,
        patience: float = PATIENCE,
    ) -> None:
        if not 0 <= worker < workers:
            raise RequestError(f"worker {worker} of {workers} workers: the first one is 0")
        if staleness is not None and staleness < 0:
            raise RequestError(f"staleness {staleness}: give 0 or more steps, or None for synchronous steps")
        self.tables = {table.name: table for table in tables}
        self.worker, self.workers = worker, workers
        self.traffic = Traffic()
        self._parts = {name: partition_of(table, addresses.count) for name, table in self.tables.items()}
        program = program_name()
        self._links = {
            server: Link(addresses=addresses, server=server, worker=worker, program=program, patience=patience)
            for server in range(addresses.count)
        }
        try:
            self._everywhere(Frame(kind="open", fields={"workers": workers, "staleness": staleness}))
            for table in self.tables.values():
                self._everywhere(Frame(kind="create", fields={"table": table.content()}))
            self.step, self._torn = self._clock()
        except BaseException:  # else the servers would refuse the next client as a second worker of this rank
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Total bytes sent and received, including frames and retries."""
        links = self._links.values()
        return sum(link.sent for link in links), sum(link.received for link in links)

    @property
    def reconnections(self) -> int:
        """How often the connection to a server was lost."""
        return sum(link.reconnections for link in self._links.values())

    def begin(self, values: Mapping[str, Array] | None = None) -> None:
        """Initialize the tables: worker 0 sends the initial values that it has, and declares the tables ready; the
        first pull of the others waits for that. Tables that are ready stay unchanged."""
        if self.worker != 0:
            return
        ready = self._status()[0].fields["ready"]
        for name, whole in (values or {}).items():
            if not ready[self._table(name).name]:
                self._load(self.tables[name], whole)
        self.ready()

    def ready(self) -> None:
        """As worker 0, declare that all tables have their contents; pulls are answered from then on."""
        for name in self.tables if self.worker == 0 else ():
            self._everywhere(Frame(kind="ready", fields={"table": name}))

    def restart(self, step: int) -> None:
        """Continue after `step` steps with other contents: `write` gives them next, then `ready` is called. Worker 0
        does it; the others call it too, and are readmitted by the servers once worker 0 has done it."""
        if self.worker == 0:
            self._everywhere(Frame(kind="restart", fields={"step": step}))
        self.step, self._torn = step, None

    def pull(self, ids: Mapping[str, Ids]) -> dict[str, Array]:
        """Rows of tables for this step, (ids, width) each; each id once. In synchronous mode they include the updates
        of all steps before this one, else at least those of all workers up to `staleness` steps ago."""
        found = {
            name: np.empty((len(one), self._table(name).width), self.tables[name].dtype) for name, one in ids.items()
        }
        split = {name: self._split(name, one) for name, one in ids.items()}
        self._check_clock()
        frames = {}
        for server in self._links:
            here = [name for name in ids if len(split[name][server][0])]
            if here:
                arrays = {f"rows{n}": split[name][server][1] for n, name in enumerate(here)}
                frames[server] = Frame(kind="pull", fields={"step": self.step, "tables": here}, arrays=arrays)
        for server, answer in ask_all(self._links, frames).items():
            for number, name in enumerate(frames[server].fields["tables"]):
                positions, rows = split[name][server]
                found[name][positions] = answer.arrays[f"values{number}"]
                self.traffic.pulled_rows += len(rows)
                self.traffic.pulled_bytes += answer.arrays[f"values{number}"].nbytes
                self.traffic.id_bytes += rows.nbytes
        return found

    def push(self, gradients: Mapping[str, tuple[Ids, Array]], learning_rate: float | None = None) -> None:
        """Push the gradients of rows, each row once; this also ends the worker's step. A server is told of the step
        also where none of its rows was touched. With `learning_rate` None, the rate of the table's optimizer is
        used."""
        split = {name: self._split(name, ids) for name, (ids, _) in gradients.items()}
        self._check_clock()
        frames = {}
        for server in self._links:
            here = [name for name in gradients if len(split[name][server][0])]
            arrays: dict[str, Array] = {}
            for number, name in enumerate(here):
                positions, rows = split[name][server]
                values = gradients[name][1][positions]
                arrays |= {f"rows{number}": rows, f"gradients{number}": values}
                self.traffic.pushed_rows += len(rows)
                self.traffic.pushed_bytes += values.nbytes
                self.traffic.id_bytes += rows.nbytes
            fields = {"worker": self.worker, "step": self.step, "tables": here, "learning_rate": learning_rate}
            frames[server] = Frame(kind="push", fields=fields, arrays=arrays)
        ask_all(self._links, frames)
        self.step += 1

    def whole(self, name: str) -> Array:
        """All rows of a table, (rows, width), with the updates that a pull would see."""
        table = self._table(name)
        return np.concatenate([self.read(name, WEIGHT, ids) for ids in pieces(0, table.rows, table.width)])

    def read(self, name: str, part: str, ids: Ids) -> Array:
        """Rows of a table (`part` "weight") or of an optimizer state, (ids, width), each id once, after the same steps
        as in a pull."""
        self._check_clock()
        table, split = self._table(name), self._split(name, ids)
        found = np.empty((len(ids), table.width), table.dtype)
        fields = {"step": self.step, "tables": [name], "part": part}
        frames = {
            server: Frame(kind="read", fields=fields, arrays={"rows0": rows})
            for server, (_, rows) in enumerate(split)
            if len(rows)
        }
        for server, answer in ask_all(self._links, frames).items():
            found[split[server][0]] = answer.arrays["values0"]
        return found

    def write(self, name: str, part: str, ids: Ids, values: Array) -> None:
        """Set the contents of rows of a table, or of an optimizer state, before the table is ready."""
        fields = {"table": self._table(name).name, "part": part}
        given = values.astype(self.tables[name].dtype, copy=False)
        frames = {
            server: Frame(kind="load", fields=fields, arrays={"rows": rows, "values": given[positions]})
            for server, (positions, rows) in enumerate(self._split(name, ids))
            if len(rows)
        }
        ask_all(self._links, frames)

    def snapshot(self) -> None:
        """Make every server write a snapshot now."""
        self._everywhere(Frame(kind="snapshot"))

    def _load(self, table: Table, whole: Array) -> None:
        if whole.shape != (table.rows, table.width):
            raise RequestError(
                f"first values of table '{table.name}' have shape {whole.shape}; it has {table.rows} rows of"
                f" {table.width}"
            )
        for ids in pieces(0, table.rows, table.width):
            self.write(table.name, WEIGHT, ids, whole[ids])

    def _split(self, name: str, ids: Ids) -> list[tuple[Ids, Ids]]:
        check_ids(self._table(name), ids)
        return self._parts[name].split(ids.astype(np.int64, copy=False))

    def _table(self, name: str) -> Table:
        if name not in self.tables:
            raise RequestError(unknown_name("table", name, self.tables))
        return self.tables[name]

    def _status(self) -> dict[int, Frame]:
        return self._everywhere(Frame(kind="status"))

    def _clock(self) -> tuple[int, str | None]:
        """The number of steps that this worker has pushed, and an error message if it ended after pushing to only some
        servers: then only a restart is possible."""
        clocks = {server: frame.fields["clocks"][self.worker] for server, frame in self._status().items()}
        if len(set(clocks.values())) == 1:
            return int(clocks[0]), None
        steps = ", ".join(map(str, clocks.values()))
        return int(clocks[0]), (
            f"worker {self.worker} ended during a push: servers have {steps} of its steps; resume from a checkpoint, or"
            " start in a new folder, or with an older copy of this one"
        )

    def _check_clock(self) -> None:
        if self._torn is not None:
            raise RequestError(self._torn)

    def _everywhere(self, frame: Frame) -> dict[int, Frame]:
        return ask_all(self._links, dict.fromkeys(self._links, frame))
