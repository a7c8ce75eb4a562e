"""Text that somebody else may have written, such as the name of a model, in files of other languages.

Whatever it is, it stays text there: it ends neither the line of a comment nor the string that it stands in. JSON and
YAML are written by their own writers, words of a command by `shlex.quote`.
"""

import re

from hardware_profiles.foreign import printable

_MARKUP = re.compile(r"([\\`*\[\]<>&|!~$])")


def one_line(text: str) -> str:
    """Text with line breaks, control characters and the like spelled out: a comment of a shell script, YAML, TOML or
    Python."""
    return printable(text)


def in_docstring(text: str) -> str:
    """A line of a Python string between three quotes, which has that text."""
    return one_line(text).replace("\\", "\\\\").replace('"', '\\"')


def in_markdown(text: str) -> str:
    """A line of Markdown, without links, markup and HTML."""
    return _MARKUP.sub(r"\\\1", one_line(text))


def in_toml(text: str) -> str:
    """A basic string of TOML, with its quotes."""
    return f'"{"".join(map(_in_toml, text))}"'


def _in_toml(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\\\ud{code & 0xFFF:03x}" if 0xD800 <= code <= 0xDFFF else f"\\U{code:08x}"  # TOML has no half characters
