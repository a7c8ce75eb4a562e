"""The requests that a worker may send, and the fields of each: every request is checked here before a server acts on
it.

A frame is JSON and numbers (`frames.py`). Here the types and sizes of its fields are checked, so that the shard only
has to compare them with its state.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import RequestError
from runtime.servers.frames import Frame

_LARGEST = 2**62
_LONGEST_NAME = 4096
_MOST_TABLES = 2**14

Test = Callable[[Any], bool]


def check_message(frame: Frame) -> None:
    """Raise RequestError for a frame that is no request, lacks a field, or has one of another type."""
    wanted = _FIELDS.get(frame.kind)
    if wanted is None:
        raise RequestError(f"unknown question '{frame.kind[:80]}'")
    _check(frame.kind, frame.fields, wanted)
    arrays: list[str] = ["rows", "values"] if frame.kind == "load" else []
    if frame.kind in _OF_TABLES:
        if len(set(frame.fields["tables"])) < len(frame.fields["tables"]):
            raise RequestError(f"'{frame.kind}' names a table twice; name each once")
        names = ("rows", "gradients") if frame.kind == "push" else ("rows",)
        arrays = [f"{name}{number}" for number in range(len(frame.fields["tables"])) for name in names]
    missing = [name for name in arrays if name not in frame.arrays]
    if missing:
        raise RequestError(f"'{frame.kind}' lacks the array '{missing[0]}'")


def _check(kind: str, fields: Mapping[str, Any], wanted: Mapping[str, Test]) -> None:
    for name, test in wanted.items():
        if not test(fields.get(name)):
            raise RequestError(f"'{kind}' has {name} {str(fields.get(name))[:80]!r}")
    unknown = fields.keys() - wanted.keys()
    if unknown:
        raise RequestError(f"'{kind}' has an unknown field '{min(unknown)[:80]}'")


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _number(value: Any) -> bool:
    return type(value) is float or _integer(value)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME


def _boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _optional(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _list_of(test: Test) -> Test:
    return lambda value: isinstance(value, list) and len(value) <= _MOST_TABLES and all(map(test, value))


def _object(wanted: Mapping[str, Test]) -> Test:
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == wanted.keys()
        and all(test(value[name]) for name, test in wanted.items())
    )


_OPTIMIZER = _object(
    {
        "name": _name, "learning_rate": _finite, "betas": lambda value: _list_of(_finite)(value) and len(value) == 2,
        "epsilon": _optional(_finite), "decay": _finite, "initial_sum": _finite, "row_steps": _boolean,
    }
)  # fmt: skip
_TABLE = _object(
    {
        "name": _name, "rows": _count, "width": _count, "optimizer": _OPTIMIZER, "dtype": _name, "partition": _name,
        "shares": _list_of(_finite), "deviation": _finite, "seed": _integer,
    }
)  # fmt: skip

_FIELDS: Mapping[str, Mapping[str, Test]] = {
    "open": {"workers": _count, "staleness": _optional(_count)},
    "create": {"table": _TABLE},
    "load": {"table": _name, "part": _name},
    "ready": {"table": _name},
    "push": {"worker": _count, "step": _count, "tables": _list_of(_name), "learning_rate": _optional(_number)},
    "restart": {"step": _count},
    "pull": {"step": _count, "tables": _list_of(_name)},
    "read": {"step": _count, "tables": _list_of(_name), "part": _name},
    "snapshot": {},
    "status": {},
}
_OF_TABLES = ("push", "pull", "read")
