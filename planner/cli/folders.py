"""Writing a folder of files so that it is either whole or not there."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from planner.errors import RequestError


def write_folder(folder: Path, files: Mapping[str, str], marker: str) -> None:
    """Write files into a folder of their own, which takes its name when all of them are there.

    A folder of that name that holds `marker` was written like this and is replaced; one with anything else in it is
    left alone. Raises RequestError where that is so, or nothing can be written.
    """
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"-o {folder}: is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / marker).exists():
        raise RequestError(f"-o {folder}: holds files that are no export; name a new folder, or empty it")
    parent = folder.absolute().parent
    fresh = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=parent, prefix=f".{folder.name}."))
        for name, text in files.items():
            (fresh / name).write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                (fresh / name).chmod(0o755)
        fresh.chmod(0o755)
        _take_the_place(fresh, folder)
        fresh = None
    except OSError as error:
        raise RequestError(f"-o {folder}: cannot be written: {error.strerror}") from error
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)


def _take_the_place(fresh: Path, folder: Path) -> None:
    """Rename a folder to one that may be there already."""
    if not folder.exists():
        os.replace(fresh, folder)
        return
    old = Path(tempfile.mkdtemp(dir=fresh.parent, prefix=f".{folder.name}."))
    os.replace(folder, old / "old")
    os.replace(fresh, folder)
    shutil.rmtree(old)
