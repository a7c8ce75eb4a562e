"""Layers of transformers with methods of the planner's: subclasses of theirs, so that checks for their class find
them.

Copies and pickles look for a class by its name. Such a subclass has the name of the original class, and is made again
from that class and the methods.
"""

import functools
from collections.abc import Callable
from typing import Any

_Methods = tuple[tuple[str, Callable[..., Any]], ...]


def give_forward(layer: Any, forward: Callable[..., Any]) -> None:
    """Make a layer compute by `forward`, a function of a module, from now on."""
    give_methods(layer, forward=forward)


def give_methods(layer: Any, **methods: Callable[..., Any]) -> None:
    """Give a layer these methods in place of its own, from now on."""
    kind: Any = type(layer)
    layer.__class__ = _with_methods(kind, tuple(sorted(methods.items())))


@functools.cache
def _with_methods(kind: Any, methods: _Methods) -> Any:
    own = {**dict(methods), "planner_methods": methods, "__module__": kind.__module__, "__reduce_ex__": _reduced}
    return type(kind.__name__, (kind,), own)


def _reduced(layer: Any, _protocol: object) -> tuple[Any, ...]:
    kind = type(layer)
    return _blank, (kind.__base__, kind.planner_methods), layer.__dict__


def _blank(kind: Any, methods: _Methods) -> Any:
    """A layer without anything in it yet."""
    made = _with_methods(kind, methods)
    return made.__new__(made)
