"""A folder of checkpoints, in which each is whole or not there at any moment.

    step-000100/                whole: it got this name when everything in it was on disk
    .step-000120.3f2a.part/     being written, or left behind by a run that ended in the middle
    .step-000100.3f2a.old/      taken out of the way by a newer one of the same step
    .step-000080.3f2a.gone/     being deleted

A name is given and taken by one rename, so whoever looks, sees a checkpoint whole or does not see it. What is left of
runs that ended is cleared by the next run in the same folder (`prepare`). Two runs must not write into one folder.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from planner.errors import CheckpointError
from runtime.checkpoint.manifest import MANIFEST
from runtime.run_settings import RunSettings

_WHOLE = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"\.(step-\d+)\.[0-9a-f]+\.(part|old|gone)")


def name_of(step: int) -> str:
    """The folder of the checkpoint of a step."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    """The step of a whole checkpoint."""
    return int(path.name.removeprefix("step-"))


def part_of(folder: Path, step: int, token: str) -> Path:
    """Where a checkpoint is written before it is whole; `token` is that of the run."""
    return folder / f".{name_of(step)}.{token}.part"


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest step first."""
    try:
        found = [path for path in folder.iterdir() if _WHOLE.fullmatch(path.name) and (path / MANIFEST).is_file()]
    except OSError:
        return []
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    """The whole checkpoint of the last step; None where there is none."""
    return next(reversed(checkpoints(folder)), None)


def prepare(folder: Path) -> None:
    """Make the folder, and clear what runs that ended left in it. Raises CheckpointError where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            left = _LEFT.fullmatch(path.name)
            if left and left[2] == "old" and not (folder / left[1]).exists() and (path / MANIFEST).is_file():
                path.rename(folder / left[1])  # the run ended between two renames
            elif left:
                shutil.rmtree(path)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}; name another place") from error


def publish(part: Path, step: int, token: str, keep: int) -> list[Path]:
    """Give a folder in which everything has been written the name of its checkpoint, in place of an older one, and take
    the names of all checkpoints but the last `keep`. Returns what is to be deleted, which takes longer."""
    folder, gone = part.parent / name_of(step), []
    if folder.exists():
        old = part.parent / f".{folder.name}.{token}.old"
        folder.rename(old)
        take_name(part, folder)
        gone.append(_without_name(old, folder.name, token))
    else:
        take_name(part, folder)
    return gone + [_without_name(path, path.name, token) for path in checkpoints(part.parent)[:-keep]]


def take_name(part: Path, folder: Path) -> None:
    """Rename a folder in which everything is on disk, and wait until its name is."""
    _sync(part)
    part.rename(folder)
    _sync(part.parent)


def _without_name(path: Path, name: str, token: str) -> Path:
    """What is half deleted must not look whole."""
    gone = path.parent / f".{name}.{token}.gone"
    path.rename(gone)
    return gone


def delete(gone: Sequence[Path]) -> None:
    """Delete what has no name any more; what cannot be deleted is left to the next run."""
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def finished(settings: RunSettings) -> Path | None:
    """The checkpoint of the last step, where a run that goes on has made that already: nothing is left to do."""
    found = newest(Path(settings.save)) if settings.go_on and settings.save is not None else None
    return found if found is not None and step_of(found) == settings.steps else None
