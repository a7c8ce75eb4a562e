"""One rank writes its part of one checkpoint, and the first rank finishes it when all have left their notes."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planner.errors import CheckpointError
from runtime.checkpoint.folder import RunFolder, part_of
from runtime.checkpoint.manifest import (
    Manifest,
    Progress,
    SavedFile,
    write_manifest,
)
from runtime.checkpoint.notes import fail, leave, note_of, said
from runtime.checkpoint.spread import Spread
from runtime.checkpoint.tables import tables_file_of, write_tables
from runtime.checkpoint.tensor_files import Entry, write_tensors
from runtime.step.step import RankStep

_LOOK = 0.02  # seconds between two checks for notes
_LEFT_ALONE = 30.0  # seconds that rank 0 waits for notes when its own training has ended


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The writing of one checkpoint by one rank; `files` are those of all ranks. `check`, which only rank 0 has, raises
    CheckpointError where the folder no longer belongs to this run. `on_block` is called after every block that is
    written, and every file of another rank."""

    folder: RunFolder
    check: Callable[[], None] | None
    token: str
    number: int
    files: tuple[str, ...]
    keep: int
    timeout: float
    on_block: Callable[[], None] = lambda: None

    def write(
        self, entries: Sequence[Entry], progress: Progress, manifest: Callable[[Sequence[SavedFile]], Manifest]
    ) -> list[Path]:
        """Write this rank's file and note; on rank 0, also finish the checkpoint and return the folders to delete.
        Raises CheckpointError."""
        part = part_of(self.folder.path, progress.step, self.token)
        try:
            self.folder.make_part(progress.step, self.token)
            if entries:
                metadata = {"format": "pt", "step": str(progress.step)}
                name = file_of(self.number)
                leave(part, name, asdict(write_tensors(part / name, entries, metadata, self.on_block)))
            if self.number == 0:
                files = self._await_notes(part)
                write_manifest(part, manifest(files))
                for file in files:
                    note_of(part, file.name).unlink()
                if self.check is not None:
                    self.check()
                return self.folder.publish(part, progress.step, self.token, self.keep)
            return []
        except OSError as error:
            message = f"{part}: cannot be written: {error.strerror}"
            fail(part, file_of(self.number), message)
            raise CheckpointError(message) from error
        except CheckpointError as error:
            fail(part, file_of(self.number), str(error))
            raise
        except Exception as error:  # in a thread, where nobody would see it, and rank 0 would wait for the note
            message = f"{part}: cannot be written: {type(error).__name__}: {error}"
            fail(part, file_of(self.number), message)
            raise CheckpointError(message) from error

    def write_tables(self, rank: RankStep, tables: Sequence[Spread], step: int) -> None:
        """Write this rank's shares of tables off the devices, and a note. Collective. Raises CheckpointError."""
        part, name = part_of(self.folder.path, step, self.token), tables_file_of(self.number)
        try:
            saved = write_tables(rank, tables, part / name, lambda: self._make(step), self.on_block)
        except CheckpointError as error:
            fail(part, name, str(error))
            raise
        if saved is not None:
            leave(part, name, asdict(saved))

    def _make(self, step: int) -> None:
        try:
            self.folder.make_part(step, self.token)
        except OSError as error:
            raise CheckpointError(f"{self.folder.path}: cannot be written: {error.strerror}") from error

    def _await_notes(self, part: Path) -> list[SavedFile]:
        """The files that the ranks have written, in the order of their names."""
        waiting, found = list(self.files), {}
        deadline, alone = time.monotonic() + self.timeout, False
        while waiting:
            for name in list(waiting):
                note = note_of(part, name)
                if note.exists():
                    found[name] = said(note)
                    waiting.remove(name)
                    self.on_block()
            if not alone and not threading.main_thread().is_alive():
                deadline, alone = min(deadline, time.monotonic() + _LEFT_ALONE), True
            if waiting and time.monotonic() > deadline:
                raise CheckpointError(
                    f"{part}: {waiting[0]} was not written in {self.timeout:g} s; does every rank see this folder?"
                )
            if waiting:
                time.sleep(_LOOK)
        return [found[name] for name in self.files]
