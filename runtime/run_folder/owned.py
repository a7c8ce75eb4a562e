"""Deletes folders that are ours; no other code deletes a folder.

    step-000100/.plan-owned        {"kind": "checkpoint", "origin": {"run": "…", "folder": "…"}}

A folder is removed only if all of this holds: it has a name of the strict form, lies directly in the folder where such
folders lie, is a folder and no link, belongs to the user of this process, and has a mark that the caller accepts. All
checks use descriptors, so that nobody can replace the folder by a link meanwhile. The mark is the first thing written
into a folder and the last one removed, so what a killed process left behind still has it.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from planner.errors import CheckpointError
from runtime.run_folder import private
from runtime.run_folder.identity import Origin

MARK = ".plan-owned"
"""The file that marks a folder as ours."""

_LARGEST = 4096  # maximum bytes of a mark
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # why a folder cannot take a name


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The kind of a folder of ours, and its run."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    kind: Literal["checkpoint", "replicas"]
    origin: Origin


def make(path: Path, mark: Mark) -> None:
    """Create a folder together with its mark, atomically; or check that the existing one is ours and has the same mark.

    Raises CheckpointError for anything else of that name, OSError where it cannot be created.
    """
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    private.make_folder(fresh)
    try:
        put_mark(fresh, mark)
        os.rename(fresh, path)
    except OSError as error:
        (fresh / MARK).unlink(missing_ok=True)
        fresh.rmdir()
        if error.errno not in _THERE:
            raise
        fault = _fault_of(path, lambda found: found == mark)
        if fault is not None:
            raise CheckpointError(
                f"{path}: {fault}; nothing is written there. Find out who made it, and remove it"
            ) from error


def put_mark(path: Path, mark: Mark) -> None:
    """Mark a folder whose content shows that it is ours: earlier versions left no marks."""
    (path / MARK).unlink(missing_ok=True)  # an empty one that a power loss left
    with open(path / MARK, "x", encoding="utf-8", opener=private.opener) as file:
        json.dump(asdict(mark), file)
        file.flush()
        os.fsync(file.fileno())


def remove(path: Path, *, inside: Path, name: re.Pattern[str], ours: Callable[[Mark], bool]) -> str | None:
    """Delete a folder that is ours, whose `name` has this form and which lies directly `inside` of another one. Returns
    why it was left alone, None where it is deleted. Raises OSError where it is ours and cannot be deleted."""
    if name.fullmatch(path.name) is None:
        return "has a name that the runtime does not use"
    if os.path.realpath(path.parent) != os.path.realpath(inside):
        return f"is not in {inside}"
    try:
        parent = os.open(inside, _FOLDER & ~os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return _remove(path.name, parent, ours)
    finally:
        os.close(parent)


def mark_of(path: Path) -> Mark | None:
    """The mark of a folder that is no link and belongs to this user; None where it has none."""
    try:
        opened = os.open(path, _FOLDER)
    except OSError:
        return None
    try:
        found = _mark(opened)
    finally:
        os.close(opened)
    return found if isinstance(found, Mark) else None


def _remove(name: str, parent: int, ours: Callable[[Mark], bool]) -> str | None:
    try:
        opened = os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return "is not a folder, or is a link to one"
        raise
    try:
        fault = None if _is_bare(opened) else _fault(opened, ours)
        if fault is not None:
            return fault
        for one in os.listdir(opened):
            if one != MARK:
                _delete(one, opened)
        _unlink(MARK, opened)
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return None  # another process deletes it too
    finally:
        os.close(opened)
    return None


def _delete(name: str, folder: int) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        _unlink(name, folder)


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def _is_bare(opened: int) -> bool:
    """Whether it contains at most a mark, possibly half written, because its process was killed."""
    return os.fstat(opened).st_uid == os.geteuid() and set(os.listdir(opened)) <= {MARK}


def _fault_of(path: Path, ours: Callable[[Mark], bool]) -> str | None:
    try:
        opened = os.open(path, _FOLDER)
    except OSError:
        return "already exists and is not a folder, or is a link to one"
    try:
        return _fault(opened, ours)
    finally:
        os.close(opened)


def _fault(opened: int, ours: Callable[[Mark], bool]) -> str | None:
    """Why an open folder is not ours."""
    mark = _mark(opened)
    if isinstance(mark, str):
        return mark
    return None if ours(mark) else f"has the mark of {mark.origin}"


def _mark(opened: int) -> Mark | str:
    """The mark of an open folder, or why it has no valid one."""
    if os.fstat(opened).st_uid != os.geteuid():
        return "belongs to another user"
    try:
        file = os.open(MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=opened)
    except OSError:
        return "has no mark of the runtime"
    try:
        return TypeAdapter(Mark).validate_json(os.read(file, _LARGEST))
    except (OSError, ValidationError):
        return "has a mark that the runtime did not write"
    finally:
        os.close(file)
