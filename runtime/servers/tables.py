"""Tables of rows, and their partition over servers.

    row ──(hashed: a permutation of all rows)──> place ──(bounds)──> server and number of the row there

    ranges      rows 0 1 2 3 4 │ 5 6 7          neighbours are together, so busy rows may be too
    hashed      rows 0 3 6 1 4 │ 7 2 5          place = (a row + b) mod rows, a coprime to rows: no directory is needed

Servers may have unequal shares: `shares` (1, 2) gives the second server two thirds of the rows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import RequestError, unknown_name
from runtime.servers.sparse_optimizers import SPARSE_OPTIMIZERS, SparseOptimizer

Ids = NDArray[np.int64]

LARGEST_TABLE = 2**31
LARGEST_WIDTH = 2**27
"""Maximum numbers in a row: one row of float64 is 1 GiB, and must fit into one message."""

LARGEST_SHARE = 1e15
PARTITIONS = ("hashed", "ranges")
DTYPES = ("float32", "float64")
_PIECE = 2**22  # numbers per message, when a whole table is sent
_DRAWN = 2**18  # random numbers that are drawn at a time
_DRAWING = 64  # temporary bytes for each of them
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # its multiples are evenly distributed (Knuth, volume 3, section 6.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of `rows` rows of `width` numbers, and the optimizer that updates them.

    `partition` is one of PARTITIONS; `shares` are weights of the servers, equal ones if empty. `deviation` and `seed`
    define the normal distribution of the initial values, which depend only on the row; a deviation of 0 gives zeros.
    """

    name: str
    rows: int
    width: int
    optimizer: SparseOptimizer
    dtype: str = "float32"
    partition: str = "hashed"
    shares: tuple[float, ...] = ()
    deviation: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rows < LARGEST_TABLE or not 1 <= self.width <= LARGEST_WIDTH:
            raise RequestError(
                f"table '{self.name}' of {self.rows} rows of {self.width}; a table has 1 to 2^31 - 1 rows of 1 to 2^27"
                " numbers"
            )
        if self.dtype not in DTYPES:
            raise RequestError(f"table '{self.name}': " + unknown_name("dtype of rows", self.dtype, DTYPES))
        if self.partition not in PARTITIONS:
            raise RequestError(f"table '{self.name}': " + unknown_name("partition", self.partition, PARTITIONS))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a message."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def memory_of_row(self) -> int:
        """Bytes of one row in memory, with its optimizer states."""
        return self.row_bytes * (1 + len(SPARSE_OPTIMIZERS[self.optimizer.name])) + 8 * self.optimizer.row_steps

    def content(self) -> dict[str, Any]:
        """The table as fields of a frame."""
        return asdict(self)

    @staticmethod
    def of(content: Mapping[str, Any]) -> "Table":
        """The table that `content` describes."""
        optimizer = SparseOptimizer(**{**content["optimizer"], "betas": tuple(content["optimizer"]["betas"])})
        return Table(**{**content, "optimizer": optimizer, "shares": tuple(content["shares"])})


def check_ids(table: Table, ids: Ids) -> None:
    """Raise RequestError where an id is not one of the table's rows."""
    least, most = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    if least < 0 or most >= table.rows:
        raise RequestError(
            f"table '{table.name}': id {least if least < 0 else most} was looked up; its {table.rows} rows are 0 to"
            f" {table.rows - 1}: look at the data"
        )


