"""Writes a folder of files atomically: it is complete or not there.

One file of the folder, the record, lists the other files with their sha256, and its own under `checksum`. A folder is
replaced only if it holds exactly what its record lists: nothing that we did not write is deleted.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hardware_profiles.foreign import ForeignTextError, parse_json, read_text
from planner.errors import RequestError


def write_folder(folder: Path, files: Mapping[str, str], record: str, content: Mapping[str, Any]) -> None:
    """Write files into a folder, and the file `record` with `content` and their checksums. The folder gets its name
    when all files are written.

    An existing folder that was written like this is replaced completely. Raises RequestError if it holds anything
    else, or nothing can be written.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise RequestError(f"-o {folder}: is no folder but a file or a link; name a folder")
    parent = folder.absolute().parent
    written = {**files, record: _record_text(files, content)}
    fresh = None
    try:
        ours = _ours(folder, frozenset(written), record, content)
        parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=parent, prefix=f".{folder.name}."))
        for name, text in written.items():
            (fresh / name).write_text(text, encoding="utf-8", newline="")
            if name.endswith(".sh"):
                (fresh / name).chmod(0o755)
        fresh.chmod(0o755)
        _take_the_place(fresh, folder, ours)
        fresh = None
    except OSError as error:
        raise RequestError(f"-o {folder}: cannot be written: {error.strerror}") from error
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)


def _record_text(files: Mapping[str, str], content: Mapping[str, Any]) -> str:
    listed = {**content, "files": {name: _sha256(text.encode()) for name, text in sorted(files.items())}}
    return json.dumps({**listed, "checksum": _own_checksum(listed)}, indent=1) + "\n"


def _own_checksum(listed: Mapping[str, Any]) -> str:
    """The checksum of a record without its field `checksum`."""
    return _sha256(json.dumps(listed, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _ours(folder: Path, names: frozenset[str], record: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    """The files of a folder that we wrote completely. Raises RequestError that names the first file that we did not
    write."""
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not found:
        return ()
    listed = _listed(folder / record, names, content) if record in found else {}
    if record in found and not listed:
        _refuse(folder, record, "which is not as plan export writes it")
    for name in found:
        if name not in listed:
            _refuse(folder, name, "which plan export did not write")
        if not _is_unchanged(folder / name, listed[name]):
            _refuse(folder, name, "which is not as plan export wrote it")
    return tuple(found)


def _listed(path: Path, names: frozenset[str], content: Mapping[str, Any]) -> Mapping[str, str | None]:
    """The files listed in a record, with their checksums. Records of earlier versions have no checksums: then the file
    names that we know. Empty if it is not our record."""
    try:
        found = parse_json(read_text(path))
    except ForeignTextError:
        return {}
    if not isinstance(found, dict) or not {"schema_version", "engine", "about", "model"} <= found.keys():
        return {}
    if "files" not in found and "checksum" not in found:
        return dict.fromkeys(names) if found["engine"] == content["engine"] else {}
    checksum, files = found.pop("checksum", None), found.get("files")
    if checksum != _own_checksum(found) or not isinstance(files, dict):
        return {}
    return {**files, path.name: None}


def _is_unchanged(path: Path, checksum: str | None) -> bool:
    """Whether a file has that checksum; without a checksum, whether it is a file at all."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    if checksum is None:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == checksum


def _refuse(folder: Path, name: str, why: str) -> None:
    raise RequestError(f"-o {folder}: holds '{name}', {why}; name another folder, or remove it")


def _take_the_place(fresh: Path, folder: Path, ours: tuple[str, ...]) -> None:
    """Rename a folder to a name that may be taken by a folder of ours; if that fails, the old folder stays."""
    if not folder.exists():
        os.replace(fresh, folder)
        return
    with _kept_aside(folder) as old:
        os.replace(fresh, folder)
    for name in ours:
        (old / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # files added meanwhile are not ours
        old.rmdir()
        old.parent.rmdir()


@contextlib.contextmanager
def _kept_aside(folder: Path) -> Iterator[Path]:
    """Move a folder aside while another one takes its name; it comes back if that fails."""
    aside = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
    old = aside / "old"
    try:
        os.replace(folder, old)
        try:
            yield old
        except BaseException:
            os.replace(old, folder)
            raise
    finally:
        with contextlib.suppress(OSError):  # where it holds the old folder
            aside.rmdir()
