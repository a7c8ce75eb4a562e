"""Where reports are printed. Text is text: names in it, out of files that others wrote, are no markup and no escape
sequences. What is bold or red is said by `styled`."""

from typing import Any

from rich.console import Console
from rich.text import Text

from hardware_profiles.foreign import printable


class PlainConsole(Console):
    """Prints strings as they are, with control characters other than line breaks and tabs spelled out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, "\n\t"), **options)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text of parts, some of them with a style: `styled("Written to ", ("run", "bold"))`."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text, "\n\t"), style) for text, style in pairs))
