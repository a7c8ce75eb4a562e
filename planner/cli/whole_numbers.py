"""Numbers that options take: which are legal, in words, and the check that a whole number has only ASCII digits.

--tensor 10      ten
--tensor 1_0     refused, though Python reads ten: it is a slip, and so are digits of other scripts
"""

import re
from typing import Any

from planner.errors import RequestError

_LISTED = 8
"""Maximum count of legal numbers that are listed one by one."""


def check_whole_numbers(command: Any, context: Any, arguments: list[str]) -> None:
    """Raise RequestError if the value of a whole-number option is not a sign and ASCII digits. The parser checks the
    range."""
    given, _, _ = command.make_parser(context).parse_args(list(arguments))
    for parameter in command.params:
        value = given.get(parameter.name)
        if isinstance(value, str) and _is_whole(parameter) and not re.fullmatch("[+-]?[0-9]+", value):
            name = max(parameter.opts, key=len)
            raise RequestError(f"{name} {value}: give {legal_numbers(parameter)}")


def _is_whole(parameter: Any) -> bool:
    """Whether the parser, and not a function of ours, converts the number."""
    informed = getattr(getattr(parameter, "type_descriptor", None), "parameter_info", None)
    return _kind(parameter).startswith("int") and getattr(informed, "parser", None) is None


def _kind(parameter: Any) -> str:
    """Newer versions of Typer keep the annotation of an option, older ones a type of the parser."""
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    return getattr(annotation, "__name__", "") or getattr(getattr(parameter, "type", None), "name", "")


def legal_numbers(parameter: Any) -> str:
    """The legal numbers of an option in words: `0, 1, 2 or 3`, `a whole number of 1 or more`; empty for other options.

    Newer versions of Typer keep the limits in the option, older ones in its type.
    """
    kind = getattr(parameter, "type", None)
    name = _kind(parameter)
    whole = name.startswith("int")
    if not whole and not name.startswith("float"):
        return ""
    least, most = (getattr(parameter, end, getattr(kind, end, None)) for end in ("min", "max"))
    number = "a whole number" if whole else "a number"
    if least is None:
        return number
    if most is None:
        return f"{number} of {least:g} or more"
    if whole and most - least < _LISTED:
        *others, last = map(str, range(int(least), int(most) + 1))
        return f"{', '.join(others)} or {last}"
    return f"{number} from {least:,} to {most:,}"
