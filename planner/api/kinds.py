"""Whether values have the types of annotations, and these types in words.

int | None                          a whole number
Sequence[str]                       a list of texts
Mapping[str, Any] | str             a dict or text
"a name of another module"          anything
"""

import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hardware_profiles import Cluster, MixedCluster

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    tuple: "a tuple",
    Cluster: "a machine",
    MixedCluster: "a machine",
    os.PathLike: "a path",
}


def kind_of(value: object) -> str:
    """The type of a value in words: "an int", "a list"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def shown(value: object) -> str:
    """A value as it was written, in 80 characters; its type, where that is all that its text says."""
    try:
        text = repr(value)
    except Exception:
        text = ""
    return f"{text:.80} ({kind_of(value)})" if text and " at 0x" not in text else kind_of(value)


def fits(value: object, wanted: Any, *, words: bool = True) -> bool:
    """Whether a value has an annotated type. A type that is not known here fits. Without `words` a Literal stands for
    any value of its type, so that who knows the words can name the nearest."""
    origin, inside = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any or isinstance(wanted, str | typing.ForwardRef | typing.TypeVar):
        return True
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, one, words=words) for one in inside)
    if origin is typing.Literal:
        return value in inside if words else type(value) in {type(one) for one in inside}
    if origin is Callable:
        return callable(value)
    if origin is Mapping:
        of_key, of_value = inside
        return isinstance(value, Mapping) and all(
            fits(key, of_key, words=words) and fits(one, of_value, words=words) for key, one in value.items()
        )
    if origin is Sequence:
        if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
            return False
        return not isinstance(value, list | tuple | set) or all(fits(one, inside[0], words=words) for one in value)
    if origin is tuple:
        of_each = inside[0] if len(inside) == 2 and inside[1] is ... else None
        if not isinstance(value, tuple):
            return False
        if of_each is not None:
            return all(fits(one, of_each, words=words) for one in value)
        pairs = zip(value, inside, strict=len(value) == len(inside))
        return len(value) == len(inside) and all(fits(one, kind, words=words) for one, kind in pairs)
    if wanted in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if wanted is float else origin or wanted)


def said(wanted: Any) -> str:
    """An annotated type in words."""
    origin, inside = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(map(said, inside)))
    if origin is typing.Literal:
        return " or ".join(map(repr, inside))
    if origin is Callable:
        return "a function"
    if origin is Mapping:
        return "a dict"
    if origin is Sequence or (origin is tuple and len(inside) == 2 and inside[1] is ...):
        each = "" if inside[0] is Any or isinstance(inside[0], typing.ForwardRef) else f" of {said(inside[0])}"
        return f"a {'list' if origin is Sequence else 'tuple'}{each}"
    if origin is tuple:
        return f"a tuple ({', '.join(map(said, inside))})"
    if wanted is types.NoneType:
        return "None"
    return _WORDS.get(origin or wanted, f"a {getattr(wanted, '__name__', wanted)}")
