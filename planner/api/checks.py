"""Arguments of public functions: what is wrong with one is a RequestError that names it."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from planner.errors import RequestError, unknown_name

Record = TypeVar("Record")

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", tuple: "a tuple"}


def number(name: str, value: object, *, least: float = 1, whole: bool = True) -> None:
    """Raise RequestError unless `value` is None or a number of at least `least`."""
    kinds = (int,) if whole else (int, float)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name} = {value!r:.80}: give {kind} of {least:g} or more")


def word(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise RequestError unless `value` is one of the known words."""
    if not isinstance(value, str) or value not in known:
        raise RequestError(unknown_name(f"value for {name}:", str(value)[:80], known))


def record(name: str, value: object, kind: type[Record], default: Record) -> Record:
    """A record, from one, from a mapping of fields that differ from `default`, or that for None.

    Raises RequestError for a field that it lacks, and for a value of another type.
    """
    if value is None:
        return default
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{name} is a {type(value).__name__}: give a planner.{kind.__name__}, or a dict of its fields"
        )
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, given in value.items():
        if key not in fields:
            raise RequestError(unknown_name(f"field of {name}:", str(key)[:80], fields))
        if not _fits(given, fields[key]):
            raise RequestError(f"{name}[{key!r}] = {given!r:.80}: give {_said(fields[key])}")
    return dataclasses.replace(default, **value)  # type: ignore[type-var]


def _fits(value: object, wanted: Any) -> bool:
    """Whether a value is of an annotated type: plain types, unions, literals and tuples of such."""
    origin, inside = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in inside)
    if origin is typing.Literal:
        return value in inside
    if origin is tuple:
        of_each = inside[0] if len(inside) == 2 and inside[1] is ... else None
        if not isinstance(value, tuple):
            return False
        if of_each is not None:
            return all(_fits(one, of_each) for one in value)
        return len(value) == len(inside) and all(_fits(*pair) for pair in zip(value, inside, strict=True))
    if wanted in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if wanted is float else wanted)


def _said(wanted: Any) -> str:
    origin, inside = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_said(one) for one in inside)
    if origin is typing.Literal:
        return " or ".join(map(repr, inside))
    if origin is tuple:
        return f"a tuple of {_said(inside[0])}"
    return "None" if wanted is types.NoneType else _WORDS.get(wanted, f"a {wanted.__name__}")