def pieces(start: int, stop: int, width: int) -> Iterator[Ids]:
    """Rows start ... stop - 1 of a table of this width, in pieces of 2^22 numbers, at least one row each."""
    step = max(1, _PIECE // width)
    for first in range(start, stop, step):
        yield np.arange(first, min(stop, first + step), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Which of `servers` servers has which rows of a table. Server s has the places bounds[s] ... bounds[s + 1] - 1."""

    rows: int
    bounds: tuple[int, ...]
    factor: int = 1
    shift: int = 0

    @property
    def servers(self) -> int:
        return len(self.bounds) - 1

    def held(self, server: int) -> int:
        """The number of rows of a server."""
        return self.bounds[server + 1] - self.bounds[server]

    def split(self, ids: Ids) -> list[tuple[Ids, Ids]]:
        """For every server the `ids` that it has (as positions, in the order of their places), and the numbers of these
        rows on the server, in ascending order."""
        places = (ids * self.factor + self.shift) % self.rows if self.factor != 1 else ids
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        cuts = np.searchsorted(ordered, self.bounds)
        return [
            (order[a:b], ordered[a:b] - self.bounds[server]) for server, (a, b) in enumerate(pairwise(cuts.tolist()))
        ]

    def ids_of(self, server: int, start: int, stop: int) -> Ids:
        """The rows of the table that are rows start ... stop - 1 of a server."""
        places = np.arange(self.bounds[server] + start, self.bounds[server] + stop, dtype=np.int64)
        if self.factor == 1:
            return places
        inverse = pow(self.factor, -1, self.rows)
        return ((places - self.shift) % self.rows) * inverse % self.rows


def partition_of(table: Table, servers: int) -> Partition:
    """The partition of a table over `servers` servers; some have no row where there are fewer rows than servers. Raises
    RequestError where the number of shares is not the number of servers."""
    bounds = _bounds(table, table.shares or (1.0,) * servers, servers)
    if table.partition == "ranges" or table.rows < 3:
        return Partition(rows=table.rows, bounds=bounds)
    factor = max(2, round(table.rows * _GOLDEN))
    while math.gcd(factor, table.rows) != 1:
        factor += 1
    return Partition(rows=table.rows, bounds=bounds, factor=factor % table.rows or 1, shift=table.rows // 3)


def _bounds(table: Table, shares: Sequence[float], servers: int) -> tuple[int, ...]:
    if len(shares) != servers or not all(0 < share <= LARGEST_SHARE for share in shares):
        raise RequestError(
            f"table '{table.name}' has shares {', '.join(f'{share:g}' for share in shares)} for {servers} servers;"
            f" give each server one number above 0, at most {LARGEST_SHARE:g}"
        )
    if servers > table.rows:
        return tuple(min(server, table.rows) for server in range(servers + 1))
    total, reached, bounds = sum(shares), 0.0, [0]
    for server, share in enumerate(shares, 1):
        reached += share
        least, most = bounds[-1] + 1, table.rows - (servers - server)  # at least one row for each
        bounds.append(table.rows if server == servers else min(max(round(table.rows * reached / total), least), most))
    return tuple(bounds)


def rows_at_a_time(table: Table) -> int:
    """The number of rows that get their initial values at a time."""
    return max(1, _DRAWN // table.width)


def memory_of_drawing(table: Table) -> int:
    """Temporary bytes for drawing the initial values of a table."""
    return 0 if table.deviation == 0.0 else _DRAWING * max(_DRAWN, table.width)


def first_values(table: Table, ids: Ids) -> NDArray[Any]:
    """The initial rows of a table, (ids, width): standard normal numbers times `deviation`, each a function of only
    seed, row and column, so that they do not depend on the partition (Box and Muller 1958, of hashed counters)."""
    if table.deviation == 0.0:
        return np.zeros((len(ids), table.width), table.dtype)
    columns = np.arange(table.width, dtype=np.uint64)
    counters = (ids[:, None] * table.width).astype(np.uint64) + columns
    seed = np.uint64((table.seed * 0x9E3779B97F4A7C15) % 2**64)
    first, second = (_uniform(np.asarray(counters * np.uint64(2) + np.uint64(part) + seed)) for part in (0, 1))
    normal = np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)
    return (normal * table.deviation).astype(table.dtype)


def _uniform(counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in (0, 1] from counters, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    mixed = counters * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (np.asarray(mixed >> np.uint64(11), dtype=np.float64) + 1.0) / 2.0**53
