"""The content of files that users name."""

from pathlib import Path

from hardware_profiles.foreign import ForeignTextError, read_bytes, read_text
from planner.errors import RequestError


def bytes_of(path: Path) -> bytes:
    """The content of a file. Raises RequestError if it cannot be read or is too large."""
    try:
        return read_bytes(path)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}") from error


def text_of(path: Path) -> str:
    """The text of a file. Raises RequestError if it cannot be read as text."""
    try:
        return read_text(path)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}") from error
