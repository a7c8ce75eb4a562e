"""Sets that a module's code iterates over while it is traced, in the order of their members.

    for kind in set(config.layer_types):          {"full_attention", "sliding_attention"}, in one order or the other
        rotary[kind] = self.rotary(x, kind)

Python hashes strings differently in every process (PYTHONHASHSEED), and the order of a set of strings changes with
their hashes. Many models of transformers with two kinds of layers have such loops. Their graph would differ between
processes, and a plan would run only in the process that made it.

So while a module is traced, `set(...)`, called in a file that defines one of its parts, makes a set that iterates in
order; sets that the parts hold become such sets too. Sets in braces, sets made in other files, and members that have no
order stay as they are.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from torch import nn

_T = TypeVar("_T")
MODULE_STATE = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


class _Type(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, set)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, set)


class OrderedSet(set[_T], metaclass=_Type):
    """A set that iterates in the order of its members, where they have one."""

    def __iter__(self) -> Iterator[_T]:
        members = list(super().__iter__())
        with contextlib.suppress(TypeError):
            members.sort(key=lambda one: cast("Any", one))
        return iter(members)


@contextlib.contextmanager
def ordered_sets(module: nn.Module) -> Iterator[None]:
    """While active, sets that the code of a module makes by `set`, and those that its parts hold, have an order."""
    parts = list(module.modules())
    names = dict.fromkeys(one.__module__ for part in parts for one in type(part).__mro__)
    theirs = [name for name in names if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins")]
    files = [file for file in (vars(sys.modules[name]) for name in theirs) if "set" not in file]
    own = [(part, name, value) for part in parts for name, value in vars(part).items() if name not in MODULE_STATE]
    held = [(part, name, value) for part, name, value in own if type(value) is set]
    for file in files:
        file["set"] = OrderedSet
    for part, name, value in held:
        vars(part)[name] = OrderedSet(value)
    try:
        yield
    finally:
        for file in files:
            del file["set"]
        for part, name, value in held:
            vars(part)[name] = value
