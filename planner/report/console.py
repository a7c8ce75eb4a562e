"""The console for reports. Text is printed literally: names from files of others are never markup or escape sequences.
`styled` makes text bold or red."""

from typing import Any

from rich.console import Console
from rich.text import Text

from hardware_profiles.foreign import printable


class PlainConsole(Console):
    """Prints strings literally; control characters other than line breaks and tabs are escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, "\n\t"), **options)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text made of parts, some with a style: `styled("Written to ", ("run", "bold"))`."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text, "\n\t"), style) for text, style in pairs))
