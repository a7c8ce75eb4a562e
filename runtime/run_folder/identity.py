"""Identifies a run, and its folder.

    runs/a/run.json      the run, the folder, and how the folder is recognized

Every checkpoint and every state replica names both (`Origin`). A folder is recognized by its inode and by the inode of
the record in it: renaming keeps both, a copy has others. Device numbers are not used, because they change when a file
system is mounted again. Where only one of the two inodes matches, the path and the host must be unchanged.

An identity is always 32 hexadecimal digits; nothing else ever becomes a part of a path.
"""

import json
import os
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from planner.errors import CheckpointError
from runtime.run_folder import private

RECORD = "run.json"
"""The file of a run's folder that says which run it is."""

_STRICT = ConfigDict(extra="forbid", strict=True)
_LARGEST = 64 * 2**10  # maximum bytes of a record

Identity = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""128 random bits in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of a state: the run that was trained, and the folder that it was saved in."""

    __pydantic_config__ = _STRICT

    run: Identity
    folder: Identity

    def __str__(self) -> str:
        return f"run {self.run[:8]} in folder {self.folder[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The record of a folder. `inode` and `file` are the inodes of the folder and of the record, `path` and `host` its
    location; `former` are origins whose checkpoints belong to it too, since it was moved; with `older`, checkpoints
    without an origin, from earlier versions, also belong to it."""

    __pydantic_config__ = _STRICT

    run: Identity
    folder: Identity
    inode: int
    file: int
    path: str
    host: str
    former: tuple[Origin, ...] = ()
    older: bool = False

    @property
    def origin(self) -> Origin:
        """The origin of what is saved here from now on."""
        return Origin(run=self.run, folder=self.folder)

    def owns(self, origin: Origin | None) -> bool:
        """Whether a state belongs to this run in this folder."""
        return self.older if origin is None else origin == self.origin or origin in self.former

    def is_of(self, folder: Path) -> bool:
        """Whether this is the folder that the record was written for."""
        seen = (folder.stat().st_ino == self.inode) + ((folder / RECORD).stat().st_ino == self.file)
        return seen == 2 or (seen == 1 and (self.path, self.host) == _place(folder))


def new_identity() -> str:
    """A new random identity."""
    return secrets.token_hex(16)


def read_record(folder: Path) -> RunRecord | None:
    """The record of a folder, whether or not it was written for this folder; None where there is none. Raises
    CheckpointError for one that is not ours."""
    path = folder / RECORD
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            content = file.read(_LARGEST)
        return TypeAdapter(RunRecord).validate_json(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: has no run id: it was edited or is damaged. If all its checkpoints are of one"
            f" run, {_adopt(folder)} gives the folder a new identity"
        ) from error


def own_record(folder: Path, *, older: bool = False) -> RunRecord:
    """The record of a folder that this process has locked; created where there is none. Raises CheckpointError for a
    folder that is a copy of another one."""
    found = read_record(folder)
    if found is None:
        return _write(folder, _new(folder, older=older))
    if not found.is_of(folder):
        raise CheckpointError(
            f"{folder}: is a copy of the folder of run {found.run[:8]}, which was {found.path!r} on {found.host!r}, and"
            f" cannot continue that run. Start a new run from its checkpoint with --resume {folder} --save NEW. If the"
            f" folder was moved or restored and nobody uses the other one, run {_adopt(folder)} first"
        )
    return found


def adopt(folder: Path, origins: frozenset[Origin | None]) -> RunRecord:
    """Make a moved or restored folder one in which its run continues; `origins` are those of its checkpoints, which
    belong to it from now on. The folder is locked."""
    try:
        known = read_record(folder)
    except CheckpointError:
        known = None
    made = _new(folder, older=None in origins)
    former = {origin for origin in origins if origin is not None}
    if known is not None:
        former |= {known.origin, *known.former}
        made = replace(made, run=known.run)
    return _write(folder, replace(made, former=tuple(sorted(former, key=lambda origin: (origin.run, origin.folder)))))


def _adopt(folder: Path) -> str:
    return f"`plan checkpoint adopt {folder}`"


def _new(folder: Path, *, older: bool) -> RunRecord:
    path, host = _place(folder)
    return RunRecord(
        run=new_identity(), folder=new_identity(), inode=folder.stat().st_ino, file=0, path=path, host=host, older=older
    )


def _write(folder: Path, record: RunRecord) -> RunRecord:
    """Write a record that contains the number of its own inode."""
    fresh = folder / f".{RECORD}.fresh"
    fresh.unlink(missing_ok=True)
    with open(fresh, "x", encoding="utf-8", opener=private.opener) as file:
        record = replace(record, file=os.fstat(file.fileno()).st_ino)
        json.dump(asdict(record), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / RECORD)
    return record


def _place(folder: Path) -> tuple[str, str]:
    return os.path.realpath(folder), os.uname().nodename
