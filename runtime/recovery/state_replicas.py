"""State replicas: copies of a run's state in the memory of its hosts, so that a killed process costs at most one step.

    /dev/shm/plan-run-3f2a…/                    see `runtime.recovery.replica_folder`
        step-000012.rank-00003.safetensors      the cells that rank 3 keeps after step 12 …
        step-000012.rank-00003.json             … and which cells those are; written last

Files in memory outlive the processes that wrote them, but not their host. So every cell is on two hosts
(`runtime.recovery.replica_placement`): data-parallel ranks hold it on several anyway, and cells on only one host are
sent to the next. After a failure, the newest step of which every cell is left somewhere is loaded; cells that a host
lacks are sent by others. The idea is that of Gemini (Wang et al., SOSP 2023): checkpoints in the memory of peers.

The last two steps are kept, because a process may be killed while it writes. So the hosts together use 4 times the
state of the run, or 2 times with one host.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open

from hardware_profiles.foreign import ForeignTextError, read_bytes
from planner.errors import CheckpointError
from runtime.checkpoint.fused import as_in_graph, as_in_module
from runtime.checkpoint.manifest import FORMAT_VERSION, Manifest, Progress, SavedFile, SavedTensor
from runtime.checkpoint.regions import Region, cells_meeting
from runtime.checkpoint.renamed import boxes_in
from runtime.checkpoint.restoring import Restored, restore
from runtime.checkpoint.source import Readable, Source
from runtime.checkpoint.spread import Spread
from runtime.checkpoint.state import live_tensors, progress_of, spreads
from runtime.checkpoint.tensor_files import Entry, check_file, dtype_name, dtype_of, write_tensors
from runtime.checkpoint.together import together
from runtime.comm.exchange import gather, rank_number
from runtime.recovery.replica_folder import delete_replicas, open_replicas, sweep
from runtime.recovery.replica_placement import Cell, replica_holders
from runtime.recovery.transfers import Transfer, transfer
from runtime.run_folder.identity import Origin
from runtime.run_folder.private import opener
from runtime.step.step import RankStep
from runtime.step.training_step import TrainingStep

_T = TypeVar("_T")
_LARGEST = 2**28  # maximum bytes of a note
_NAME = re.compile(r"step-(\d+)\.rank-(\d+)\.(?:safetensors|json|fresh)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one rank keeps after one step: the note beside its file. `cells` has for each tensor the numbers of its
    cells in the file, as `name#number`; `every` is the number of cells of the whole state."""

    origin: Origin
    progress: Progress
    optimizer: str
    every: int
    file: SavedFile
    tensors: dict[str, SavedTensor]
    cells: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left of the newest whole step, the same on every rank: for each cell the files that have it, and a rank
    that can read each of them."""

    progress: Progress
    optimizer: str
    tensors: Mapping[str, SavedTensor]
    places: Mapping[Cell, tuple[tuple[int, str], ...]]


class StateReplicas:
    """The state replicas of a run. Building it is collective. `notes` are messages about other replicas found in
    memory."""

    def __init__(self, origin: Origin) -> None:
        self.folder, self._alive = open_replicas(origin, os.getppid())
        self._origin = origin
        tokens = _gathered(_token(self.folder), str)
        numbers = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
        self.hosts = tuple(numbers[token] for token in tokens)  # host of every rank
        self.notes = tuple(sweep(origin)) if self._first_of_host else ()
        self._kept_by: tuple[dict[str, Spread], dict[Cell, tuple[int, ...]]] | None = None  # of the last state

    @property
    def _first_of_host(self) -> bool:
        return self.hosts.index(self.hosts[rank_number()]) == rank_number()

    def take(self, step: TrainingStep, data: Mapping[str, Any] | None = None) -> None:
        """Keep the training step's state after the last completed step, with the user's data position. Collective.
        Raises CheckpointError, on every rank, where there is too little memory."""
        rank, mesh, own = step.rank, step.rank.place.mesh, rank_number()
        found = {spread.name: spread for spread in spreads(rank, rank.optimizer.updates)}
        if self._kept_by is None or self._kept_by[0] != found:  # computed again only when it has changed
            self._kept_by = (found, replica_holders(list(found.values()), mesh, rank.place.stages, self.hosts))
        kept_by = self._kept_by[1]
        live = live_tensors(rank)
        sent = [
            Transfer(
                cell=cell,
                source=ranks[0],
                target=ranks[1],
                shape=_extent(found[cell[0]], mesh, cell[1]),
                dtype=dtype_of(found[cell[0]].dtype),
            )
            for cell, ranks in kept_by.items()
            if len(ranks) > 1 and found[cell[0]].cell_of(mesh, ranks[1]) != cell[1]
        ]
        kept = {
            cell: live[cell[0]]
            for cell, ranks in kept_by.items()
            if own in ranks and found[cell[0]].cell_of(mesh, own) == cell[1]
        }
        kept |= transfer(sent, own, lambda cell: live[cell[0]], rank.place.device)
        cells: dict[str, list[int]] = {}
        for name, number in kept:
            cells.setdefault(name, []).append(number)
        note = Kept(
            origin=self._origin,
            progress=progress_of(rank, data),
            optimizer=rank.bound.plan.training.optimizer,
            every=len(kept_by),
            file=SavedFile(name="", bytes=0, checksum=""),
            tensors={name: found[name].saved(mesh, ()) for name in cells},
            cells={name: tuple(numbers) for name, numbers in cells.items()},
        )
        together(lambda: self._write(own, note, kept))

    def left(self) -> Left | None:
        """What is left on all hosts; None where no step is whole. Collective."""
        steps: dict[int, list[tuple[int, Kept]]] = {}
        for reader, notes in enumerate(_gathered(self._notes(), list[Kept])):
            for note in notes:
                steps.setdefault(note.progress.step, []).append((reader, note))
        for step in sorted(steps, reverse=True):
            places: dict[Cell, list[tuple[int, str]]] = {}
            for reader, note in steps[step]:
                for name, numbers in note.cells.items():
                    for number in numbers:
                        places.setdefault((name, number), []).append((reader, note.file.name))
            first = steps[step][0][1]
            if len(places) == first.every:
                return Left(
                    progress=first.progress,
                    optimizer=first.optimizer,
                    tensors={name: tensor for _, note in steps[step] for name, tensor in note.tensors.items()},
                    places={cell: tuple(where) for cell, where in places.items()},
                )
        return None

    def restore(self, step: TrainingStep, left: Left) -> Restored:
        """Load what is left, whatever plan it was saved under. Collective. Raises CheckpointError, on every rank, where
        it is for another model."""
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            kind="sliced",
            progress=left.progress,
            optimizer=left.optimizer,
            files=(),
            tensors={},
        )
        source = _Fetched(
            path=self.folder,
            tensors={name: replace(tensor, files=_numbers(tensor)) for name, tensor in left.tensors.items()},
            files=(),
            manifest=manifest,
        )
        whole = as_in_module(source)
        source.cells = self._fetch(step.rank, left, as_in_graph(whole, step.rank.bound.graph.cuts))
        return restore(step.rank, whole, verify=False)

    def forget(self, but: int | None = None) -> None:
        """Delete the replicas on this host, except those of step `but`."""
        for path in self.folder.glob("step-*"):
            if (step := _step_of(path)) is not None and step != but:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all replicas on this host: the run is over. Nothing may be called after that."""
        if self._first_of_host:
            delete_replicas(self._origin)
        os.close(self._alive)

    def _notes(self) -> list[Kept]:
        """The notes of this host with whole files; from one of its ranks, because all see the same."""
        return list(_whole_notes(self.folder, self._origin)) if self._first_of_host else []

    def _fetch(self, rank: RankStep, left: Left, source: Readable) -> dict[Cell, torch.Tensor]:
        """The cells that this rank reads: from its own host, else sent by a rank of another host. `source` has what is
        left under the names of the rank."""
        mesh, own = rank.place.mesh, rank_number()
        mine: dict[Cell, str] = {}
        transfers = dict[tuple[Cell, int], Transfer]()
        for spread in spreads(rank, left.progress.updates):
            if spread.name not in source.tensors:
                continue  # reported when it is restored
            for target in range(len(self.hosts)):
                if spread.cell_of(mesh, target) is None:
                    continue
                for cell, shape in _cells(source, left, spread.name, spread.region(mesh, target % mesh.size)):
                    near = [name for at, name in left.places[cell] if self.hosts[at] == self.hosts[target]]
                    if near and target == own:
                        mine[cell] = near[0]
                    elif not near:
                        sender = left.places[cell][target % len(left.places[cell])][0]
                        dtype = dtype_of(left.tensors[cell[0]].dtype)
                        transfers[cell, target] = Transfer(
                            cell=cell, source=sender, target=target, shape=shape, dtype=dtype
                        )
        here = {cell: name for cell, where in left.places.items() for at, name in where if at == own}
        files = _Files(self.folder)
        fetched = transfer([*transfers.values()], own, lambda cell: files.read(here[cell], cell), rank.place.device)
        return {**{cell: files.read(name, cell) for cell, name in mine.items()}, **fetched}

    def _write(self, own: int, note: Kept, kept: Mapping[Cell, torch.Tensor]) -> None:
        name = f"step-{note.progress.step:06d}.rank-{own:05d}"
        path = self.folder / f"{name}.safetensors"
        try:
            for old in self.folder.glob("step-*"):  # no rank is two steps behind: all ranks meet in every step
                if (step := _step_of(old)) is not None and step < note.progress.step - 1:
                    old.unlink(missing_ok=True)
            for stale in (self.folder / f"{name}.json", path):
                stale.unlink(missing_ok=True)
            written = write_tensors(path, [_entry(cell, tensor) for cell, tensor in kept.items()], {"format": "pt"})
            fresh = self.folder / f"{name}.fresh"
            fresh.unlink(missing_ok=True)
            with open(fresh, "x", encoding="utf-8", opener=opener) as file:
                json.dump(asdict(replace(note, file=written)), file)
            fresh.replace(self.folder / f"{name}.json")
        except OSError as error:
            raise CheckpointError(f"{path}: state replicas cannot be kept in memory: {error.strerror}") from error


