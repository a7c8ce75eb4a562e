"""Foreign text, such as the name of a model, inside files of other languages.

Whatever it contains, it stays text: it ends neither a comment line nor the string that contains it. JSON, TOML and YAML
have their own writers, and words of a command are quoted by `shlex.quote`.
"""

import re

from hardware_profiles.foreign import printable

_MARKUP = re.compile(r"([\\`*\[\]<>&|!~$])")


def one_line(text: str) -> str:
    """Text with line breaks, control characters and the like as escapes, for a comment in a shell script, YAML, TOML or
    Python."""
    return printable(text)


def in_docstring(text: str) -> str:
    """A line with that text inside a Python string with three quotes."""
    return one_line(text).replace("\\", "\\\\").replace('"', '\\"')


def in_markdown(text: str) -> str:
    """A line of Markdown, without links, markup and HTML."""
    return _MARKUP.sub(r"\\\1", one_line(text))
