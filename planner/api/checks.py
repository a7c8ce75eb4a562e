"""Checks arguments of public functions; an error is a RequestError that names the argument."""

import dataclasses
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

from costmodels import CostModelError
from hardware_profiles import HardwareProfileError
from planner.api.kinds import fits, kind_of, said, shown
from planner.api.search_options import spelled_out
from planner.api.speaking import said_to_caller
from planner.errors import PlannerError, RequestError, unknown_name
from planner.sharding.update import Update
from planner.strategy_search.request.space import Pinned

Record = TypeVar("Record")
_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")

_LONGEST = 255
"""Most characters of a name of a file, on all file systems in use."""

_EXAMPLES = {
    "shard": "{'*q_proj*': 'b,o'}, or a list of planner.shard(pattern, strategy)",
    "pad": "'auto', {'batch': 4}, or a list of both",
    "place": "'auto', 'none', or {'*embed*': 'servers'}",
}
"""What to give for arguments whose types say too little."""

MOST = 2**31
"""Most of any whole number, as on the command line."""


def public(function: Callable[_Given, _Answer]) -> Callable[_Given, _Answer]:
    """Wrap a public function: an argument that is unknown or of a type that is not its own, and unknown hardware, raise
    a RequestError that says what to do. Errors name arguments of the function, where they would name options of the
    command (`planner.api.speaking`)."""
    signature = spelled_out(function)
    names = (function.__name__, *signature.parameters)

    @functools.wraps(function)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Answer:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            fault = _misnamed(function.__name__, names[1:], kwargs)
            raise RequestError(fault or _lacking(function.__name__, signature, kwargs) or str(error)) from error
        _check_kinds(signature, given)
        try:
            return function(*args, **kwargs)
        except (HardwareProfileError, CostModelError) as error:
            raise RequestError(said_to_caller(str(error), names)) from error
        except PlannerError as error:
            error.args = (said_to_caller(str(error), names), *error.args[1:])
            raise

    called.__signature__ = signature  # type: ignore[attr-defined]  # what `help` shows
    return called


def _check_kinds(signature: inspect.Signature, given: Mapping[str, object]) -> None:
    """Raise RequestError for the first argument whose type is not that of its annotation."""
    for name, value in given.items():
        wanted = signature.parameters[name].annotation
        advice = f"give {_EXAMPLES.get(name) or said(wanted).removesuffix(' or None')}"
        if not fits(value, wanted, words=False):
            raise RequestError(f"{name} = {shown(value)}: {advice}")
        if isinstance(value, str | os.PathLike):
            text = os.fspath(value)
            if text == "" and any(typing.get_origin(one) is os.PathLike for one in typing.get_args(wanted)):
                raise RequestError(f"{name} is empty: {advice}")
            if "\0" in text or max(map(len, re.split("[/,+]", text))) > _LONGEST:
                raise RequestError(f"{name} = {text!r:.80}: no name has such characters, or so many; {advice}")


def _misnamed(function: str, known: tuple[str, ...], given: Mapping[str, object]) -> str:
    """Advice on the first keyword argument that a function does not have; empty if all are known."""
    for name, value in given.items():
        if name in known:
            continue
        for section, kind in (("pinned", Pinned), ("update", Update)):
            if section in known and name in {field.name for field in dataclasses.fields(kind)}:
                return f"{function}({name}={value!r:.40}): give {section}={{{name!r}: {value!r:.40}}}"
        if name == "sequence_length" and "seq_len" in known:
            return f"{function}({name}=...): give seq_len"
        return unknown_name(f"argument of {function}:", name[:80], known)
    return ""


def _lacking(function: str, signature: inspect.Signature, given: Mapping[str, object]) -> str:
    """The missing keyword arguments; empty if none is."""
    wanted = (one for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY and one.default is one.empty)
    lacking = [f"{one.name}=..." for one in wanted if one.name not in given]
    return f"{function}: give {', '.join(lacking)}" if lacking else ""


def callback(name: str, value: object) -> None:
    """Raise RequestError unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise RequestError(f"{name} is {kind_of(value)}: give a function")


def callbacks(**values: object) -> None:
    """`callback` for several arguments."""
    for name, value in values.items():
        callback(name, value)


def text(name: str, value: object) -> None:
    """Raise RequestError unless `value` is None or text."""
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} is {kind_of(value)}: give text")


def names(**values: object) -> None:
    """`text` for several arguments."""
    for name, value in values.items():
        text(name, value)


def texts(name: str, value: object) -> None:
    """Raise RequestError unless `value` is a list, or a tuple, of texts."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise RequestError(f"{name} is {kind_of(value)}: give a list of texts")


def file_path(name: str, value: object) -> Path:
    """A path, from text or a path. Raises RequestError."""
    if not isinstance(value, str | os.PathLike):
        raise RequestError(f"{name} is {kind_of(value)}: give the path of a file")
    return Path(value)


def profile(value: object) -> str:
    """Name or file of a hardware profile, as text. Raises RequestError."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value:
        given = "empty" if value == "" else kind_of(value)
        raise RequestError(f"hardware is {given}: give the name of a profile, or the path of its file")
    return value


def number(name: str, value: object, *, least: float = 1, whole: bool = True) -> None:
    """Raise RequestError unless `value` is None or a number of at least `least`."""
    kinds = (int,) if whole else (int, float)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name} = {shown(value)}: give {kind} of {least:g} or more")
    if whole and value > MOST:
        raise RequestError(f"{name} = {value:.3e}: give {MOST:,} or less")


def numbers(**values: object) -> None:
    """`number` for several arguments: whole numbers of 1 or more."""
    for name, value in values.items():
        number(name, value)


def amounts(**values: object) -> None:
    """`number` for several arguments: numbers of 0 or more."""
    for name, value in values.items():
        number(name, value, least=0, whole=False)


def word(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise RequestError unless `value` is one of the known words."""
    if not isinstance(value, str) or value not in known:
        raise RequestError(unknown_name(f"value for {name}:", str(value)[:80], known))


def record(name: str, value: object, kind: type[Record], default: Record) -> Record:
    """A record from a record, or from a mapping of the fields that differ from `default`; None means `default`. Lists
    are read as tuples, and mappings as tuples of pairs.

    Raises RequestError for a field that it lacks, and for a value of another type.
    """
    if value is None:
        return default
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if isinstance(value, kind):
        for key in fields:
            if not fits(given := getattr(value, key), fields[key]):
                raise RequestError(f"{name}.{key} = {given!r:.80}: give {said(fields[key])}")
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {kind_of(value)}: give a planner.{kind.__name__}, or a dict of its fields")
    read = {key: _tuples(given) for key, given in value.items()}
    for key, given in read.items():
        if key not in fields:
            raise RequestError(unknown_name(f"field of {name}:", str(key)[:80], fields))
        if not fits(given, fields[key]):
            raise RequestError(f"{name}[{key!r}] = {value[key]!r:.80}: give {said(fields[key])}")
    return dataclasses.replace(default, **read)  # type: ignore[type-var]


def _tuples(value: object) -> object:
    """A value with lists as tuples, and mappings as tuples of pairs."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
