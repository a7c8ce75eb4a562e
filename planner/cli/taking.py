"""Turns the fields of a dataclass into the options of a command."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Command = Callable[..., None]


def taking(parameter: str, kind: type[Any], options: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Replace the `parameter` of a command that takes a dataclass by one parameter for each of `options` (annotations
    by field of the dataclass)."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    fields = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in options.items()
    ]

    def taking_them(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own.parameters.values() if one.name != parameter
        ]

        def wrapper(**values: Any) -> None:
            given = kind(**{name: values.pop(name) for name in options})
            command(**{parameter: given}, **values)

        signature = own.replace(parameters=[*kept, *fields])
        wrapper.__name__, wrapper.__doc__ = command.__name__, inspect.getdoc(command) or ""
        wrapper.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature looks at first
        wrapper.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        return wrapper

    return taking_them
