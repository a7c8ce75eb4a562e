"""Texts of files that users name."""

from pathlib import Path

from hardware_profiles.foreign import ForeignTextError, read_text
from planner.errors import RequestError


def text_of(path: Path) -> str:
    """Raises RequestError where a file cannot be read as text."""
    try:
        return read_text(path)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}") from error
