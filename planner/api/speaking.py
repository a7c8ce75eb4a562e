"""Errors in the words of who called: the planner names options of its command, and Python has parameters.

    --devices 4, --for megatron:      devices=4, engine='megatron':
    leave out --for                   leave out engine
    --zero 1, --clip-norm             pinned={'zero': 1}, update['clip_norm']
    --pad batch=4                     pad={'batch': 4}
    --no-alltoall                     alltoall=False
    plan run PLAN --measure FILE      the same: a command to type

An option that the function has in no form stays, as do options of engines and what a user wrote: paths, and text in
quotes.
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

_TABLES = ("pad", "place", "shard")
"""Parameters that take a dict of what their options say as KEY=VALUE."""

_LISTS = ("fp8_layers", "fp8_left_out", "per_replica")
"""Parameters that take a list of what their options say one by one."""

_VERBS = r"(?!(?:with|without|again|in|for|to|that|is)\b)"
_COMMAND = rf"(?:\bplan|\btorchrun|\bpython -m \S+)(?: {_VERBS}[^\s,;:()]+)*? --[^,;:()]*"
"""A command to type, up to a mark that ends it. To plan without an option is none."""

_QUOTED = r"(?<![\w=])'[^'\n]*'(?!\w)"
"""What a user wrote."""

_OPTION = r"(?<![\w./\\-])--(?P<no>no-)?(?P<option>[a-z][a-z0-9-]*)(?![\w=/-]|\.\w)"
"""An option, but no part of a path, and none of an engine that goes on as ours begins."""

_END = r"(?=[\s,;:)`]|\.(?:\s|$)|$)"
_VALUE = (
    r"(?: (?P<value>"
    r"'[^']*'|"
    rf"\d[\d,]*(?:\.\d+)?{_END}(?<!,)|"
    rf"[\w.*/-]+=[\w.*/-]+(?:,[\w.*/=-]+)*{_END}(?<![.])|"
    r"[\w-]*[./:][\w./:-]*\w(?:,[\w./:-]*\w)*|"
    rf"(?:none|auto|\w*\d\w*|[A-Z]+){_END}|"
    r"(?!out\b|left\b)[a-z0-9_]+(?=[,;:)]|$|\.\s|\.$)"
    r"))?"
)
"""A value: in quotes, a number, KEY=VALUE, a name with marks inside, or a word that ends a part of the sentence."""


def said_to_caller(message: str, parameters: Collection[str]) -> str:
    """A message about options as it is: to a command; to a Python program it is one about the parameters."""
    return message if is_command() else in_python(message, parameters)


def in_python(message: str, parameters: Collection[str]) -> str:
    """A message about options as one about the parameters of a function."""
    return re.sub(f"{_COMMAND}|{_QUOTED}|{_OPTION}{_VALUE}", lambda found: _said(found, parameters), message)


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
        return f"{name}=False{found[0][found.end('option') - found.start() :]}"
    given = None if value is None else _written(name, value)
    if name in parameters:
        return name if given is None else f"{name}={given}"
    return f"{section}[{name!r}]" if given is None else f"{section}={{{name!r}: {given}}}"


def _written(name: str, value: str) -> str:
    """The value of an option as Python writes it."""
    bare = value.strip("'")
    key, given, rest = bare.partition("=")
    if name in _TABLES and given:
        return f"{{{key!r}: {_literal(rest)}}}"
    if name in _LISTS:
        return f"[{bare!r}]"
    if name == "mesh":
        return f"({bare.replace('x', ', ')})"
    return repr(bare) if value != bare else _literal(value)


def _literal(value: str) -> str:
    """A number or a placeholder as it is, all else as text."""
    if re.fullmatch(r"\d+(\.\d+)?|\d{1,3}(,\d{3})+", value):
        return value.replace(",", "")
    return value if re.fullmatch("[A-Z]+", value) else repr(value)
