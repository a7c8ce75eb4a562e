"""A folder of checkpoints. At any moment each checkpoint in it is either whole or not there.

    run.json                    which run this is
    lock                        which process writes there now
    step-000100/                whole: it got this name when everything in it was on disk
    .step-000120.3f2a.part/     being written, or left behind by a run that ended while it wrote
    .step-000100.3f2a.old/      replaced by a newer checkpoint of the same step
    .step-000080.3f2a.gone/     being deleted

A checkpoint gets and loses its name by one rename, so a reader sees it whole or not at all. The newest one is the last
step of the line in which the run continues: without checkpoints that it left aside (`runtime.checkpoint.aside`). The
next run in the same folder clears what ended runs left (`RunFolder.prepare`). One run at a time writes there
(`runtime.run_folder.lock`), and it deletes only folders with its own mark (`runtime.run_folder.owned`).
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import CheckpointError
from runtime.checkpoint.aside import NOWHERE, is_aside, leave_aside, left_at, take_back
from runtime.checkpoint.manifest import MANIFEST, read_manifest
from runtime.run_folder import owned
from runtime.run_folder.identity import RunRecord, read_record
from runtime.run_settings import RunSettings

_WHOLE = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"\.(step-\d+)\.[0-9a-f]+\.(part|old|gone)(\.[0-9a-f]{8}\.new)?")


def name_of(step: int) -> str:
    """The folder name of the checkpoint of a step."""
    return f"step-{step:06d}"


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _WHOLE.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """The step of a whole checkpoint."""
    return int(path.name.removeprefix("step-"))


def part_of(folder: Path, step: int, token: str) -> Path:
    """Where a checkpoint is written before it is whole; `token` is the run's."""
    return folder / f".{name_of(step)}.{token}.part"


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest step first, also those that were left aside."""
    return [path for path in _steps(folder) if (path / MANIFEST).is_file()]


def line(folder: Path) -> list[Path]:
    """The whole checkpoints of the line in which the run continues, oldest step first: without those that were left
    aside."""
    return [path for path in checkpoints(folder) if not is_aside(path)]


def newest(folder: Path) -> Path | None:
    """The last whole checkpoint of the line in which the run continues; None where there is none."""
    return next(reversed(line(folder)), None)


def incomplete(folder: Path) -> list[str]:
    """Messages about step folders newer than the newest checkpoint that have no manifest."""
    last = newest(folder)
    more = [path for path in _steps(folder) if last is None or step_of(path) > step_of(last)]
    more = [path for path in more if not (path / MANIFEST).is_file()]
    then = "there is no checkpoint before it" if last is None else f"the newest checkpoint is {last.name}"
    return [f"{path} has no {MANIFEST}, so the checkpoint is incomplete; {then}" for path in more]


def _steps(folder: Path) -> list[Path]:
    try:
        return sorted((path for path in folder.iterdir() if _WHOLE.fullmatch(path.name) and path.is_dir()), key=step_of)
    except OSError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The newest checkpoint that belongs to a run (None where there is none), and messages about the others. `aside`
    are the checkpoints that were left aside."""

    path: Path | None
    notes: tuple[str, ...]
    aside: tuple[Path, ...] = ()


def chosen(folder: Path) -> Chosen:
    """The checkpoint from which a run in a folder continues. Raises CheckpointError where there are checkpoints but
    none belongs to the run."""
    record, notes, foreign = read_record(folder), incomplete(folder), ""
    aside = tuple(path for path in checkpoints(folder) if is_aside(path))
    notes += aside_notes(aside)
    for path in reversed(line(folder)):
        try:
            origin = read_manifest(path).origin
        except CheckpointError:
            return Chosen(path=path, notes=tuple(notes), aside=aside)  # loading it raises, and says what is wrong
        if origin is None if record is None else record.owns(origin):
            return Chosen(path=path, notes=tuple(notes), aside=aside)
        foreign = f"{path} belongs to {origin or 'a run that it does not name'}"
        notes.append(f"{foreign}, not to this folder: it is left alone")
    if foreign:
        here = "a folder without a record of its run" if record is None else f"{record.origin}"
        raise CheckpointError(
            f"--continue: {foreign}, and {folder} is {here}: none of the checkpoints there belongs to it. Start a new"
            f" run from one of them with --resume PATH --save NEW. If the folder was moved or merged on purpose, run"
            f" `plan checkpoint adopt {folder}` first"
        )
    return Chosen(path=None, notes=tuple(notes), aside=aside)


