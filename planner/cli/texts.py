"""Lines that quote texts of files."""

import typer

from hardware_profiles.foreign import printable


def say(text: str, err: bool = False) -> None:
    """Print text unchanged, except that control characters other than line breaks and tabs are escaped: it may contain
    names from files."""
    typer.echo(printable(text, "\n\t"), err=err)
