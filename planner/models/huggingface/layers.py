"""Layers of transformers with a forward of the planner's: subclasses of theirs, so that checks for their class find
them.

Copies and pickles look for a class by its name. Such a subclass has the name of the original class, and is made again
from that class and the forward.
"""

import functools
from collections.abc import Callable
from typing import Any


def give_forward(layer: Any, forward: Callable[..., Any]) -> None:
    """Make a layer compute by `forward`, a function of a module, from now on."""
    kind: Any = type(layer)
    layer.__class__ = _with_forward(kind, forward)


@functools.cache
def _with_forward(kind: Any, forward: Callable[..., Any]) -> Any:
    own = {"forward": forward, "__module__": kind.__module__, "__reduce_ex__": _reduced}
    return type(kind.__name__, (kind,), own)


def _reduced(layer: Any, _protocol: object) -> tuple[Any, ...]:
    kind = type(layer)
    return _blank, (kind.__base__, kind.forward), layer.__dict__


def _blank(kind: Any, forward: Callable[..., Any]) -> Any:
    """A layer without anything in it yet."""
    made = _with_forward(kind, forward)
    return made.__new__(made)
