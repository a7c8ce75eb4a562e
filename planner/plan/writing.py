"""Files that are written whole or not at all, and a check whether a file can be written."""

import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from planner.errors import PlanFileError


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file whole or not at all; with `private` for its owner alone, whatever the umask is.
    A link stays, and the file that it names is written. A device or a pipe (/dev/null) stays too, and gets the text.
    Raises PlanFileError where it cannot be written."""
    temporary = None
    try:
        if _is_special(path):
            with path.open("w", encoding="utf-8") as device:
                device.write(text)
            return
        place = path if private else Path(os.path.realpath(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=place.parent, prefix=f".{place.name}.", delete=False, encoding="utf-8"
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if private:
            os.chmod(temporary, 0o600)
        else:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, place)
        temporary = None
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    finally:
        if temporary is not None:
            os.unlink(temporary)


def check_place(path: Path, read: Iterable[str | os.PathLike[str] | None] = ()) -> None:
    """Raise PlanFileError where a file cannot be written, or is one of those that are read, before anyone has waited
    for its content. What is read may be a name that is no file."""
    if str(path) == "-":
        raise PlanFileError("-: is no file, and commands write none to stdout; name a file, or /dev/stdout")
    try:
        number = errno.EISDIR if path.is_dir() else _folder_errno(path)
        if any(one and path.exists() and os.path.exists(one) and path.samefile(one) for one in read):
            raise PlanFileError(f"{path} is read here and would be overwritten; name another file")
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    if number:
        raise _unwritable(path, OSError(number, os.strerror(number)))


def _is_special(path: Path) -> bool:
    """Whether there is a device, a pipe or a socket, which no file may replace."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _folder_errno(path: Path) -> int:
    """The error of creating a file in the folder of a path, or in the first folder above that exists; 0 for none. Of
    a device or a pipe, that of writing into it."""
    if _is_special(path):
        return 0 if os.access(path, os.W_OK) else errno.EACCES
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        return errno.ENOTDIR
    return 0 if os.access(folder, os.W_OK | os.X_OK) else errno.EACCES


def _unwritable(path: Path, error: OSError | ValueError) -> PlanFileError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return PlanFileError(f"{path}: cannot be written: {reason}; name another place")
