"""Texts of files that users name, and lines that quote them."""

from pathlib import Path

import typer

from hardware_profiles.foreign import ForeignTextError, printable, read_bytes, read_text
from planner.errors import RequestError


def say(text: str, err: bool = False) -> None:
    """Print text as it is, with control characters other than line breaks and tabs spelled out: names out of files may
    be in it."""
    typer.echo(printable(text, "\n\t"), err=err)


def bytes_of(path: Path) -> bytes:
    """Raises RequestError where a file cannot be read, or is too large."""
    try:
        return read_bytes(path)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}") from error


def text_of(path: Path) -> str:
    """Raises RequestError where a file cannot be read as text."""
    try:
        return read_text(path)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}") from error
