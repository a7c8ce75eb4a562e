"""Text that somebody else may have written, such as the name of a model, in files of other languages.

Whatever it is, it stays text there: it ends neither the line of a comment nor the string that it stands in. JSON, TOML
and YAML are written by their own writers, words of a command by `shlex.quote`.
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