@dataclass(kw_only=True)
class _Fetched(Source):
    """A source whose cells are already in memory; each has its own number (`_numbers`)."""

    cells: Mapping[Cell, torch.Tensor] = field(default_factory=dict)

    def _cell(self, file: int, name: str, tensor: SavedTensor, extent: tuple[int, ...]) -> Any:
        return self.cells[name, file]


def _cells(source: Readable, left: Left, name: str, wanted: Region) -> Iterator[tuple[Cell, tuple[int, ...]]]:
    """The cells of what is left that hold a box of a tensor of `source`, and their shapes."""
    for saved, region in boxes_in(source, name, wanted):
        tensor = left.tensors[saved]
        for number, cell in cells_meeting(tensor.shape, tensor.cuts, region, tensor.lengths):
            yield (saved, number), cell.extent


class _Files:
    """Files of cells in a folder, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, Any] = {}

    def read(self, name: str, cell: Cell) -> torch.Tensor:
        if name not in self._opened:
            self._opened[name] = safe_open(self._folder / name, "pt")
        found: torch.Tensor = self._opened[name].get_tensor(_key(cell))
        return found


def _whole_notes(folder: Path, origin: Origin) -> Iterator[Kept]:
    for path in sorted(folder.glob("step-*.json")):
        try:
            note = TypeAdapter(Kept).validate_json(read_bytes(path, _LARGEST, follow=False))
            if note.origin != origin or note.file.name != path.with_suffix(".safetensors").name:
                continue  # of another run
            check_file(folder, note.file)
        except (ForeignTextError, ValidationError, CheckpointError):
            continue  # its process was killed while it wrote: the cells are elsewhere, or the step is not whole
        yield note


def _entry(cell: Cell, tensor: torch.Tensor) -> Entry:
    here = tensor.detach()
    return Entry(name=_key(cell), dtype=dtype_name(here.dtype), shape=tuple(here.shape), blocks=lambda: (here.cpu(),))


def _key(cell: Cell) -> str:
    return f"{cell[0]}#{cell[1]}"


def _numbers(tensor: SavedTensor) -> tuple[int, ...]:
    return tuple(range(torch.Size(tensor.cuts).numel()))


def _extent(spread: Spread, mesh: Any, number: int) -> tuple[int, ...]:
    """The extent of a cell; for a padded weight it has no padding, and may be shorter."""
    return spread.of_cell(mesh, number).extent


def _step_of(path: Path) -> int | None:
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def _token(folder: Path) -> str:
    """A token that all processes of this host read in the folder, and no other host has: the first one creates it."""
    path, fresh = folder / "host", folder / f".host.{os.getpid()}"
    try:
        fresh.unlink(missing_ok=True)
        with open(fresh, "x", encoding="utf-8", opener=opener) as file:
            file.write(secrets.token_hex(16))
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}; name another place") from error


def _gathered(own: _T, kind: Any) -> Sequence[_T]:
    """The values of all ranks, which are of this type. Collective."""
    return gather(own, kind) if dist.is_initialized() else [own]
