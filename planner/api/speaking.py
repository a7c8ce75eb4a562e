"""Errors in the words of who called: the planner names options of its command, and Python has parameters.

    --devices 4, --for megatron:      devices=4, engine='megatron':
    leave out --for                   leave out engine
    --zero 1, --clip-norm             pinned={'zero': 1}, update['clip_norm']
    --pad batch=4                     pad={'batch': 4}
    --no-alltoall                     alltoall=False
    plan run PLAN --measure FILE      the same: a command to type

An option that the function has in no form stays, as does what engines call theirs.
"""

import dataclasses
import re
from collections.abc import Collection

from planner.api.callers import is_command
from planner.sharding.update import Update
from planner.strategy_search.request.space import Pinned

_OTHER_NAMES = {"for": "engine", "from": "engine", "to": "engine", "alltoall_on": "alltoall", "output": "path"}
"""Parameters that are called otherwise than the options."""

_SECTIONS = {
    section: frozenset(field.name for field in dataclasses.fields(kind))
    for section, kind in (("pinned", Pinned), ("update", Update))
}

_VERBS = r"(?!(?:with|without|again|in|for|to|that|is)\b)"
_COMMAND = rf"(?:\bplan|\btorchrun|\bpython -m \S+)(?: {_VERBS}[^\s,;:()]+)*? --[^,;:()]*"
"""A command to type, up to a mark that ends it. To plan without an option is none."""

_OPTION = r"--(?P<no>no-)?(?P<option>[a-z][a-z0-9-]*)(?![\w=])"
_VALUE = (
    r"(?: (?P<value>'[^']*'|\d[\d.,]*\d|\d|[\w-]+=[\w*'-]+|[\w-]*[./:][\w./:-]*\w|[a-z0-9_]+(?=[,;:)]|$|\.\s|\.$)))?"
)


def said_to_caller(message: str, parameters: Collection[str]) -> str:
    """A message about options as it is: to a command; to a Python program it is one about the parameters."""
    return message if is_command() else in_python(message, parameters)


def in_python(message: str, parameters: Collection[str]) -> str:
    """A message about options as one about the parameters of a function."""
    return re.sub(f"{_COMMAND}|{_OPTION}{_VALUE}", lambda found: _said(found, parameters), message)


def _said(found: re.Match[str], parameters: Collection[str]) -> str:
    option, value = found["option"], found["value"]
    if option is None:
        return found[0]
    name = option.replace("-", "_")
    name = name if name in parameters else _OTHER_NAMES.get(name, name)
    section = next((one for one, fields in _SECTIONS.items() if one in parameters and name in fields), None)
    if name not in parameters and section is None:
        return found[0]
    if found["no"]:
        value = f"False{' ' * bool(value)}{value or ''}"
    elif value is not None and "=" in value and not value.startswith("'"):
        key, _, value = value.partition("=")
        value = f"{{{key!r}: {value if value.isdigit() else repr(value)}}}"
    elif value is not None and not value[0].isdigit() and not value.startswith("'"):
        value = repr(value)
    if name in parameters:
        return name if value is None else f"{name}={value}"
    return f"{section}[{name!r}]" if value is None else f"{section}={{{name!r}: {value}}}"
