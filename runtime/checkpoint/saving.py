"""Saves checkpoints while training continues.

    main thread     copies of what this rank writes ──▶ the next step …            an error is raised at the next step
                    (tables off the devices are already written: tables-00003.safetensors)
    thread          rank-00003.safetensors ─▶ on disk ─▶ note rank-00003.json
    thread, rank 0  … all notes ─▶ manifest ─▶ one rename: whole ─▶ all but the last few checkpoints are deleted

Ranks communicate by notes in the folder that is being written, not by collectives. So a rank that dies at any moment
leaves a folder that does not count as a checkpoint, and the only one that waits for it is the thread of rank 0, for
`timeout` seconds. All ranks must see the same folder, which rank 0 has locked. The copies take as much memory as a rank
writes, pinned where there is a device; it is kept for the next save. One checkpoint is written at a time.
"""

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from planner.errors import CheckpointError, RequestError
from runtime.checkpoint.aside import is_aside
from runtime.checkpoint.folder import RunFolder, aside_notes, checkpoints, chosen, name_of
from runtime.checkpoint.manifest import (
    FORMAT_VERSION,
    Manifest,
    Progress,
    SavedFile,
    plan_content,
)
from runtime.checkpoint.opening import OpenedRun, open_run
from runtime.checkpoint.restoring import Restored, load
from runtime.checkpoint.spread import Spread, writers
from runtime.checkpoint.state import live_tensors, progress_of, spreads
from runtime.checkpoint.state_names import saved_ties
from runtime.checkpoint.tables import tables_file_of
from runtime.checkpoint.tensor_files import Entry, dtype_name
from runtime.checkpoint.together import said_by_first, together
from runtime.checkpoint.writing import Job, file_of
from runtime.processes.rank import At
from runtime.run_folder.identity import Origin, RunRecord
from runtime.step.step import RankStep
from runtime.step.training_step import TrainingStep

_LOOK = 0.1  # seconds between two looks at the progress of writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which rank writes which cells: the same on every rank."""

    spreads: Sequence[Spread]
    writers: Mapping[str, tuple[int, ...]]

    def manifest(self, rank: RankStep, progress: Progress, origin: Origin, files: Sequence[SavedFile]) -> Manifest:
        """The manifest of the whole checkpoint, from the files that the ranks have written."""
        plan = rank.bound.plan
        number = {file.name: at for at, file in enumerate(files)}
        cells = {
            spread.name: [number[_file(spread, one)] for one in self.writers[spread.name]] for spread in self.spreads
        }
        return Manifest(
            format_version=FORMAT_VERSION,
            kind="sliced",
            progress=progress,
            optimizer=plan.training.optimizer,
            files=tuple(files),
            tensors={spread.name: spread.saved(plan.mesh, cells[spread.name]) for spread in self.spreads},
            tied=saved_ties(rank.kept_buffers.tied),
            plan=plan_content(plan),
            origin=origin,
        )


def layout_of(rank: RankStep) -> Layout:
    """Which rank writes which cells of the plan's current state."""
    found = sorted(spreads(rank), key=lambda spread: spread.name)
    return Layout(spreads=found, writers=writers(found, rank.place.mesh, rank.place.stages))


