"""Writes tables off the devices to files and reads them back, in bounded memory.

    where rows are                          rows in their order                      files
    host of rank 0, 1, ... ──┐                                                  ┌──▶ tables-00000.safetensors
    server 0, 1, ...       ──┴──pieces──▶ rows 0 ... 9 │ 10 ... 19 │ 20 ... 24 ─┴──▶ tables-00001.safetensors ...

In a checkpoint a table is a tensor like any other, with its rows in their order. It does not depend on the number of
ranks or servers, or on how they divide the rows, and a plan with the table on its devices reads the same files. Each
rank reads its share of the rows from wherever they are, one piece at a time, and writes it. Rows of hosts are exchanged
in collectives, in which all ranks take part, also ranks that have no share or can no longer write.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.errors import CheckpointError
from runtime.checkpoint.manifest import SavedFile
from runtime.checkpoint.regions import Region, cell_region
from runtime.checkpoint.spread import TABLE_PARTS, Spread
from runtime.checkpoint.state_names import MASTER, read_name
from runtime.checkpoint.tensor_files import Entry, dtype_of, write_tensors
from runtime.servers.shard import WEIGHT
from runtime.servers.tables import Ids, pieces
from runtime.step.step import RankStep
from runtime.tables.placed import PlacedTables


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Some rows of a tensor of a table; empty on a rank that has no share or has finished a smaller one."""

    spread: Spread
    ids: Ids

    @property
    def table(self) -> str:
        return read_name(self.spread.name).tensor

    @property
    def part(self) -> str:
        """The part of the table that the tensor is: its weight, or an optimizer state."""
        kind = read_name(self.spread.name).kind
        return WEIGHT if kind in (None, MASTER) else TABLE_PARTS[kind]

    @property
    def region(self) -> Region:
        return Region(offset=(int(self.ids[0]), 0), extent=(len(self.ids), self.spread.shape[1]))


def _own_pieces(rank: RankStep, spreads: Sequence[Spread]) -> Iterator[_Piece]:
    """The pieces of this rank's shares: equally many on every rank of a stage, none in stages without tables."""
    mesh, place = rank.place.mesh, rank.place.rank
    spreads = [spread for spread in spreads if rank.place.stage in spread.stages]
    for spread in sorted(spreads, key=lambda spread: (-dtype_of(spread.dtype).itemsize, spread.name)):
        largest = cell_region(spread.shape, spread.cuts(mesh), 0).extent[0]
        own = spread.region(mesh, place) if spread.held_at(rank.place.stage, place) else None
        for first in pieces(0, largest, spread.shape[1]):
            ids = first[:0] if own is None else first[first < own.extent[0]] + own.offset[0]
            yield _Piece(spread=spread, ids=ids)


def tables_file_of(rank: int) -> str:
    """The file into which a rank writes its shares of tables."""
    return f"tables-{rank:05d}.safetensors"


def write_tables(
    rank: RankStep,
    spreads: Sequence[Spread],
    path: Path,
    make: Callable[[], None],
    on_block: Callable[[], None] = lambda: None,
) -> SavedFile | None:
    """Write this rank's shares of tables into a new file; `make` creates its folder. `on_block` is called after every
    block. None where the rank has no share.
    Collective, and complete on return. A rank that cannot write raises CheckpointError, after it has taken part in all
    reads."""
    place = rank.place
    reading = _Reading(rank.tables, _own_pieces(rank, spreads))
    entries = []
    for spread in spreads:
        if spread.held_at(place.stage, place.rank):
            shape = spread.region(place.mesh, place.rank).extent
            blocks = reading.of(spread, shape[0])
            entries.append(Entry(name=spread.name, dtype=spread.dtype, shape=shape, blocks=blocks))
    try:
        if not entries:
            return None
        make()
        return write_tensors(path, entries, {"format": "pt"}, on_block)
    finally:
        reading.drain()


class _Reading:
    """Reads pieces one after the other, in the order that all ranks share."""

    def __init__(self, tables: PlacedTables, wanted: Iterator[_Piece]) -> None:
        self._read = ((piece, tables.read(piece.table, piece.part, piece.ids)) for piece in wanted)

    def of(self, spread: Spread, rows: int) -> Callable[[], Iterator[torch.Tensor]]:
        """The pieces of a tensor of which this rank has `rows` rows; pieces before them are empty on this rank."""

        def blocks() -> Iterator[torch.Tensor]:
            left = rows
            while left:
                piece, values = next(self._read)
                if len(piece.ids):
                    assert piece.spread == spread, f"{piece.spread.name} comes before {spread.name}"
                    yield values.to(dtype_of(spread.dtype))
                    left -= len(piece.ids)

        return blocks

    def drain(self) -> None:
        for _ in self._read:
            pass


Read = Callable[[str, Region], torch.Tensor]
"""Reads a box of a tensor of a checkpoint by its name."""


def fill_tables(rank: RankStep, wanted: Sequence[Spread], steps: int, names: Mapping[str, str], read: Read) -> None:
    """Fill tables with the wanted tensors, which `read` finds under `names`; the tables then stand at step `steps`.
    Other states start anew. Collective. A rank that cannot read raises CheckpointError, after it has taken part in all
    writes."""
    tables, fault = rank.tables, None
    masters = {read_name(spread.name).tensor for spread in wanted if _is_master(spread)}
    wanted = [spread for spread in wanted if _is_master(spread) or read_name(spread.name).tensor not in masters]
    tables.restart(steps)
    for piece in _own_pieces(rank, wanted):
        values = torch.zeros(len(piece.ids), piece.spread.shape[1])
        if len(piece.ids) and fault is None:
            try:
                values = read(names[piece.spread.name], piece.region)
            except CheckpointError as error:
                fault = error
        tables.write(piece.table, piece.part, piece.ids, values)
    tables.ready()
    if fault is not None:
        raise fault


def _is_master(spread: Spread) -> bool:
    return read_name(spread.name).kind == MASTER