def aside_notes(aside: Sequence[Path]) -> list[str]:
    """A message about the checkpoints that were left aside, if there are any."""
    if not aside:
        return []
    names = ", ".join(path.name for path in aside)
    one = len(aside) == 1
    return [
        f"{names} in {aside[0].parent} {'is' if one else 'are'} left aside, because the run went back to an earlier"
        f" checkpoint; --resume {aside[-1]} goes on from {'it' if one else 'the last one'}"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder of a run, locked by this process or by the one that started it."""

    path: Path
    record: RunRecord

    def prepare(self) -> tuple[str, ...]:
        """Clear what ended runs left in the folder; returns messages about what it leaves alone, and why. Raises
        CheckpointError where it cannot clear."""
        notes = []
        try:
            for path in sorted(self.path.iterdir()):
                left = _LEFT.fullmatch(path.name)
                if left is None:
                    continue
                if left[2] == "old" and not (self.path / left[1]).exists() and (path / MANIFEST).is_file():
                    path.rename(self.path / left[1])  # the run ended between two renames
                elif fault := self._remove(path):
                    notes.append(f"{path} {fault}: it is left alone; delete it if nobody needs it")
            _sync(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}; name another place") from error
        return tuple(notes)

    def make_part(self, step: int, token: str) -> Path:
        """Create the folder into which a checkpoint is written; the first rank that needs it creates it. Raises
        CheckpointError where the name is taken by something else, OSError where the folder cannot be created."""
        part = part_of(self.path, step, token)
        owned.make(part, self._mark)
        return part

    def publish(self, part: Path, step: int, token: str, keep: int) -> list[Path]:
        """Give a completely written folder the name of its checkpoint, replacing an older checkpoint of that step, and
        take the names of all checkpoints of this line up to it except the last `keep`. Checkpoints of later steps were
        saved before, in a line that was abandoned: they are left aside. Returns the folders to delete, because deleting
        takes longer. Raises CheckpointError where the name is taken by a folder that is not of this
        run."""
        folder, gone = self.path / name_of(step), []
        if os.path.lexists(folder):
            if not self._owns(folder):
                raise CheckpointError(
                    f"{folder}: already exists and is not of this run; remove it, or save into another folder"
                )
            old = self.path / f".{folder.name}.{token}.old"
            folder.rename(old)
            take_name(part, folder)
            gone.append(self._without_name(old, folder.name, token))
        else:
            take_name(part, folder)
        own = [path for path in line(self.path) if self._owns(path)]
        for path in own:
            if step_of(path) > step:
                leave_aside(path, step)
        own = [path for path in own if step_of(path) <= step]
        return gone + [self._without_name(path, path.name, token) for path in own[:-keep]]

    def go_back(self, start: Path) -> list[Path]:
        """Make a checkpoint the newest one, since the run goes on from it: leave later checkpoints of this run aside.
        Where it is not of this run in this folder, all of them are left aside. Returns those left aside now. Raises
        CheckpointError where the folder cannot be written."""
        inside = os.path.realpath(start.parent) == os.path.realpath(self.path) and is_checkpoint(start)
        own = [path for path in line(self.path) if self._owns(path)]
        if not inside or not self._owns(start):
            back_to = NOWHERE
        else:
            left = left_at(start)
            back_to = step_of(start) if left is None else left  # those of the other line begin there
            own = [path for path in own if step_of(path) != step_of(start)]
            take_back(self.path / start.name)
        later = [path for path in own if step_of(path) > back_to]
        for path in reversed(later):
            leave_aside(path, back_to)
        return later

    def delete(self, gone: Sequence[Path]) -> None:
        """Delete folders that have lost their names; what cannot be deleted is left to the next run."""
        for path in gone:
            try:
                self._remove(path)
            except OSError:
                continue

    @property
    def _mark(self) -> owned.Mark:
        return owned.Mark(kind="checkpoint", origin=self.record.origin)

    def _ours(self, mark: owned.Mark) -> bool:
        return mark.kind == "checkpoint" and self.record.owns(mark.origin)

    def _remove(self, path: Path) -> str | None:
        return owned.remove(path, inside=self.path, name=_LEFT, ours=self._ours)

    def _owns(self, path: Path) -> bool:
        """Whether a checkpoint is of this run: by its mark, or without a mark by its manifest (earlier versions and
        `plan checkpoint convert` write none)."""
        mark = owned.mark_of(path)
        if mark is not None:
            return self._ours(mark)
        try:
            return not path.is_symlink() and self.record.owns(read_manifest(path).origin)
        except CheckpointError:
            return False

    def _without_name(self, path: Path, name: str, token: str) -> Path:
        """Take the name of a checkpoint away: a half deleted one must not look whole."""
        if owned.mark_of(path) is None:
            owned.put_mark(path, self._mark)
        gone = self.path / f".{name}.{token}.gone"
        path.rename(gone)
        return gone


def take_name(part: Path, folder: Path) -> None:
    """Rename a folder in which everything is on disk, and wait until the new name is on disk too."""
    _sync(part)
    part.rename(folder)
    _sync(part.parent)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def finished(settings: RunSettings) -> Path | None:
    """The checkpoint of the last step, where a resumed run has already made it, so nothing is left to do. Raises
    CheckpointError where the existing checkpoints belong to another run."""
    last = newest(Path(settings.save)) if settings.go_on and settings.save is not None else None
    if last is None or step_of(last) < settings.steps:
        return None
    found = chosen(last.parent).path
    return found if found is not None and step_of(found) == settings.steps else None