def _ended(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


def _file(spread: Spread, rank: int) -> str:
    return file_of(rank) if spread.shares is None else tables_file_of(rank)


class Checkpoints:
    """The checkpoints of a run in one folder; the last `keep` are kept. Building it is collective: the first rank locks
    the folder until `close` or the end of its process, and clears what an ended run left there. A second object in the
    same process takes the lock from the first. `lock` is the token of the lock, where the process that started the
    ranks holds it; `notes` are messages for the user who watches the run. With `read_only` nothing is written or
    locked: the run that owns the folder may continue meanwhile. `at` is told of the progress of writing, while this
    thread waits for it, and of loading.

    Raises CheckpointError, on every rank, where the folder cannot be written, another run writes there, or it is a copy
    of the folder of a run; RequestError for `keep` below 1.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        asynchronous: bool = True,
        timeout: float = 600.0,
        lock: str | None = None,
        read_only: bool = False,
        at: At = lambda what: None,
    ) -> None:
        if keep < 1:
            raise RequestError(f"keep={keep}: keep 1 checkpoint or more")
        self.folder = Path(folder)
        self._keep, self._asynchronous, self._timeout = keep, asynchronous, timeout
        self._at, self._blocks = at, 0
        self._opened: OpenedRun | None = None  # on the first rank
        self._own: RunFolder | None = None
        self.notes: tuple[str, ...] = ()
        self._start: Path | None = None  # the checkpoint that was loaded by its path, until the next save
        if not read_only:
            record, self.notes = said_by_first(lambda: self._open(lock), tuple[RunRecord, tuple[str, ...]])
            self._own = RunFolder(path=self.folder, record=record)
        self._token = said_by_first(lambda: secrets.token_hex(4), str)
        self._copies: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._written = threading.Event()  # set when the checkpoint's files are written
        self._written.set()
        self._error: CheckpointError | None = None

    def _open(self, lock: str | None) -> tuple[RunRecord, tuple[str, ...]]:
        """Open the folder; returns what the other ranks need to know about it."""
        self._opened = open_run(self.folder, lock)
        return self._opened.folder.record, self._opened.notes

    @property
    def origin(self) -> Origin:
        """The run and folder that checkpoints saved here name as their origin."""
        return self._writable().record.origin

    def close(self) -> None:
        """Release the folder, so that another run can write there. While a checkpoint is still being written, the lock
        stays until this process ends."""
        if self._opened is not None and self._written.is_set():
            self._join()  # at most it still deletes old checkpoints
            self._opened.close()

    def _writable(self) -> RunFolder:
        if self._own is None:
            raise RequestError(f"{self.folder}: was opened with read_only=True; open it without that to save")
        return self._own

    def newest(self, *, may_start: bool = False) -> Path | None:
        """The last whole checkpoint of this run, the same on every rank; None where there is none. Adds to `notes`.
        Collective. Raises CheckpointError, on every rank, where all checkpoints there belong to another run or folder,
        or were left aside; in the latter case not if the run `may_start` from somewhere else.
        """

        def first() -> tuple[str, tuple[str, ...]]:
            found = chosen(self.folder)
            if found.path is None and found.aside and not may_start:
                raise CheckpointError(f"{self.folder}: has no other checkpoint: {'; '.join(found.notes)}")
            return str(found.path or ""), found.notes

        path, notes = said_by_first(first, tuple[str, tuple[str, ...]])
        self.notes = (*self.notes, *notes)
        return Path(path) if path else None

    def go_back(self, start: Path) -> None:
        """Make a checkpoint the newest one, because training goes on from it: checkpoints of later steps in this folder
        are left aside, neither deleted nor continued from. Adds to `notes`. Collective. Raises CheckpointError."""
        own = self._writable()

        def first() -> tuple[str, ...]:
            own.go_back(start)
            return tuple(aside_notes([path for path in checkpoints(self.folder) if is_aside(path)]))

        self.notes = (*self.notes, *said_by_first(first, tuple[str, ...]))

    def save(self, step: TrainingStep, data: Mapping[str, Any] | None = None) -> Path:
        """Save the state of a training step, under the number of the last completed step, with the user's data position
        (any JSON value). Every rank calls it after the same step. Returns the folder of the future checkpoint as soon
        as the copies are made; waits for the previous save first. Where writing fails on a rank, its next step raises.

        Raises CheckpointError where the previous save has failed on this rank, RunError after a step that was aborted.
        """
        own = self._writable()
        step.check_whole()
        self._join()
        self.check()
        start, self._start = self._start, None
        step.before_step = self.check
        rank = step.rank
        progress = progress_of(rank, data)
        layout = layout_of(rank)
        entries = self._entries(rank, layout)
        job = Job(
            folder=own,
            check=None if self._opened is None else self._opened.check,
            token=self._token,
            number=rank.place.stage * rank.place.mesh.size + rank.place.rank,
            files=tuple(
                sorted({_file(spread, one) for spread in layout.spreads for one in layout.writers[spread.name]})
            ),
            keep=self._keep,
            timeout=self._timeout,
            on_block=self._count,
        )

        tables = [spread for spread in layout.spreads if spread.shares is not None]
        if tables:
            try:
                job.write_tables(rank, tables, progress.step)
            except CheckpointError as error:
                self._error = error

        def write() -> None:
            gone: list[Path] = []
            try:
                if start is not None and self._opened is not None:
                    own.go_back(start)
                gone = job.write(
                    entries, progress, lambda files: layout.manifest(rank, progress, own.record.origin, files)
                )
            except CheckpointError as error:
                self._error = self._error or error
            finally:
                self._written.set()
            own.delete(gone)

        self._written.clear()
        self._thread = threading.Thread(target=write, name=f"checkpoint of step {progress.step}")
        self._thread.start()
        if not self._asynchronous:
            self.wait()
        return self.folder / name_of(progress.step)

    def restore(
        self,
        step: TrainingStep,
        path: str | Path | None = None,
        *,
        model: str | None = None,
        weights_only: bool = False,
        cast: bool = False,
        verify: bool = True,
    ) -> Restored | None:
        """Load the newest checkpoint of the folder, or the one at a path, whatever plan it was written under; None
        where the folder has none. With `weights_only` the model alone is loaded, from step 0; with `cast` its floating
        point numbers may be saved in any dtype. `model` is the config.json of the model, where the plan was made from
        one and the files have the names of transformers: the path in the plan is not opened. Collective; the model must
        have been traced (`TrainingStep.prepare`). After a checkpoint was loaded by its path, the next save leaves later
        ones of this folder aside.

        Raises CheckpointError, on every rank and before anything is changed, where the checkpoint is damaged or for
        another model.
        """
        found = self.newest() if path is None else Path(path)
        if found is None:
            return None
        restored = load(step, found, model=model, weights_only=weights_only, cast=cast, verify=verify, at=self._at)
        self._start = None if path is None or weights_only else restored.path
        return restored

    def check(self) -> None:
        """Raise CheckpointError where saving has failed on this rank."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until the last save is whole; older checkpoints may still be being deleted. Collective. Raises
        CheckpointError, on every rank, where the save failed."""
        self._await(self._written.wait)
        together(self.check)

    def _join(self) -> None:
        if self._thread is not None:
            self._await(partial(_ended, self._thread))
            self._thread = None

    def _await(self, done: Callable[[float], bool]) -> None:
        """Return when `done`, which waits for some seconds, is true; every block that is written meanwhile is
        progress."""
        seen = self._blocks
        while not done(_LOOK):
            if self._blocks != seen:
                seen = self._blocks
                self._at(f"writing a checkpoint, block {seen}")

    def _count(self) -> None:
        self._blocks += 1
        if threading.current_thread() is threading.main_thread():  # tables, which are written while training waits
            self._at(f"writing tables, block {self._blocks}")

    def _entries(self, rank: RankStep, layout: Layout) -> list[Entry]:
        """The tensors that this rank writes: copies that training does not change, or its own memory where it waits."""
        place, live = rank.place, live_tensors(rank)
        number = place.stage * place.mesh.size + place.rank
        found = []
        for spread in layout.spreads:
            if spread.shares is not None:
                continue
            cell = spread.cell_of(place.mesh, number)
            if cell is None:
                continue
            tensor, region = live[spread.name], spread.region(place.mesh, place.rank)
            assert (tuple(tensor.shape), dtype_name(tensor.dtype)) == (region.extent, spread.dtype), spread.name
            if layout.writers[spread.name][cell] == number:
                found.append((spread, self._copied(spread.name, tensor)))
        if place.device.type != "cpu":
            torch.accelerator.synchronize(place.device)
        written = {spread.name for spread, _ in found}
        self._copies = {name: copy for name, copy in self._copies.items() if name in written}
        return [
            Entry(name=s.name, dtype=s.dtype, shape=tuple(copy.shape), blocks=lambda copy=copy: (copy,))  # type: ignore[misc]
            for s, copy in found
        ]

    @torch.no_grad()
    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and not self._asynchronous:
            return tensor.contiguous()
        known = self._copies.get(name)
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            pinned = tensor.device.type != "cpu"
            known = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._copies[name] = known
        return known.copy_(tensor, non_blocking=True)
