"""Texts of files that users name, and lines that quote them."""

from pathlib import Path

import typer

from hardware_profiles.foreign import ForeignTextError, printable, read_bytes, read_text
from planner.errors import RequestError


def say(text: str, err: bool = False) -> None:
    """Print text unchanged, except that control characters other than line breaks and tabs are escaped: it may contain
    names from files."""
    typer.echo(printable(text, "\n\t"), err=err)


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
